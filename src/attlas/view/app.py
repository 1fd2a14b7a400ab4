"""The viewer over HTTP: a starlette application behind a secret path, for one browser on this machine."""

from __future__ import annotations

import asyncio
import json
import mimetypes
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from attlas.view import bundle
from attlas.view.corpus import CorpusService

if TYPE_CHECKING:
    from attlas.view.reading import ReadingService
    from attlas.view.service import Service

AnyService: TypeAlias = "Service | ReadingService | CorpusService"


# Headers of every response. The page may load only its own files, runs no inline script, cannot be framed, and sends no
# Referer to other pages; other pages cannot load anything of it.
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
_OWN_HOSTS = ["127.0.0.1", "localhost", "[::1]"]
_MOST_BYTES = 1 << 20  # bytes that the page may send at once
_NO_CACHE = {"cache-control": "no-store"}
_CACHE_FOREVER = {"cache-control": "private, max-age=31536000, immutable"}
_MEDIA_TYPES = {"json": "application/json", "binary": "application/octet-stream"}


def application(
    service: AnyService, token: str, tickets: MutableMapping[str, float], closing: Callable[[], bool]
) -> Starlette:
    """Return the ASGI application of a viewer.

    Parameters
    ----------
    service : Service, ReadingService or CorpusService
        Answers the questions of the page. That of a corpus also has a page for each text that was opened.
    token : str
        Secret first segment of every path of the page.
    tickets : mutable mapping of str to float
        One-time links, ``/open/TICKET``, and the monotonic time when each expires.
    closing : callable
        Returns whether the server stops, so that running questions are given up.

    Notes
    -----
    A request comes from this machine: from another user, another program, or a page of the web in the user's own
    browser. The token keeps out everyone who was not told the address; the trusted hosts keep out a page whose
    domain was pointed at 127.0.0.1 (DNS rebinding); `SameOrigin` keeps out pages of other origins. Any port is
    trusted: the user may have forwarded one over SSH.
    """
    mimetypes.add_type("text/javascript", ".js")  # the registry of Windows may say something else

    def shown_by(request: Request) -> AnyService:
        """Return the service that a request is for: that of an opened text where its path names one."""
        shown: AnyService | None = service
        if isinstance(service, CorpusService) and "text" in request.path_params:
            shown = service.opened(request.path_params["text"])
        if shown is None:
            raise HTTPException(404, "this text was closed; open it again from its corpus")
        return shown

    async def api(request: Request) -> Response:
        return await _answer_in_thread(request, shown_by(request), closing)

    async def post(request: Request) -> Response:
        """Answer a POST request; a corpus has none."""
        shown = shown_by(request)
        if isinstance(shown, CorpusService):
            raise HTTPException(405)
        return await _answer_post(request, shown)

    async def open_ticket(request: Request) -> Response:
        """Lead from a link that works once, and for a time, to the page."""
        if tickets.pop(request.path_params["ticket"], 0.0) < time.monotonic():
            raise HTTPException(404)
        return RedirectResponse(f"/{token}/", 303)

    def file(name: str) -> Callable[[Request], Awaitable[Response]]:
        """Return what answers with a file of the page."""

        async def answer(request: Request) -> Response:
            return FileResponse(static.lookup_path(name)[0])

        return answer

    def http_error(request: Request, error: Any) -> Response:
        """Answer an error; a person who follows the link of a closed viewer gets a page, with how to come back."""
        is_person = request.method == "GET" and "text/html" in request.headers.get("accept", "")
        if error.status_code == 404 and is_person:
            return FileResponse(static.lookup_path("closed.html")[0], 404, _NO_CACHE)
        return _error_response(error.status_code, error.detail)

    static = StaticFiles(packages=[("attlas.view", "static")], html=True)
    page: list[BaseRoute] = [
        Route("/api/{name}", api),
        Route("/api/{name}", post, methods=["POST"]),
        Route("/boot.js", _script("boot")),
        Mount("/", static),
    ]
    if isinstance(service, CorpusService):
        start = Route("/corpus/boot.js", _script("corpus/boot"))
        page = [Route("/", file("corpus.html")), start, Mount("/text/{text:int}", routes=page), *page]
    return Starlette(
        routes=[
            Route("/open/{ticket}", open_ticket),
            # The page at the address of a closed viewer needs no token.
            Route("/closed/boot.js", _script("closed/boot")),
            Route("/closed/style.css", file("closed/style.css")),
            Mount(f"/{token}", routes=page, middleware=[Middleware(SameOrigin)]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=_OWN_HOSTS, www_redirect=False)],
        exception_handlers={HTTPException: http_error, Exception: _internal_error},
    )


class SameOrigin:
    """Refuse requests of pages of other origins, except to follow a link to the page.

    Parameters
    ----------
    app : ASGI application
        Answers the other requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on one request, or refuse it with 403."""
        headers = Headers(scope=scope)
        is_post = scope.get("method") == "POST"
        # A browser sends no Origin with the GET requests of the page itself, and one with every POST.
        origin_fits = headers.get("origin") in (*([] if is_post else [None]), f"http://{headers.get('host')}")
        site_fits = headers.get("sec-fetch-site", "none") in ("same-origin", "none")
        is_link = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
        if origin_fits and (site_fits or (is_link and not is_post)):
            await self._app(scope, receive, send)
        else:
            await _error_response(403, "pages of other origins are not answered")(scope, receive, send)


def _script(start: str) -> Callable[[Request], Awaitable[Response]]:
    """Return what answers with the script of a page."""

    async def answer(request: Request) -> Response:
        return Response(bundle.served_script(start), 200, _NO_CACHE, "text/javascript")

    return answer


async def _answer_in_thread(request: Request, service: AnyService, closing: Callable[[], bool]) -> Response:
    """Answer one question in a thread, which stops between two steps if the browser leaves or the server closes."""
    parameters = dict(request.query_params)
    has_version = "v" in parameters  # the address names the content: a final answer may be cached forever
    disconnected = threading.Event()
    waiting = asyncio.create_task(_wait_for_disconnect(request, disconnected))

    def wanted() -> bool:
        return not (disconnected.is_set() or closing())

    try:
        answer = await run_in_threadpool(service.answer, request.path_params["name"], parameters, wanted)
    finally:
        disconnected.set()
        waiting.cancel()
    if answer.status == 499:
        return _error_response(503, "the viewer is being closed")  # or nobody is there to read this
    caching = _CACHE_FOREVER if has_version and answer.final and answer.status == 200 else _NO_CACHE
    headers = {**caching, "attlas-progress": f"{answer.progress:.6g}"} | (
        {"attlas-sampled": "1"} if answer.sampled else {}
    )
    return Response(answer.body, answer.status, headers, _MEDIA_TYPES[answer.kind])


async def _answer_post(request: Request, service: Service | ReadingService) -> Response:
    """Pass on what the page sends: a small JSON object, a content type that no form of another page can send."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "the content must be JSON")
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BYTES:
                raise HTTPException(413, f"at most {_MOST_BYTES:,} bytes are taken")
    except ClientDisconnect:
        raise HTTPException(400, "the content ended early") from None  # nobody is there to read this
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the content must be JSON") from None
    answer = await run_in_threadpool(service.post, request.path_params["name"], content)
    return Response(answer.body, answer.status, _NO_CACHE, _MEDIA_TYPES[answer.kind])


async def _wait_for_disconnect(request: Request, disconnected: threading.Event) -> None:
    """Set `disconnected` when the client of a request is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    disconnected.set()


def _internal_error(request: Request, error: Exception) -> Response:
    """Answer a request for which the viewer raised an error; uvicorn writes the traceback to its log."""
    answer = _error_response(500, f"the viewer failed: {type(error).__name__}")
    answer.headers["connection"] = "close"  # as uvicorn does after a fault
    return answer


def _error_response(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status, _NO_CACHE)
