"""A request's body as a validated model: whatever bytes a client sends, the answer is no 500.

The JSON parser lets no other thread run: eight million bytes of text take it 10 ms, but of empty
lists a second. So the body's parts are counted before it is parsed.
"""

import asyncio
import gc
import json
import math
import threading
from collections.abc import Awaitable, Callable
from email.message import Message
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request

from mlx_mtp.bounded_json import (
    DuplicateNameError,
    JSONBoundError,
    check_text,
    unique_names,
)
from mlx_mtp.errors import (
    BodyTimeoutError,
    InvalidRequestError,
    PayloadTooLargeError,
    UnsupportedMediaTypeError,
)
from mlx_mtp.server.api.schema import WireModel
from mlx_mtp.server.http.errors import from_validation
from mlx_mtp.server.http.request_log import record_of
from mlx_mtp.text.characters import cut, has_half_character

Model = TypeVar("Model", bound=WireModel)

LARGE_BODY = 256 << 10  # Longer bodies, in bytes, are parsed off the event loop.
MAX_DEPTH = 256  # Most objects and lists within each other, the body's own included.
MAX_PARTS = 1 << 17  # Most objects, lists and strings (names included); agents send thousands.
MAX_ITEMS = 9 << 17  # Most values; numbers are cheap, and a prompt may be a million token ids.
_TYPES = frozenset({"application/json", "application/x-www-form-urlencoded"})
_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii"})
_SMALL = 64 << 10
_one_at_a_time = threading.Lock()


async def read_body(
    request: Request,
    model: type[Model],
    max_bytes: int,
    max_seconds: float,
    take: Callable[[bytes], None] = lambda _: None,
    parse: Callable[[Callable[[], Model]], Awaitable[Model]] = asyncio.to_thread,
    *,
    lenient: bool = False,
) -> Model:
    """Read, parse and validate the body; raises RequestError.

    `take` is called with each piece, and `parse` runs the parsing of a large body on a thread. If
    `lenient`, unknown parameters are no error, but noted in the request's record.
    """
    _check_headers(request.headers, max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(max_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_long(max_bytes)
                take(chunk)
    except TimeoutError:
        message = f"The request's body did not arrive within {max_seconds:g} seconds."
        raise BodyTimeoutError(message) from None

    ignored = record_of(request.scope).ignored if lenient else None

    def validated() -> Model:
        try:
            return model.model_validate(parse_json(bytes(body)), context=ignored)
        except ValidationError as error:
            raise from_validation(error) from None

    return await parse(validated) if len(body) > LARGE_BODY else validated()


def _check_headers(headers: Headers, max_bytes: int) -> None:
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        message = f"Content-Encoding {cut(encoding)!r}: send the body uncompressed."
        raise UnsupportedMediaTypeError(message)
    # Old scripts leave the header out, and `curl -d` puts its own.
    if (given := headers.get("content-type")) is not None:
        kind = Message()
        kind["content-type"] = given
        name, charset = kind.get_content_type(), kind.get_param("charset", "utf-8")
        if name not in _TYPES and not name.endswith("+json"):
            wanted = "the body must be JSON, with the header `Content-Type: application/json`"
            raise UnsupportedMediaTypeError(f"Content-Type {cut(given)!r}: {wanted}.")
        if str(charset).lower() not in _CHARSETS:
            raise UnsupportedMediaTypeError(f"Content-Type {cut(given)!r}: JSON must be UTF-8.")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_long(max_bytes)


def _too_long(max_bytes: int) -> PayloadTooLargeError:
    message = f"The body is longer than {max_bytes} bytes (--max-body-size allows more)."
    return PayloadTooLargeError(message)


def parse_json(body: bytes) -> dict[str, Any]:
    """One object within the bounds above, or InvalidRequestError."""
    if not body.strip():
        raise InvalidRequestError("The body is empty; it must be a JSON object.")
    try:
        check_text(body, MAX_DEPTH, MAX_PARTS, MAX_ITEMS)
        text = body.decode("utf-8")
        value = _loads(text)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The body is not valid UTF-8: {error.reason}.") from None
    except RecursionError:
        raise InvalidRequestError("The body's JSON is nested too deeply.") from None
    except JSONBoundError as error:
        raise InvalidRequestError(f"The body's JSON {error}.") from None
    except DuplicateNameError as error:
        raise InvalidRequestError(str(error)) from None
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
    except ValueError:
        # Python's own bound: without it the time would grow with the square of the digits.
        message = "The body's JSON has an integer of too many digits; no field takes more than 19."
        raise InvalidRequestError(message) from None
    if has_half_character(text, value):
        raise InvalidRequestError("The body is not valid UTF-8: it has half of a surrogate pair.")
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    return value


def _loads(text: str) -> Any:
    if len(text) <= _SMALL:
        return _DECODER.decode(text)
    # Garbage collections would walk the new lists again and again, which took most of the time.
    # The lock makes sure that they are on again in the end, and bounds the memory too.
    with _one_at_a_time:
        gc.disable()
        try:
            return _DECODER.decode(text)
        finally:
            gc.enable()


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequestError(f"The body is not valid JSON: {name} is not JSON.")


def _finite(text: str) -> float:
    if math.isfinite(value := float(text)):
        return value
    message = f"The body is not valid JSON: the number {text[:40]} is too large."
    raise InvalidRequestError(message)


_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=unique_names
)
