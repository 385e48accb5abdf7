"""A request's body to a checked model: whatever bytes a client sends, the answer is no 500."""

from __future__ import annotations

import asyncio
from email.message import Message
from typing import TypeVar

from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request

from mlx_mtp.errors import InvalidRequestError, PayloadTooLargeError, UnsupportedMediaTypeError
from mlx_mtp.server.fields import WireModel
from mlx_mtp.server.http_errors import from_validation
from mlx_mtp.server.json_text import parse_json
from mlx_mtp.server.text import cut

Model = TypeVar("Model", bound=WireModel)

LARGE_BODY = 256 << 10
"""Longer bodies, in bytes, are parsed off the event loop, which other streams need meanwhile."""
_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii"})


async def read_body(request: Request, model: type[Model], max_bytes: int) -> Model:
    """Read, parse and check the body.

    Raises:
        UnsupportedMediaTypeError: it is compressed, or its type is another one than JSON.
        PayloadTooLargeError: it is longer than `max_bytes`.
        InvalidRequestError, UnsupportedParameterError: it is no JSON object, or not this model's.
    """
    _check_headers(request.headers, max_bytes)
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


def _check_headers(headers: Headers, max_bytes: int) -> None:
    """Refuse what the headers alone show, before any of the body is read."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaTypeError(
            f"Content-Encoding {cut(encoding)!r}: send the body uncompressed."
        )
    # Without the header a body is taken for JSON: curl users and old scripts leave it out.
    given = headers.get("content-type")
    if given is not None:
        kind = Message()
        kind["content-type"] = given
        name = kind.get_content_type()
        if name != "application/json" and not name.endswith("+json"):
            raise UnsupportedMediaTypeError(
                f"Content-Type {cut(given)!r}: the body must be JSON, with the header "
                "`Content-Type: application/json`."
            )
        charset = kind.get_param("charset", "utf-8")
        if not isinstance(charset, str) or charset.lower() not in _CHARSETS:
            raise UnsupportedMediaTypeError(f"Content-Type {cut(given)!r}: JSON must be UTF-8.")
    length = headers.get("content-length", "")
    if length and "transfer-encoding" in headers:
        # Two servers in a row could read two different bodies.
        raise InvalidRequestError(
            "Content-Length and Transfer-Encoding exclude each other; send one of them."
        )
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_long(max_bytes)


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    # Counted as it comes: a Content-Length may be missing.
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_long(max_bytes)
    return bytes(body)


def _too_long(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"The body is longer than {max_bytes} bytes (--max-body-size allows more)."
    )
