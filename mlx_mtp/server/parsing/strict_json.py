"""JSON that a model wrote: only what can be passed on as JSON again."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from mlx_mtp.server.text import has_half_character

MAX_DEPTH = 128


def loads(text: str, *, lenient: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        text: to read.
        lenient: strings may have control characters in them.

    Raises:
        ValueError: it is no JSON, or has infinite numbers, half characters or too many levels.
    """
    try:
        value = json.loads(
            text, strict=not lenient, parse_constant=_refuse, parse_float=_finite_float
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            break
    else:
        raise ValueError("nested too deeply")
    if has_half_character(text, value):
        raise ValueError("half a character")
    return value


def _inner(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value
