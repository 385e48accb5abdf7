"""The one place where errors become HTTP answers, in the shape of the API that was called."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from mlx_mtp.errors import (
    BodyTimeoutError,
    ConnectionLimitError,
    DrainingError,
    EngineError,
    InvalidRequestError,
    MlxMtpError,
    NotFoundError,
    RequestError,
    RequestTimeoutError,
    UnsupportedParameterError,
)
from mlx_mtp.server.fields import FORM, UNSUPPORTED
from mlx_mtp.server.routes import error_style
from mlx_mtp.server.text import cut

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499
"""nginx's status for a client that went away: nobody reads it but the access log."""

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: Exception) -> dict[str, Any]:
    """The JSON of an error, as a stream carries it too."""
    if isinstance(error, RequestError | EngineError):
        kind, code = error.type, error.code
    else:
        kind, code = EngineError.type, EngineError.code
    param = error.param if isinstance(error, RequestError) else None
    return {"error": {"message": _message(error), "type": kind, "param": param, "code": code}}


def anthropic_error_body(error: Exception) -> dict[str, Any]:
    """The same in Anthropic's shape."""
    kind = _ANTHROPIC_TYPES.get(_status(error), "api_error")
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


def error_response(
    error: Exception, path: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """The HTTP answer to an error on this path."""
    if error_style(path) == "anthropic":
        body = anthropic_error_body(error)
    else:
        body = error_body(error)
    return JSONResponse(
        body, status_code=_status(error), headers={**(headers or {}), **_extra_headers(error)}
    )


def _extra_headers(error: Exception) -> dict[str, str]:
    """Headers that go with an error."""
    headers = {}
    if isinstance(error, RequestError | EngineError) and error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, RequestTimeoutError):
        # OpenAI's and Anthropic's libraries would send it again, and wait as long once more.
        headers["x-should-retry"] = "false"
    if isinstance(error, BodyTimeoutError | DrainingError | ConnectionLimitError):
        headers["Connection"] = "close"
    return headers


def _status(error: Exception) -> int:
    return error.status if isinstance(error, RequestError | EngineError) else EngineError.status


def _message(error: Exception) -> str:
    # The words of an error that nobody raised on purpose belong in the log, not to the client.
    return str(error) if isinstance(error, MlxMtpError) else "The server failed; see its log."


def from_validation(error: ValidationError) -> RequestError:
    """The first thing that pydantic found wrong, with the field's name as a client writes it."""
    first = error.errors(include_url=False, include_input=False)[0]
    location = [part for part in first["loc"] if not str(part).startswith(FORM)]
    location = [*location, *filter(None, [first.get("ctx", {}).get("field")])]
    param = _field_name(location) or None
    if first["type"] == "extra_forbidden":
        return UnsupportedParameterError(f"{param} is not a parameter of this server.", param=param)
    if first["type"] == "missing":
        return InvalidRequestError(f"{param} is required.", param=param)
    message = f"{param or 'The body'}: {first['msg']}."
    if first["type"] in (UNSUPPORTED, "literal_error"):
        return UnsupportedParameterError(message, param=param)
    return InvalidRequestError(message, param=param)


def install(app: FastAPI) -> None:
    """Answer every error of `app` in this module's way."""
    app.add_exception_handler(MlxMtpError, _on_own_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)


def _field_name(location: list[str | int]) -> str:
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    return cut(name.removeprefix("."))


async def _on_own_error(request: Request, error: Exception) -> Response:
    return error_response(error, request.url.path)


async def _on_bug(request: Request, error: Exception) -> Response:
    # Starlette raises it again for the log, and uvicorn then closes the connection.
    return error_response(error, request.url.path, {"Connection": "close"})


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    route = cut(f"{request.method} {path}")
    if error.status_code == NotFoundError.status:
        return error_response(NotFoundError(f"There is no route {route}."), path)
    refused = RequestError(f"{error.detail}: {route}.")
    response = error_response(refused, path, error.headers)
    response.status_code = error.status_code
    return response


async def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)
