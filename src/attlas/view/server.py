"""The viewer as a local web server: `serve` runs until Ctrl-C, `Server` runs beside other work."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attlas
from attlas.errors import DtypeError, PortError, ShapeError, import_extra, public
from attlas.foundation.installation import install_command
from attlas.matrix import AttentionMatrix
from attlas.recording.atlas import Atlas
from attlas.recording.metadata import model_name
from attlas.view.corpus import CorpusService
from attlas.view.reading import ReadingService
from attlas.view.service import Service

if TYPE_CHECKING:
    from attlas.corpus import Corpus


HOST = "127.0.0.1"
_FIRST_PORT, _TRIED_PORTS = 8750, 50  # tried one after another; then any that is free
_TICKET_SECONDS = 60.0  # for which an address of `Server.once` can be opened
_SHUTDOWN_SECONDS = 1  # for answers that are being sent when the server stops


class Server:
    """A viewer on a port of this machine, as a context manager or with `run`.

    It listens on 127.0.0.1 only, and answers only requests with the token of `url`.

    Parameters
    ----------
    service : Service, ReadingService or CorpusService
        What answers the page; it is not closed here.
    port : int, optional
        Which port; 0 for any that is free. The default is the next free one from 8750 on.

    Attributes
    ----------
    url : str
        Address of the page, with a random token; whoever knows it can read the text and its attention.
    port : int
        Where it listens.

    Raises
    ------
    MissingExtraError
        If starlette or uvicorn is not installed.
    PortError
        If the port is taken.
    ShapeError
        If `port` is no port.

    See Also
    --------
    attlas.view.serve : opens the browser and stays.

    Notes
    -----
    Requests run in threads. When a browser gives a request up, its computation stops before the next tile.

    Examples
    --------
    >>> import attlas, torch, urllib.request
    >>> from attlas.view import Server, Service
    >>> A = attlas.attend(torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 16))
    >>> service = Service(A)
    >>> with Server(service, port=0) as server, urllib.request.urlopen(server.url + "api/info") as answer:
    ...     answer.status
    200
    >>> service.close()
    """

    def __init__(self, service: Service | ReadingService | CorpusService, *, port: int | None = None) -> None:
        need_extra()
        import uvicorn

        from attlas.view.app import HEADERS, application

        self._socket = _listening_socket(port)
        self.port = int(self._socket.getsockname()[1])
        token = secrets.token_urlsafe(24)
        self.url = f"http://{HOST}:{self.port}/{token}/"
        self._tickets: dict[str, float] = {}
        app = application(service, token, self._tickets, lambda: self._http.should_exit)
        self._http = uvicorn.Server(
            uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                headers=HEADERS,
                timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            )
        )
        self._thread: threading.Thread | None = None

    def once(self) -> str:
        """Return an address that leads to the page once, within a minute: for a command line, which others can see."""
        ticket = secrets.token_urlsafe(24)
        self._tickets[ticket] = time.monotonic() + _TICKET_SECONDS
        return f"http://{HOST}:{self.port}/open/{ticket}"

    def run(self) -> None:
        """Serve in this thread until Ctrl-C, SIGTERM, the end of the terminal or `stop`; a server runs once."""
        try:
            with self._signals_stop_server():
                self._http.run(sockets=[self._socket])
        finally:
            self._socket.close()

    @contextlib.contextmanager
    def _signals_stop_server(self) -> Iterator[None]:
        """Let signals stop the server, then restore their handlers: uvicorn itself would raise the signal once more."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)]
        # nohup ignores the end of the terminal, and so does the viewer then.
        handled = [number for name in names if signal.getsignal(number := getattr(signal, name)) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._http.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def start(self) -> None:
        """Serve in a thread of its own until `stop`."""
        self._thread = threading.Thread(target=self.run, name="attlas-view", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving: running requests are given up, connections closed."""
        self._http.should_exit = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        elif not self._http.started:
            self._socket.close()

    def __enter__(self) -> Self:
        # The server runs in a thread of its own until the block ends.
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def serve(
    source: Atlas | AttentionMatrix | Corpus | str | os.PathLike[str],
    *,
    tokens: Any = None,
    title: str | None = None,
    compare: Atlas | AttentionMatrix | str | os.PathLike[str] | None = None,
    model: Any = None,
    tokenizer: Any = None,
    port: int | None = None,
    browser: bool = True,
    at: str = "",
    announce: Callable[[str], object] | None = None,
) -> None:
    """Open the viewer in the browser, and serve it until Ctrl-C.

    Parameters
    ----------
    source : Atlas, AttentionMatrix, Corpus, str or Path
        A recording or a corpus, or its folder, or a matrix.
    tokens : list of str, or of such, optional
        Text of each token of sequence 0, or a list for each sequence; an atlas knows them. A pair, of queries and
        keys, for a matrix of two texts.
    title : str, optional
        What the page is called; the default is the name of the folder.
    compare : Atlas, AttentionMatrix, str or Path, optional
        A second recording of as many tokens: another checkpoint, model or text. Each head is shown with the one of the
        same layer and number there, as a ratio, as a difference or side by side.
    model : nn.Module, optional
        The model of a corpus: from a sampled text, the page then opens its full map. With a recording, a model of
        transformers that reads texts typed on the page; `tokenizer` is then needed.
    tokenizer : tokenizer of transformers, optional
        That of `model`.
    port : int, optional
        Which port of 127.0.0.1; the default is the next free one from 8750 on.
    browser : bool, default True
        Whether a browser is opened, where there is one with windows.
    at : str
        Where the page opens: a link of another run of the viewer, or what stands behind its ``#``.
    announce : callable, optional
        Is told the address, once, when the server listens; the default writes it to the standard output.

    Raises
    ------
    DtypeError
        If a recording has a `model` and no `tokenizer`.
    MissingExtraError
        If starlette or uvicorn is not installed.
    PortError
        If the port is taken.
    RecordingError
        If the folder is no atlas.
    ShapeError
        If no matrix of `compare` has the size of one that is shown.

    See Also
    --------
    attlas.view.Server : the same beside other work.

    Notes
    -----
    Overviews of a folder ``run.atlas`` are kept in ``run.atlas.view`` beside it, so that a second opening is
    instant. Nothing that is computed leaves the machine.

    Examples
    --------
    >>> import attlas
    >>> attlas.view.serve("run.atlas")  # doctest: +SKIP
    http://127.0.0.1:8750/FmmJ2cW4qA9b5cYzX0oLr1Qd7u3ePpTk/
    """
    need_extra()
    shown: Any = attlas.load(source) if isinstance(source, str | os.PathLike) else source
    other: Any = attlas.load(compare) if isinstance(compare, str | os.PathLike) else compare
    settings: dict[str, Any] = {} if title is None else {"title": title}
    if isinstance(source, str | os.PathLike):
        folder = Path(source)
        settings = {"title": folder.resolve().name, "store": store_beside(folder), "folder": folder} | settings
    if isinstance(compare, str | os.PathLike):
        settings |= {"compare_title": Path(compare).resolve().name}
    service: Service | ReadingService | CorpusService
    if isinstance(shown, Atlas | AttentionMatrix):
        service = Service(shown, tokens=tokens, compare=other, **settings)
        if model is not None:
            if tokenizer is None:
                fix = "serve(atlas, model=model, tokenizer=tokenizer)"
                raise DtypeError("a model that reads texts needs its tokenizer.", "tokenizer = None", fix, where="view")
            service = ReadingService(service, lambda: (model, tokenizer), name=model_name(model))
    else:
        name, loaders = settings.get("title"), None if model is None else [lambda: model]
        service = CorpusService([shown], titles=name and [name], loaders=loaders)
    with contextlib.closing(service):
        serve_until_stopped(service, port=port, browser=browser, announce=announce or _print_address, at=at)


def serve_until_stopped(
    service: Service | ReadingService | CorpusService,
    *,
    port: int | None,
    browser: bool,
    announce: Callable[[str], object],
    at: str = "",
) -> None:
    """Serve until Ctrl-C; say the address once, and open a browser if one is wanted and there.

    Parameters
    ----------
    service : Service, ReadingService or CorpusService
        What answers the page.
    port : int or None
        Which port; None for the next free one.
    browser : bool
        Whether a browser is opened.
    announce : callable
        Is told the address.
    at : str
        Where the page opens: a link of another run of the viewer, or what stands behind its ``#``.
    """
    server = Server(service, port=port)
    anchor = at.rpartition("#")[2]
    anchor = f"#{anchor}" if anchor else ""
    announce(f"{server.url}{anchor}")
    if browser and has_browser():
        threading.Thread(target=_open_in_browser, args=(f"{server.once()}{anchor}",), daemon=True).start()
    server.run()


def store_beside(folder: Path) -> Path:
    """Return the folder where the overviews of an atlas are kept."""
    folder = folder.resolve()
    return folder.with_name(f"{folder.name}.view")


def _print_address(url: str) -> None:
    """Print an address at once, also into a pipe."""
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()


def has_browser() -> bool:
    """Return whether there is a browser with windows; one that runs in the terminal would take the terminal over."""
    if os.environ.get("BROWSER"):
        return True
    if sys.platform in ("darwin", "win32"):
        return True
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


def _open_in_browser(url: str) -> None:
    """Open an address in the user's browser; the address has been printed for where that fails."""
    with contextlib.suppress(webbrowser.Error, OSError):
        webbrowser.open(url)


@public("view")
def need_extra() -> None:
    """Raise a MissingExtraError unless starlette and uvicorn are installed.

    Raises
    ------
    MissingExtraError
        If one of them is not.
    """
    for name in ("starlette", "uvicorn"):
        rule = "starlette and uvicorn must be installed to open the viewer."
        import_extra(name, rule, install_command("view"))


def _listening_socket(port: int | None) -> socket.socket:
    """Return a socket that listens on a port of 127.0.0.1; without `port`, on the next free one."""
    if port is not None:
        if not 0 <= port <= 65_535:
            fix = f"--port {_FIRST_PORT}, or leave it out"
            raise ShapeError("the port must be between 0 and 65535.", f"port {port}", fix, where="view")
        try:
            return socket.create_server((HOST, port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            found = f"port {port} is taken" if taken else f"{os.strerror(error.errno or 0)}: port {port}"
            fix = "another --port, or none for the next that is free"
            raise PortError("the port must be free.", found, fix, where="view") from None
    for number in range(_FIRST_PORT, _FIRST_PORT + _TRIED_PORTS):
        try:
            return socket.create_server((HOST, number))
        except OSError:
            continue
    return socket.create_server((HOST, 0))
