"""Connections with an end: no client holds one by sending slowly, by reading slowly, or by opening too many."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from attlas.view.guard import LONGEST_HEADERS, LONGEST_TARGET

__all__ = ["Connection", "HTTPServer"]

MOST = 128  # connections at once; a browser opens six
REQUEST_SECONDS = 10.0  # from its first byte to its last
ANSWER_SECONDS = 30.0  # for the client to read what is sent
IDLE_SECONDS = 20  # between two requests
_FAREWELL_SECONDS = 1.0  # for answers that are being sent when the server stops

_TEXTS = {
    400: b"This is no HTTP request.\n",
    408: b"The request did not come in time.\n",
    431: b"There are too many headers.\n",
    503: b"There are too many connections.\n",
}


class Connection(H11Protocol):
    """uvicorn's own connection, with a deadline for every request and every answer.

    Notes
    -----
    A request that is late, malformed or one too many is answered (408, 400 or 431, 503) and its connection
    closed, without a word in the log: anybody on the machine can send such a thing.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or turn it away."""
        super().connection_made(transport)
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        # Hear of every byte that the client has not taken, so that one that takes none can be left.
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) > MOST:
            self._refuse(503)
        else:
            self._late = self.loop.call_later(REQUEST_SECONDS, self._too_late)

    def data_received(self, data: bytes) -> None:
        """Take some bytes."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Go on to the next request, which may have come already."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_watching()
        self.resume_writing()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def pause_writing(self) -> None:
        """Give the client some time to read."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(ANSWER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Note that the client has read all."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request; uvicorn calls this while it handles the error of the parser."""
        self._refuse(getattr(sys.exception(), "error_status_hint", 400))

    def _watch(self) -> None:
        """Time a request from its first byte; bytes that come one by one do not stretch it."""
        begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not begun or self.transport.is_closing():
            self._stop_watching()
        elif self._late is None:
            self._late = self.loop.call_later(REQUEST_SECONDS, self._too_late)

    def _stop_watching(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        self._refuse(408)

    def _refuse(self, status: int) -> None:
        """Answer without asking the application, where no answer has begun, and close the connection."""
        self._stop_watching()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # what was sent of an answer cannot be unsent
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = _TEXTS.get(status, _TEXTS[400])
            headers = [
                (b"content-type", b"text/plain; charset=utf-8"),
                (b"content-length", str(len(body)).encode("ascii")),
                (b"connection", b"close"),
            ]
            parts = (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        self.transport.close()


class HTTPServer(uvicorn.Server):
    """uvicorn's own server, which ends when it is told to, and leaves the process alone.

    Parameters
    ----------
    app : ASGI application
        What it serves.
    leaving : callable
        Called when it begins to stop; running requests should then end.
    """

    def __init__(self, app: ASGIApp, leaving: Callable[[], object]) -> None:
        settings: dict[str, Any] = {
            "loop": "asyncio",
            "http": Connection,
            "ws": "none",
            "lifespan": "off",
            "interface": "asgi3",
            "log_config": None,
            "log_level": "error",
            "access_log": False,
            "proxy_headers": False,
            "server_header": False,
            "date_header": False,
            "backlog": MOST,
            "timeout_keep_alive": IDLE_SECONDS,
            "h11_max_incomplete_event_size": LONGEST_TARGET + 2 * LONGEST_HEADERS,
        }
        super().__init__(uvicorn.Config(app, **settings))
        self._leaving = leaving

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests end, for a moment; then end their connections."""
        self._leaving()
        timer = asyncio.get_running_loop().call_later(_FAREWELL_SECONDS, self._abort)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGINT, SIGTERM and the end of the terminal; uvicorn's own would raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
        wanted = [getattr(signal, name) for name in names if hasattr(signal, name)]
        # nohup ignores the end of the terminal, and so do we then.
        heard = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; at a second signal, at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
