"""Errors as HTTP responses, in the form of each API."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from mlx_mtp import errors
from mlx_mtp.bounded_json import shortened

FORM = "\0"  # prefix of the tags of unions, which pydantic puts between field names in errors
UNSUPPORTED = "unsupported"  # the pydantic error type that becomes an UnsupportedParameterError
_NUMBER = re.compile(rb'"sequence_number":(\d+)')
_CLOSE = {"Connection": "close"}
_HEADERS: dict[type[Exception], dict[str, str]] = {
    errors.BytesLimitError: _CLOSE,
    errors.AuthenticationError: {"WWW-Authenticate": "Bearer"},
    errors.BodyTimeoutError: _CLOSE,
    errors.ConnectionLimitError: _CLOSE,
    errors.DrainingError: _CLOSE,
    # Without the header SDKs would retry: wait as long again, or undo a deliberate cancellation.
    errors.RequestTimeoutError: {"x-should-retry": "false"},
    errors.RequestCancelledError: {"x-should-retry": "false"},
}
_ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


def error_body(error: Exception) -> dict[str, Any]:
    """Returns an error's JSON as OpenAI's API has it, in responses and in streams."""
    error = public(error)
    fields = {"message": str(error), "type": error.type, "param": error.param, "code": error.code}
    return {"error": fields}


def anthropic_error_body(error: Exception) -> dict[str, Any]:
    """Returns an error's JSON as Anthropic's API has it."""
    shown = public(error)
    kind = _ANTHROPIC_TYPES.get(shown.status, shown.type)
    return {"type": "error", "error": {"type": kind, "message": str(shown)}}


def ollama_error_body(error: Exception) -> dict[str, Any]:
    """Returns an error's JSON as Ollama's API has it."""
    return {"error": str(public(error))}


def error_response(
    error: Exception,
    body: Callable[[Exception], dict[str, Any]] = error_body,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Returns the HTTP response to an error; `body` gives the JSON in the form of an API."""
    shown = public(error)
    more = {**_HEADERS.get(type(shown), {}), **(headers or {})}
    if shown.retry_after is not None:
        more["Retry-After"] = str(shown.retry_after)
    if shown is not error:
        more |= _CLOSE  # Raised again for the log, it makes uvicorn close the connection.
    return JSONResponse(body(shown), status_code=shown.status, headers=more)


def from_validation(error: ValidationError) -> errors.RequestError:
    """Returns the first error that pydantic found, with the field's name as a client writes it."""
    first = error.errors(include_url=False, include_input=False)[0]
    location = [*first["loc"], first.get("ctx", {}).get("field")]
    parts = [part for part in location if part is not None and not str(part).startswith(FORM)]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    param = shortened(name.removeprefix(".")) or None
    if first["type"] == "extra_forbidden":
        message = f"{param} is not a parameter of this server."
        return errors.UnsupportedParameterError(message, param=param)
    if first["type"] == "missing":
        return errors.InvalidRequestError(f"{param} is required.", param=param)
    if first["type"] == "too_short":  # All lists with a minimum length have the minimum 1.
        return errors.InvalidRequestError(f"{param} must not be empty.", param=param)
    unsupported = first["type"] in (UNSUPPORTED, "literal_error")
    kind = errors.UnsupportedParameterError if unsupported else errors.InvalidRequestError
    return kind(f"{param or 'The body'}: {first['msg']}.", param=param)


def public(error: Exception) -> errors.MlxMtpError:
    """Returns the error that a client may see, without the details of a bug."""
    if isinstance(error, errors.MlxMtpError):
        return error
    return errors.MlxMtpError("The server failed; see its log.")


class StreamForm:
    """The form of keep-alives and errors in the streams of an API."""

    def __init__(self, path: str, body: Callable[[Exception], dict[str, Any]]) -> None:
        """`body` is the API's form of an error."""
        self.is_ollama = body is ollama_error_body
        self._is_anthropic = body is anthropic_error_body
        self._is_responses = path.rstrip("/").endswith("/responses")
        kind = b"application/x-ndjson" if self.is_ollama else b"text/event-stream; charset=utf-8"
        fixed = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        self.headers = [(b"content-type", kind), *fixed]
        self.keep_alive = b" " if self.is_ollama else b": keep-alive\n\n"
        self.body = body

    def wants_stream(self, stream: object) -> bool:
        """Returns True if a body with this value of `stream` (None: absent) asks for a stream."""
        return stream is not False if self.is_ollama else stream is True

    def failure(self, error: Mapping[str, Any], last: bytes) -> bytes:
        """Returns an error's JSON as the end of a stream; `last` are the bytes sent before.

        Returns b"" if the stream broke off within an event.
        """
        text = json.dumps(error).encode()
        if self.is_ollama:
            return b"" if last.rpartition(b"\n")[2].strip() else text + b"\n"
        if last and not last.endswith(b"\n\n"):
            return b""
        if self._is_responses:
            numbers = _NUMBER.findall(last)
            number = int(numbers[-1]) + 1 if numbers else 0
            event = error["error"] | {"type": "error", "sequence_number": number}
            text = json.dumps(event).encode()
        if self._is_responses or self._is_anthropic:
            return b"event: error\ndata: " + text + b"\n\n"
        return b"data: " + text + b"\n\ndata: [DONE]\n\n"
