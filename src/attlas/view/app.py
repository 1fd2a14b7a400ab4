"""The viewer over HTTP: the page's files from a table, and its questions from the service, behind the guard."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attlas.view import guard
from attlas.view.assets import Asset
from attlas.view.guard import Guard, Refusal
from attlas.view.workers import Job, Workers

if TYPE_CHECKING:
    from attlas.view.service import Answer

__all__ = ["Gate", "application"]

_FIELDS = 32  # parameters of a request; the page's own have at most ten
_FOREVER = "private, max-age=31536000, immutable"
_ASK_AGAIN = "private, no-cache"
_NEVER = "no-store"
_MEDIA = {"json": "application/json", "binary": "application/octet-stream"}


def application(workers: Workers, door: Guard, files: Mapping[str, Asset]) -> ASGIApp:
    """Return the ASGI application of a viewer.

    Parameters
    ----------
    workers : Workers
        Who answers what the page asks.
    door : Guard
        Who may ask.
    files : mapping of str to Asset
        The page, by path.
    """

    async def api(request: Request) -> Response:
        return await _api(request, workers)

    async def file(request: Request) -> Response:
        found = files.get(request.path_params["path"])
        if found is None:
            return _error(404, "the page has no such file")
        return _tagged(request, Response(found.body, media_type=found.type), found.etag, _ASK_AGAIN)

    routes = [Route("/api/{name}", api), Route("/{path:path}", file)]
    return Gate(Starlette(routes=routes, exception_handlers={Exception: _fault}), door)


class Gate:
    """Let requests of the page through to an application, and put the security headers on every answer.

    Parameters
    ----------
    app : ASGI application
        What lies behind; it sees paths without the token.
    door : Guard
        Who may pass.
    """

    def __init__(self, app: ASGIApp, door: Guard) -> None:
        self._app = app
        self._guard = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *guard.HEADERS]}
            await send(message)

        line = (scope["method"], scope["raw_path"], scope["query_string"])
        asked = guard.Request(*line, scope["headers"], scope["http_version"])
        admitted = self._guard.admit(asked)
        if isinstance(admitted, Refusal):
            await _refused(admitted)(scope, receive, guarded)
        else:
            inner = {**scope, "path": admitted, "raw_path": admitted.encode("ascii", "replace"), "root_path": ""}
            await self._app(inner, receive, guarded)


def _refused(refusal: Refusal) -> Response:
    headers = {"cache-control": _NEVER}
    if refusal.location:
        headers["location"] = refusal.location
    elif refusal.status == 405:
        headers["allow"] = "GET, HEAD"
    if refusal.status in (405, 413, 414, 431, 505):  # there may be more to come of it, which nobody wants to read
        headers["connection"] = "close"
    return Response(refusal.text + "\n", refusal.status, headers, "text/plain; charset=utf-8")


async def _api(request: Request, workers: Workers) -> Response:
    """Ask the service, unless the one who asked goes away before the answer is there."""
    try:
        given = _parameters(request.scope["query_string"])
    except ValueError as error:
        return _error(400, str(error))
    fixed = given.pop("v", None) is not None  # the address names the content: an answer that is final stays true
    job = workers.submit(request.path_params["name"], given)
    answer = await _awaited(job, request.receive)
    if answer is None or answer.status == 499:
        return _error(503, "the viewer is being closed")  # or nobody is there to read this
    return _response(request, answer, fixed=fixed)


async def _awaited(job: Job, receive: Receive) -> Answer | None:
    """Wait for an answer, or for the end of the connection; None then."""
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((job.answer, gone), return_when=asyncio.FIRST_COMPLETED)
        return job.answer.result() if job.answer.done() else None
    finally:
        gone.cancel()
        job.drop()
        job.answer.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _parameters(query: bytes) -> dict[str, str]:
    """Return the parameters of a query, each once.

    Raises
    ------
    ValueError
        If there are too many, one comes twice, or the text is not UTF-8.
    """
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_FIELDS)
    except ValueError:
        raise ValueError("the query cannot be read") from None
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a parameter is given twice")
    return found


def _response(request: Request, answer: Answer, *, fixed: bool) -> Response:
    response = Response(answer.body, answer.status, media_type=_MEDIA[answer.kind])
    response.headers["attlas-progress"] = f"{answer.progress:.6g}"
    if getattr(answer, "sampled", False):
        response.headers["attlas-sampled"] = "1"
    if answer.status != 200 or not answer.final:
        response.headers["cache-control"] = _NEVER
        return response
    return _tagged(request, response, answer.etag, _FOREVER if fixed else _ASK_AGAIN)


def _tagged(request: Request, response: Response, etag: str, caching: str) -> Response:
    """Give an answer its tag; where the browser has it already, leave the body out."""
    tag = etag if etag.startswith(('"', 'W/"')) else f'"{etag}"'
    known = [name.strip().removeprefix("W/") for name in request.headers.get("if-none-match", "").split(",")]
    if tag.removeprefix("W/") in known or known == ["*"]:
        response = Response(status_code=304)
    response.headers["etag"] = tag
    response.headers["cache-control"] = caching
    return response


def _fault(request: Request, error: Exception) -> Response:
    """Answer where the viewer itself has failed; the server writes the trace to its log."""
    found = _error(500, f"the viewer failed: {type(error).__name__}")
    found.headers["connection"] = "close"  # as the server does after a fault
    return found


def _error(status: int, text: str) -> Response:
    return Response(json.dumps({"error": text}), status, {"cache-control": _NEVER}, "application/json")
