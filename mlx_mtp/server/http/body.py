"""Reads and validates a request's body: whatever a client sends, the status is not 500.

The JSON parser holds the GIL: for 10 ms with eight million bytes of text, but for a second with
eight million bytes of empty lists. So a body's parts are counted before it is parsed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import threading
from argparse import ArgumentTypeError
from collections.abc import Coroutine
from email.message import Message
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pydantic import BaseModel, Field, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from mlx_mtp.bounded_json import (
    DuplicateNameError,
    JSONBoundError,
    check_text,
    has_half_character,
    shortened,
    unique_names,
)
from mlx_mtp.config import ServerConfig
from mlx_mtp.errors import (
    BodyTimeoutError,
    InvalidRequestError,
    PayloadTooLargeError,
    UnsupportedMediaTypeError,
)
from mlx_mtp.flags import duration
from mlx_mtp.server.http.admission import BODY_BYTES, OBJECT_BYTES, HeldBytes
from mlx_mtp.server.http.errors import from_validation
from mlx_mtp.server.http.record import client_of, record_of

if TYPE_CHECKING:
    from mlx_mtp.server.context import Context
    from mlx_mtp.server.serving import ServerState

T = TypeVar("T")
BodyModel = TypeVar("BodyModel", bound=BaseModel)
LARGE_BODY = 256 << 10  # bytes; longer bodies are parsed off the event loop
MAX_DEPTH = 256  # levels of objects and lists, the body's own included
MAX_PARTS = 1 << 17  # objects, lists and strings, names included; agents send thousands
MAX_ITEMS = 9 << 17  # values; numbers are cheap, and a prompt may be a million token ids
_JSON = "application/json"
_TYPES = frozenset({_JSON, "application/x-www-form-urlencoded"})
_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii"})
_SMALL = 64 << 10  # characters; up to this size, garbage collection stays on during parsing
_one_at_a_time = threading.Lock()


class RoutedBody(BaseModel):
    """The fields that a parent of several models reads; a model's process gets the whole body."""

    model: str = Field("", max_length=256)
    name: str = Field("", max_length=256)  # Ollama's older name of `model`
    stream: Any = None
    keep_alive: Any = None  # of Ollama's API: seconds, or a text such as 10m
    messages: Any = None
    prompt: Any = None
    input: Any = None  # of embeddings

    def seconds(self) -> float | None:
        """Returns `keep_alive` in seconds, None if it is not given; raises InvalidRequestError."""
        if self.keep_alive is None:
            return None
        try:
            return duration(str(self.keep_alive))
        except ArgumentTypeError as error:
            raise InvalidRequestError(f"keep_alive: {error}.", param="keep_alive") from None


async def read_request(request: Request, model: type[BodyModel]) -> tuple[Context, BodyModel]:
    """Returns the application's context and the validated body.

    If bodies of this type name a model, the name is checked, and a missing one becomes the first
    served one. Raises RequestError, or BytesLimitError if there is no memory for the body.
    """
    context: Context = request.app.state.context
    context.check_kind(record_of(request.scope).route)
    context.engine.expect_request()
    has_model = "model" in model.model_fields
    ignored = record_of(request.scope).ignored
    ignored.sees = context.sees_images
    lenient = has_model and context.config.unknown_parameters == "warn"
    _, body = await read_body(request, context, model, ignored if lenient else None)
    if has_model:
        name = getattr(body, "model", "")
        served = context.served_name(name)
        body = body if name else body.model_copy(update={"model": served})
    return context, body


async def read_body(
    request: Request, state: ServerState, model: type[BodyModel], ignored: list[str] | None = None
) -> tuple[bytes, BodyModel]:
    """Returns the body's bytes and the validated body; raises RequestError or BytesLimitError.

    `ignored` is as for `parse_body`.
    """
    content = await read_bytes(request, state.config, state.held)
    record_of(request.scope).body_bytes = len(content)
    parse = partial(parse_body, content, model, ignored)
    if len(content) > LARGE_BODY:
        return content, await state.limiter.parsing.run(client_of(request.scope), parse)
    return content, parse()


async def read_bytes(request: Request, config: ServerConfig, held: HeldBytes) -> bytes:
    """Returns the body's bytes; raises RequestError, or BytesLimitError if `held` has no room."""
    max_bytes, max_seconds = config.max_body_bytes, config.body_timeout
    headers = request.headers
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        message = f"Content-Encoding {shortened(encoding)!r}: send the body uncompressed."
        raise UnsupportedMediaTypeError(message)
    # Old scripts omit the header, and `curl -d` sends the content type of a form.
    if (given := headers.get("content-type", _JSON)) != _JSON:
        header = Message()
        header["content-type"] = given
        name, charset = header.get_content_type(), header.get_param("charset", "utf-8")
        if name not in _TYPES and not name.endswith("+json"):
            rule = "the body must be JSON, with the header `Content-Type: application/json`"
            raise UnsupportedMediaTypeError(f"Content-Type {shortened(given)!r}: {rule}.")
        if str(charset).lower() not in _CHARSETS:
            raise UnsupportedMediaTypeError(
                f"Content-Type {shortened(given)!r}: JSON must be UTF-8."
            )
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_long(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(max_seconds):
            is_complete = False
            while not is_complete:
                part = await request.receive()
                if part["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk, is_complete = part.get("body", b""), not part.get("more_body", False)
                body += chunk
                if len(body) > max_bytes:
                    raise _too_long(max_bytes)
                nbytes = BODY_BYTES * len(chunk) + OBJECT_BYTES * chunk.count(b"{")
                held.reserve(request.scope, nbytes)
    except TimeoutError:
        message = f"The request's body did not arrive within {max_seconds:g} seconds."
        raise BodyTimeoutError(message) from None
    return bytes(body)


def _too_long(max_bytes: int) -> PayloadTooLargeError:
    message = f"The body is longer than {max_bytes} bytes (--max-body-size allows more)."
    return PayloadTooLargeError(message)


def parse_body(body: bytes, model: type[BodyModel], ignored: list[str] | None) -> BodyModel:
    """Parse and validate a body within `MAX_DEPTH`, `MAX_PARTS` and `MAX_ITEMS`.

    Unknown parameters are added to the list `ignored`, or are an error if it is None. Raises
    RequestError.
    """
    if not body.strip():
        raise InvalidRequestError("The body is empty; it must be a JSON object.")
    try:
        check_text(body, MAX_DEPTH, MAX_PARTS, MAX_ITEMS)
        text = body.decode("utf-8")
        value = _DECODER.decode(text) if len(text) <= _SMALL else _decode_without_collections(text)
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
        # Python limits the digits of an integer, as parsing takes quadratic time.
        message = "The body's JSON has an integer of too many digits; no field takes more than 19."
        raise InvalidRequestError(message) from None
    if has_half_character(text, value):
        raise InvalidRequestError("The body is not valid UTF-8: it has half of a surrogate pair.")
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    try:
        return model.model_validate(value, context=ignored)
    except ValidationError as error:
        raise from_validation(error) from None


def _decode_without_collections(text: str) -> Any:
    # Garbage collection would walk the new lists again and again, which took most of the time.
    # The lock ensures that collection is on again at the end, and bounds the memory too.
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


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`; cancels it and raises ClientDisconnect if the client leaves."""
    task, left = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()
