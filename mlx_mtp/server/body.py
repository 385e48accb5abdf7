"""A request's body to a checked model: whatever bytes a client sends, the answer is no 500."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from mlx_mtp.errors import InvalidRequestError, PayloadTooLargeError
from mlx_mtp.server.http_errors import from_validation
from mlx_mtp.server.messages import WireModel
from mlx_mtp.server.text import has_half_character

Model = TypeVar("Model", bound=WireModel)

LARGE_BODY = 256 << 10
"""Longer bodies, in bytes, are parsed off the event loop, which other streams need meanwhile."""


async def read_body(request: Request, model: type[Model], max_bytes: int) -> Model:
    """Read, parse and check the body.

    Raises:
        PayloadTooLargeError: it is longer than `max_bytes`.
        InvalidRequestError, UnsupportedParameterError: it is no JSON object, or not this model's.
    """
    content = await _read(request, max_bytes)
    if len(content) > LARGE_BODY:
        return await asyncio.to_thread(_checked, content, model)
    return _checked(content, model)


def _checked(content: bytes, model: type[Model]) -> Model:
    value = parse_json(content)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    # Counted as it comes: a Content-Length may be missing, or a lie.
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise PayloadTooLargeError(f"The body is longer than {max_bytes} bytes.")
    return bytes(body)


def parse_json(body: bytes) -> dict[str, Any]:
    """Strict JSON: one object, UTF-8, finite numbers, no half characters.

    Raises:
        InvalidRequestError: it is anything else.
    """
    try:
        text = body.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        half = has_half_character(text, value)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The body is not valid UTF-8: {error.reason}.") from None
    except RecursionError:
        raise InvalidRequestError("The body's JSON is nested too deeply.") from None
    except ValueError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
    if half:
        raise InvalidRequestError("The body is not valid UTF-8: it has half of a surrogate pair.")
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value
