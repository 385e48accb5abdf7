"""Middleware between the log and the routes, and the handler of errors that routes raise."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_mtp import errors
from mlx_mtp.server.http.admission import PIECE, HeldBytes, RequestLimiter
from mlx_mtp.server.http.errors import error_response, public
from mlx_mtp.server.http.record import record_of
from mlx_mtp.server.http.request_log import LEFT
from mlx_mtp.text.characters import cut

# Routes of OpenAI's, Cohere's and Ollama's APIs that are no 404, as LiteLLM's proxy takes a server
# out of service on that.
_NOT_OFFERED = {
    *("assistants", "audio", "batches", "containers", "conversations", "embeddings", "evals"),
    *("files", "fine_tuning", "images", "moderations", "ocr", "realtime", "rerank", "responses"),
    *("search", "threads", "uploads", "vector_stores", "videos"),
    *("copy", "create", "delete", "embed", "pull", "push"),
}


Check = Callable[[Scope], None]
"""Raises the MlxMtpError of a request that is refused."""


def refuse(scope: Scope, error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response to an error in the form of the API that was called, and note why."""
    record = record_of(scope)
    record.reason = str(public(error))
    return error_response(error, record.route.error_body, headers)


class CheckMiddleware:
    """Refuses a request with the first error that one of the checks raises."""

    def __init__(self, app: ASGIApp, checks: Sequence[Check]) -> None:
        self._app, self._checks = app, checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            try:
                for check in self._checks:
                    check(scope)
            except errors.MlxMtpError as error:
                app = refuse(scope, error)
        await app(scope, receive, send)


class WriteInPieces:
    """Writes responses piece by piece as clients read them, and counts the bytes that wait.

    At the end of a response it frees the slots and bytes that the request has reserved.
    """

    def __init__(self, app: ASGIApp, limiter: RequestLimiter, held: HeldBytes) -> None:
        self._app, self._limiter, self._held = app, limiter, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start: Message | None = None
        refusal: Response | None = None

        async def send_in_pieces(message: Message) -> None:
            nonlocal start, refusal
            if message["type"] != "http.response.body":
                start = message  # It waits for the body's size.
                return
            body, more = memoryview(message.get("body", b"")), message.get("more_body", False)
            if start is not None:
                begin, start = start, None
                try:
                    # What was generated for an answer is not thrown away.
                    always = record_of(scope).generation is not None
                    self._held.reserve(scope, len(body), always=always)
                except errors.BytesLimitError as error:
                    refusal = refuse(scope, error)
                    await refusal(scope, receive, send)
                else:
                    await send(begin)
            if refusal is None:
                for at in range(0, max(len(body), 1), PIECE):
                    is_last = at + PIECE >= len(body)
                    piece = bytes(body[at : at + PIECE])
                    await send({**message, "body": piece, "more_body": more or not is_last})
                    if not is_last:
                        await asyncio.sleep(0)  # Meanwhile the loop may learn that the client left.

        try:
            await self._app(scope, receive, send_in_pieces)
        finally:
            self._limiter.release(scope)
            self._held.release(scope)


async def on_error(request: Request, error: Exception) -> Response:
    """Answer an error that a route raised."""
    path, headers = request.url.path, None
    if isinstance(error, ClientDisconnect):
        return Response(status_code=LEFT)  # for the log
    if isinstance(error, HTTPException):
        status, text, headers = error.status_code, error.detail, error.headers
        if status == errors.NotFoundError.status:
            error = _no_route(request)
        else:
            error = errors.RequestError(f"{text}: {cut(f'{request.method} {path}')}.")
            error.status = status
    return refuse(request.scope, error, headers)


def _no_route(request: Request) -> errors.RequestError:
    path = cut(request.url.path)
    message = f"There is no route {cut(request.method)} {path}."
    parts = [part for part in path.split("/") if part not in ("", "v1", "api")]
    if parts and parts[0] in _NOT_OFFERED:
        one = "This server has one model, which generates text"
        return errors.UnsupportedRouteError(f"{message} {one}: use another server for this.")
    known = (route.path for route in request.app.routes)
    if near := get_close_matches(path, [each for each in known if each[-1] != "/"], 1):
        message += f" The nearest is {near[0]}."
    return errors.NotFoundError(message)
