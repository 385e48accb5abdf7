"""A request's body to a checked model: whatever bytes a client sends, the answer is no 500."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from mlx_mtp.errors import InvalidRequestError, PayloadTooLargeError
from mlx_mtp.server.http_errors import from_validation
from mlx_mtp.server.messages import WireModel

Model = TypeVar("Model", bound=WireModel)

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


async def read_body(request: Request, model: type[Model], max_bytes: int) -> Model:
    """Read, parse and check the body.

    Raises:
        PayloadTooLargeError: it is longer than `max_bytes`.
        InvalidRequestError, UnsupportedParameterError: it is no JSON object, or not this model's.
    """
    value = parse_json(await _read(request, max_bytes))
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
        if _SURROGATE_ESCAPE.search(text):
            # Half of a surrogate pair is valid in JSON, but no character that could be encoded.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise InvalidRequestError(f"The body is not valid UTF-8: {error.reason}.") from None
    except RecursionError:
        raise InvalidRequestError("The body's JSON is nested too deeply.") from None
    except ValueError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
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
