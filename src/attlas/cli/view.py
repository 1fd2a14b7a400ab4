"""``attlas view``: a recording in the browser, every cell of it, or all heads of corpora."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import signal
import sys
import tempfile
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attlas import models
from attlas.cli import record
from attlas.cli.corpora import opened_corpora
from attlas.cli.files import is_corpus, open_folder, title_of
from attlas.cli.formatting import plural
from attlas.cli.loading import load
from attlas.cli.options import parse
from attlas.cli.terminal import Terminal, UsageError
from attlas.errors import AttlasError
from attlas.foundation.installation import install_command

if TYPE_CHECKING:  # a command that shows no corpus loads neither pyarrow nor the viewer
    from attlas.corpus import Corpus
    from attlas.view.corpus import Loader, NoModelError

_SHUTDOWN_SECONDS = 3.0  # seconds that the end waits for what is computed in the background
_FIELD = re.compile(r"[a-z]+=[^&#]*")  # of the address of a page
_RECORD_OPTIONS = ("model", "text", "tokens", "generate", "out")


def run(arguments: Namespace, terminal: Terminal) -> None:
    """Record if asked, open the folder, and serve it until Ctrl-C."""
    from attlas.view.server import need_extra  # the viewer, which other commands do without

    folders = arguments.atlas
    # Beside a folder, the model is that which reads texts typed on the page.
    recorded = [name for name in _RECORD_OPTIONS if not (folders and name == "model")]
    options = [name for name in recorded if getattr(arguments, name) is not None]
    if len(folders) > 1 or any(map(is_corpus, folders)):
        _view_corpora(arguments, options, terminal)
        return
    need_extra()
    _check_place(arguments.at)
    if folders and options:
        rule = "name a recording, or what is recorded now, and not both."
        fix = f"attlas view {shlex.quote(str(folders[0]))}"
        raise UsageError(rule, f"{folders[0]} and {_option_name(options[0])}", fix)
    if not folders and not options:
        fix = "attlas view run.atlas, or attlas view --text FILE"
        raise UsageError("name a recording, or a text that is recorded now.", "neither", fix)
    with _exit_on_sigterm(), contextlib.ExitStack() as stack:
        # Beside a second recording, no model reads texts typed on the page.
        model = None if arguments.compare else arguments.model or (None if folders else models.path())
        folder = folders[0] if folders else _record_for_view(arguments, stack, terminal)
        idle = show(folder, terminal, arguments, model)
    if not idle:  # a long step is still computed, and a person who has pressed Ctrl-C waits for nothing
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # an exit as usual would stop the step's thread in the middle of foreign code, which aborts


def _option_name(name: str) -> str:
    """Return an option as users type it."""
    return "-o" if name == "out" else f"--{name}"


def _check_place(at: str | None) -> None:
    """Raise a UsageError where ``--at`` names no place: neither a link of a page nor the part after its #."""
    if at is None or all(_FIELD.fullmatch(part) for part in at.rpartition("#")[2].split("&")):
        return
    rule = "--at must be a link copied from the viewer, or the part after its #."
    raise UsageError(rule, f"--at {at}", "--at 'e=2&h=4&pin=147.133'")


def _view_corpora(arguments: Namespace, options: list[str], terminal: Terminal) -> None:
    """Show corpora; `options` are those of a recording that are given and do not fit."""
    folders = arguments.atlas
    command = f"attlas view {shlex.quote(str(folders[0]))}"
    _check_place(arguments.at)
    if arguments.compare is not None:
        fix = f"{command} {shlex.quote(str(arguments.compare))}"
        raise UsageError("corpora are compared by naming them all.", f"--compare {arguments.compare}", fix)
    if options == ["out"]:
        fix = f"attlas report {shlex.join(map(str, folders))} -o {shlex.quote(str(arguments.out))}"
        raise UsageError("attlas report writes a corpus as one HTML file.", "-o", fix)
    if options:
        raise UsageError("a corpus is opened as it is; nothing is recorded.", _option_name(options[0]), command)
    with _exit_on_sigterm():
        _show_corpora(folders, terminal, arguments)


def _show_corpora(folders: Sequence[Path], terminal: Terminal, arguments: Namespace) -> None:
    """Serve the page of some corpora until Ctrl-C; ``--model`` is for those that do not say where theirs is."""
    from attlas.view.corpus import CorpusService

    corpora = opened_corpora(folders, terminal, "attlas view")
    lines = []
    for corpus in corpora:
        counts, name = corpus.config["counts"], corpus.config["model"]["name"]
        size = f"{counts['tokens']:,} tokens in {counts['texts']:,} texts"
        lines.append(f"{len(corpus.heads):,} heads of {name}, {size}")
        if not corpus.config["complete"]:
            lines.append("not finished: attlas corpus with the same arguments goes on where it was")
    loaders = [_loader_of_model(corpus, arguments.model) for corpus in corpora]
    titles = [folder.resolve().name for folder in folders]
    with contextlib.closing(CorpusService(corpora, titles=titles, loaders=loaders)) as service:
        _serve_until_stopped(service, [*lines, "Ctrl-C closes it"], terminal, arguments)
    terminal.complain("the viewer is closed.")


def _loader_of_model(corpus: Corpus, given: str | None) -> Loader | NoModelError:
    """Return the function that loads the model of a corpus, or the reason why none can."""
    from attlas.view.corpus import NO_PLACE, NO_TRANSFORMERS, NOT_THERE, OTHER_MODEL, NoModelError

    facts = corpus.config["model"]
    source = given or facts["path"]
    if source is None:
        return NoModelError(NO_PLACE)
    if not Path(source).exists() and (Path(source).is_absolute() or given is not None):
        return NoModelError(NOT_THERE, source)
    if importlib.util.find_spec("transformers") is None:
        return NoModelError(NO_TRANSFORMERS, install_command("hf"))

    def loaded() -> Any:
        """Return the model; raise where it is another one than that which read the corpus."""
        from attlas.corpus.reading import fingerprint

        model = load(source, dtype=getattr(torch, facts["dtype"])).model
        if fingerprint(model) != facts["fingerprint"]:
            raise NoModelError(OTHER_MODEL, source)
        return model

    return loaded


def show(folder: Path, terminal: Terminal, arguments: Namespace, model: str | Path | None) -> bool:
    """Serve a recording until Ctrl-C.

    Parameters
    ----------
    folder : Path
        What `attlas record` has written.
    terminal : Terminal
        Where the address is written.
    arguments : Namespace
        Those of ``attlas view``: how it is served, at which place it opens, and what it is compared with.
    model : str or Path, optional
        The model that reads texts typed on the page.

    Returns
    -------
    bool
        Whether nothing is computed any more.

    Raises
    ------
    UsageError
        If there is no recording, or nothing in it.
    """
    from attlas.view.reading import ReadingService
    from attlas.view.server import store_beside
    from attlas.view.service import Service

    with terminal.step(f"opening {folder.name}"):
        atlas = open_folder(folder)
    if not atlas.entries:
        raise UsageError("the recording must have an attention.", f"none in {folder}", "attlas record -o run.atlas")
    of = f" of {atlas.model}" if atlas.model else ""
    tokens = f", {len(atlas.tokens):,} tokens" if atlas.tokens else ""
    heads = plural(max(len(entry.heads) for entry in atlas.entries), "head")
    line = f"{plural(len(atlas), 'layer')} × {heads}{of}{tokens}"
    compared: dict[str, Any] = {}
    if arguments.compare is not None:
        with terminal.step(f"opening {arguments.compare.name}"):
            second = open_folder(arguments.compare)
        compared = {"compare": second, "compare_title": title_of(second, arguments.compare)}
    shown = Service(atlas, title=title_of(atlas, folder), store=store_beside(folder), folder=folder, **compared)
    service: Service | ReadingService = shown
    if model is not None:

        def loader() -> tuple[Any, Any]:
            loaded = load(model)
            return loaded.model, loaded.tokenizer

        name = models.path().name if str(model) == "shipped" else Path(model).name
        service = ReadingService(shown, loader, name=name)
    closing = threading.Thread(target=service.close, daemon=True)
    try:
        _serve_until_stopped(service, [f"{line}; Ctrl-C closes it"], terminal, arguments)
    finally:
        closing.start()
        closing.join(_SHUTDOWN_SECONDS)
    terminal.complain("the viewer is closed.")
    return not closing.is_alive()


def _serve_until_stopped(service: Any, lines: Sequence[str], terminal: Terminal, arguments: Namespace) -> None:
    """Serve a page until Ctrl-C; say its address, and lines about what is served."""
    from attlas.view.server import serve_until_stopped

    def announce(url: str) -> None:
        """Print the address and what the viewer was told to say."""
        terminal.say(url, "bold")
        for line in lines:
            terminal.say(f"  {line}", "dim")

    settings = {"port": arguments.port, "browser": not arguments.no_browser, "at": arguments.at or ""}
    serve_until_stopped(service, announce=announce, **settings)


def open_if_attended(folder: Path, terminal: Terminal, *, browser: bool) -> None:
    """Open a recording if a user sits before a graphical browser; else print how to open it.

    Parameters
    ----------
    folder : Path
        The recording.
    terminal : Terminal
        Where that is said.
    browser : bool
        Whether it may be opened at all.
    """
    from attlas.view.server import has_browser, need_extra

    command = f"attlas view {shlex.quote(str(folder))}"
    try:
        need_extra()
    except AttlasError:
        terminal.say(f"  {command}  needs:")
        terminal.say(f"  {install_command('view')}")
        return
    if browser and _is_interactive(terminal) and has_browser():
        terminal.say()
        run(parse(["view", "--", str(folder)]), terminal)
    else:
        terminal.say(f"  {terminal.style(command, 'bold')}  pans and zooms through every cell, in the browser")


def _is_interactive(terminal: Terminal) -> bool:
    """Tell whether a person reads the output and can press Ctrl-C: no pipe, no log, no continuous integration."""
    return terminal.out.isatty() and sys.stdin is not None and sys.stdin.isatty() and not os.environ.get("CI")


def _record_for_view(arguments: Namespace, stack: contextlib.ExitStack, terminal: Terminal) -> Path:
    """Record what was asked for; without a folder of the user's, one that goes when the viewer is closed."""
    folder = arguments.out
    if folder is None:
        beside = stack.enter_context(tempfile.TemporaryDirectory(prefix="attlas-view-", ignore_cleanup_errors=True))
        folder = Path(beside) / "run.atlas"
    words = ["record", "--output", str(folder)]
    for name in ("model", "text", "tokens", "generate"):
        value = getattr(arguments, name)
        words += [] if value is None else [f"--{name}", str(value)]
    if arguments.model in (None, "shipped") and not arguments.generate:  # the layout of the shipped model is known
        words.append("--parts")
    record.write(parse(words), terminal)
    return Path(folder)


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process as an exit does, so that temporary folders go; the server stops at it by itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
