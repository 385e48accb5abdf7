"""JSON from clients, bounded before it is parsed.

The parser lets no other thread run while it works. Eight million bytes of text take it 10 ms, but
of empty lists a second, in which every stream stands still. So what the text will come to is
counted first.
"""

from __future__ import annotations

import gc
import json
import math
import threading
from itertools import accumulate
from typing import Any, NoReturn

from mlx_mtp.errors import InvalidRequestError
from mlx_mtp.server.text import cut, has_half_character

MAX_DEPTH = 256
"""Most objects and lists within each other, the body's own included."""
MAX_PARTS = 1 << 17
"""Most objects, lists and strings (names included) of one body; those of agents have thousands."""
MAX_ITEMS = 9 << 17
"""Most values of one body; numbers are cheap, and a prompt may be a million token ids."""
_SMALL = 64 << 10
_one_at_a_time = threading.Lock()


def parse_json(body: bytes) -> dict[str, Any]:
    """Strict JSON: one object, UTF-8, each name once, finite numbers, no half characters.

    Raises:
        InvalidRequestError: it is anything else, or more than the bounds above.
    """
    if not body.strip():
        raise InvalidRequestError("The body is empty; it must be a JSON object.")
    _check_size(body)
    try:
        text = body.decode("utf-8")
        value = _loads(text)
        half = has_half_character(text, value)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The body is not valid UTF-8: {error.reason}.") from None
    except RecursionError:
        raise InvalidRequestError("The body's JSON is nested too deeply.") from None
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
    except ValueError:
        # Python's own bound, without which such a number would take a time that grows with its
        # square.
        raise InvalidRequestError(
            "The body's JSON has an integer of too many digits; no field takes more than 19."
        ) from None
    if half:
        raise InvalidRequestError("The body is not valid UTF-8: it has half of a surrogate pair.")
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    return value


def _loads(text: str) -> Any:
    if len(text) <= _SMALL:
        return _DECODER.decode(text)
    # Each list that is made counts as garbage to be looked for: that took most of the time. The
    # lock sees to it that collection is on again in the end, and bounds the memory too.
    with _one_at_a_time:
        gc.disable()
        try:
            return _DECODER.decode(text)
        finally:
            gc.enable()


def _check_size(body: bytes) -> None:
    """Count what stands outside of strings.

    Only the start of the text up to its first error counts right: the parser comes no further.
    """
    # What is escaped ends no string; in valid JSON there are backslashes in strings alone.
    plain = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    strings = plain.count(b'"') // 2
    if strings <= MAX_PARTS:
        outside = b"".join(plain.split(b'"')[::2])
        opened = outside.count(b"[") + outside.count(b"{")
        if strings + opened <= MAX_PARTS:
            if outside.count(b",") > MAX_ITEMS:
                raise _too_much("values", MAX_ITEMS)
            if opened > MAX_DEPTH and _depth(outside) > MAX_DEPTH:
                raise InvalidRequestError(
                    f"The body's JSON is nested too deeply; at most {MAX_DEPTH} levels are allowed."
                )
            return
    raise _too_much("objects, lists and strings", MAX_PARTS)


def _too_much(what: str, limit: int) -> InvalidRequestError:
    return InvalidRequestError(f"The body's JSON has too many {what}; at most {limit} are allowed.")


_STEPS = bytes.maketrans(b"[]{}", b"\2\0\2\0")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def _depth(outside: bytes) -> int:
    brackets = outside.translate(_STEPS, _OTHERS)
    # As many are closed as are opened; what is closed beyond that is an error.
    return max(accumulate(step - 1 for step in brackets[: 2 * MAX_PARTS]), default=0)


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Others would read the first of two values, or the last; here none is ignored in silence.
    value = dict(pairs)
    if len(value) < len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                raise InvalidRequestError(
                    f"The body's JSON has the name {cut(name)!r} twice in one object."
                )
            names.add(name)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequestError(f"The body is not valid JSON: {name} is not JSON.")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidRequestError(
            f"The body is not valid JSON: the number {text[:40]} is too large."
        )
    return value


_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_each_name_once
)
