"""The one place where errors become HTTP responses, in the shape of the API that was called."""

import asyncio
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_mtp import errors
from mlx_mtp.server.api.schema import FORM, UNSUPPORTED
from mlx_mtp.server.http.admission import PIECE, HeldBytes
from mlx_mtp.server.http.request_log import LEFT, record_of
from mlx_mtp.text.characters import cut

Check = Callable[[Scope], None]
_CLOSE = {"Connection": "close"}
_HEADERS: dict[type[Exception], dict[str, str]] = {
    errors.BytesLimitError: _CLOSE,
    errors.AuthenticationError: {"WWW-Authenticate": "Bearer"},
    errors.BodyTimeoutError: _CLOSE,
    errors.ConnectionLimitError: _CLOSE,
    errors.DrainingError: _CLOSE,
    # SDKs would wait as long again, or ask again for what was ended on purpose.
    errors.RequestTimeoutError: {"x-should-retry": "false"},
    errors.RequestCancelledError: {"x-should-retry": "false"},
}
# Of OpenAI's, Cohere's and Ollama's APIs. A 404 there would take the server out of service for all
# else that LiteLLM's proxy sends it.
_NOT_OFFERED = {
    *("assistants", "audio", "batches", "containers", "conversations", "embeddings", "evals"),
    *("files", "fine_tuning", "images", "moderations", "ocr", "realtime", "rerank", "responses"),
    *("search", "threads", "uploads", "vector_stores", "videos"),
    *("copy", "create", "delete", "embed", "pull", "push"),
}
_ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


def error_body(error: Exception) -> dict[str, Any]:
    """The JSON of an error in OpenAI's shape, as responses and streams carry it."""
    error = _shown(error)
    fields = {"message": str(error), "type": error.type, "param": error.param, "code": error.code}
    return {"error": fields}


def anthropic_error_body(error: Exception) -> dict[str, Any]:
    """The same in Anthropic's shape."""
    shown = _shown(error)
    kind = _ANTHROPIC_TYPES.get(shown.status, shown.type)
    return {"type": "error", "error": {"type": kind, "message": str(shown)}}


def ollama_error_body(error: Exception) -> dict[str, Any]:
    """The same in Ollama's shape."""
    return {"error": str(_shown(error))}


_SHAPES = {
    **dict.fromkeys(("/v1/messages", "/messages"), anthropic_error_body),
    "/api/": ollama_error_body,
}


def error_response(
    error: Exception, path: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """The HTTP response to an error on this path."""
    shown = _shown(error)
    more = {**_HEADERS.get(type(shown), {}), **(headers or {})}
    if shown.retry_after is not None:
        more["Retry-After"] = str(shown.retry_after)
    if shown is not error:
        more |= _CLOSE  # It is raised again for the log, and uvicorn then closes.
    body = next((_SHAPES[start] for start in _SHAPES if path.startswith(start)), error_body)
    return JSONResponse(body(shown), status_code=shown.status, headers=more)


class CheckMiddleware:
    """Answers with the error that `check` raises, and calls `at_end` after each response."""

    def __init__(self, app: ASGIApp, check: Check, at_end: Check = lambda _: None) -> None:
        self._app, self._check, self._at_end = app, check, at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        try:
            if scope["type"] == "http":
                self._check(scope)
        except errors.MlxMtpError as error:
            record_of(scope).reason = str(error)
            app = error_response(error, scope["path"])
        try:
            await app(scope, receive, send)
        finally:
            self._at_end(scope)


class WriteInPieces:
    """Writes answers as their clients read them, and counts those that wait."""

    def __init__(self, app: ASGIApp, held: HeldBytes) -> None:
        self._app, self._held = app, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = None
        refusal: Response | None = None

        async def write(message: Message) -> None:
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
                    self._held.take(scope, len(body), always=always)
                except errors.BytesLimitError as error:
                    record_of(scope).reason = str(error)
                    refusal = error_response(error, scope["path"])
                    await refusal(scope, receive, send)
                else:
                    await send(begin)
            if refusal is None:
                for at in range(0, max(len(body), 1), PIECE):
                    rest = more or at + PIECE < len(body)
                    piece = bytes(body[at : at + PIECE])
                    await send({"type": message["type"], "body": piece, "more_body": rest})
                    if at + PIECE < len(body):
                        await asyncio.sleep(0)  # That a client has left is known after a while.

        try:
            await self._app(scope, receive, write if scope["type"] == "http" else send)
        finally:
            self._held.give_back(scope)


def from_validation(error: ValidationError) -> errors.RequestError:
    """The first thing that pydantic found wrong, with the field's name as a client writes it."""
    first = error.errors(include_url=False, include_input=False)[0]
    location = [*first["loc"], first.get("ctx", {}).get("field")]
    parts = [part for part in location if part is not None and not str(part).startswith(FORM)]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    param = cut(name.removeprefix(".")) or None
    if first["type"] == "extra_forbidden":
        message = f"{param} is not a parameter of this server."
        return errors.UnsupportedParameterError(message, param=param)
    if first["type"] == "missing":
        return errors.InvalidRequestError(f"{param} is required.", param=param)
    unsupported = first["type"] in (UNSUPPORTED, "literal_error")
    kind = errors.UnsupportedParameterError if unsupported else errors.InvalidRequestError
    return kind(f"{param or 'The body'}: {first['msg']}.", param=param)


def _shown(error: Exception) -> errors.MlxMtpError:
    if isinstance(error, errors.MlxMtpError):
        return error
    return errors.MlxMtpError("The server failed; see its log.")


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
    record_of(request.scope).reason = str(_shown(error))
    return error_response(error, path, headers)
