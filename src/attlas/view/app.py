"""The viewer over HTTP: a starlette application behind a secret path, for one browser on this machine."""

from __future__ import annotations

import asyncio
import mimetypes
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    from attlas.view.service import Service

__all__ = ["HEADERS", "SameOrigin", "application"]

# What every answer carries. The page may load its own files and nothing else, run no inline script, sit in no frame,
# and tell no other page where it was; other pages may not load anything of it.
HEADERS = [
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
]
_HOSTS = ["127.0.0.1", "localhost", "[::1]"]
_NO_CACHE = {"cache-control": "no-store"}
_CACHE_FOR_GOOD = {"cache-control": "private, max-age=31536000, immutable"}
_MEDIA = {"json": "application/json", "binary": "application/octet-stream"}


def application(
    service: Service, token: str, tickets: MutableMapping[str, float], closing: Callable[[], bool]
) -> Starlette:
    """Return the ASGI application of a viewer.

    Parameters
    ----------
    service : Service
        Answers the questions of the page.
    token : str
        First segment of every path of the page.
    tickets : mutable mapping of str to float
        One-time links, ``/open/TICKET``, and the monotonic time when each expires.
    closing : callable
        Returns whether the server stops; running questions are then given up.

    Notes
    -----
    A request comes from this machine: from another user, another program, or a page of the web in the user's own
    browser. The token keeps out everyone who was not told the address; the trusted hosts keep out a page whose
    domain was pointed at 127.0.0.1 (DNS rebinding); `SameOrigin` keeps out pages of other origins. Any port is
    trusted: the user may have forwarded one over SSH.
    """
    mimetypes.add_type("text/javascript", ".js")  # the registry of Windows may say something else

    async def api(request: Request) -> Response:
        return await _api(request, service, closing)

    async def enter(request: Request) -> Response:
        if tickets.pop(request.path_params["ticket"], 0.0) < time.monotonic():
            raise HTTPException(404)
        return RedirectResponse(f"/{token}/", 303)

    page = [Route("/api/{name}", api), Mount("/", StaticFiles(packages=[("attlas.view", "static")], html=True))]
    return Starlette(
        routes=[
            Route("/open/{ticket}", enter),
            Mount(f"/{token}", routes=page, middleware=[Middleware(SameOrigin)]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS, www_redirect=False)],
        exception_handlers={HTTPException: _refused, Exception: _failed},
    )


class SameOrigin:
    """Refuse what a page of another origin asks for; a link to the page may stand anywhere.

    Parameters
    ----------
    app : ASGI application
        Answers the other requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = Headers(scope=scope)
        own = headers.get("origin") in (None, f"http://{headers.get('host')}")
        near = headers.get("sec-fetch-site", "none") in ("same-origin", "none")
        link = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
        if own and (near or link):
            await self._app(scope, receive, send)
        else:
            await _error(403, "pages of other origins are not answered")(scope, receive, send)


async def _api(request: Request, service: Service, closing: Callable[[], bool]) -> Response:
    """Answer one question in a thread, which stops between two steps when nobody waits any more."""
    parameters = dict(request.query_params)
    named = parameters.pop("v", None) is not None  # the address names the content: a final answer stays true
    gone = threading.Event()
    watching = asyncio.create_task(_disconnected(request, gone))

    def wanted() -> bool:
        return not (gone.is_set() or closing())

    try:
        answer = await run_in_threadpool(service.answer, request.path_params["name"], parameters, wanted)
    finally:
        gone.set()
        watching.cancel()
    if answer.status == 499:
        return _error(503, "the viewer is being closed")  # or nobody is there to read this
    caching = _CACHE_FOR_GOOD if named and answer.final and answer.status == 200 else _NO_CACHE
    headers = {**caching, "attlas-progress": f"{answer.progress:.6g}"} | (
        {"attlas-sampled": "1"} if answer.sampled else {}
    )
    return Response(answer.body, answer.status, headers, _MEDIA[answer.kind])


async def _disconnected(request: Request, gone: threading.Event) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    gone.set()


def _refused(request: Request, error: Exception) -> Response:
    status, text = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, "")
    return _error(status, text)


def _failed(request: Request, error: Exception) -> Response:
    """Answer where the viewer itself has failed; uvicorn writes the trace to its log."""
    answer = _error(500, f"the viewer failed: {type(error).__name__}")
    answer.headers["connection"] = "close"  # as uvicorn does after a fault
    return answer


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status, _NO_CACHE)
