"""Every request that an SDK's types allow, varied at one place at a time."""

import collections.abc
import io
import os
import typing
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Literal, Union, get_args, get_origin, is_typeddict

import typing_extensions
from pydantic import BaseModel

_REQUIRED = (typing.Required, typing_extensions.Required)
_WRAPPERS = (*_REQUIRED, typing.NotRequired, typing.Annotated)
_FILES = (typing.IO[bytes], io.IOBase, os.PathLike, datetime)
_PLAIN: dict[Any, tuple[Any, ...]] = {
    str: ("x",),
    int: (1,),
    float: (0.5,),
    bool: (True, False),
    object: ({},),
    Any: ({},),
}
_UNIONS = (Union, type(int | str))
_LISTS = (list, collections.abc.Iterable, collections.abc.Sequence)

Variant = tuple[str, Any]
"""Where a value differs from the smallest one, and the value."""


def variants(kind: Any, path: str = "", inside: tuple[Any, ...] = ()) -> Iterator[Variant]:
    """Values of a type; of an object, the smallest one first, then each key in each form.

    A path has keys, `[]` for a list's item, `(kind)` for an object's `type`, and `=value` for one
    of a few values; `inside` are the object types that this is a part of.
    """
    origin = get_origin(kind)
    if origin in _WRAPPERS:
        yield from variants(get_args(kind)[0], path, inside)
    elif origin in (Literal, typing_extensions.Literal):
        yield from ((f"{path}={str(value).lower()}", value) for value in get_args(kind))
    elif origin in _UNIONS:
        for member in get_args(kind):
            yield from variants(member, path, inside)
    elif is_typeddict(kind) or typing_extensions.is_typeddict(kind):
        if kind not in inside:
            yield from _objects(kind, path, (*inside, kind))
    elif kind is type(None) or kind in _FILES or origin is os.PathLike or _is_answer(kind):
        return  # Nulls are tested elsewhere; the rest has another form in JSON.
    elif kind in _PLAIN:
        for value in _PLAIN[kind]:
            yield (f"{path}={str(value).lower()}" if kind is bool else path), value
    elif origin is dict or kind is dict:
        inner = get_args(kind)[1] if get_args(kind) else object
        yield from ((path, {"key": value}) for _, value in variants(inner, path, inside))
    elif get_args(kind):
        assert origin in _LISTS or "Sequence" in str(origin), f"{path}: what is {kind}?"
        item = get_args(kind)[0]
        yield from ((place, [value]) for place, value in variants(item, f"{path}[]", inside))
    else:
        raise AssertionError(f"{path}: what is {kind}?")


def _objects(kind: Any, path: str, inside: tuple[Any, ...]) -> Iterator[Variant]:
    # Not `__required_keys__`: it knows nothing of annotations that are still text.
    hints = typing_extensions.get_type_hints(kind, include_extras=True)
    smallest = {}
    for key, hint in hints.items():
        if get_origin(hint) in _REQUIRED:
            first = next(variants(hint, "", inside), None)
            if first is None:
                return
            smallest[key] = first[1]
    tag = smallest.get("type", smallest.get("role"))
    place = f"{path}({tag})" if isinstance(tag, str) and path else path
    yield place, smallest
    for key, hint in hints.items():
        for inner, value in variants(hint, f"{place}.{key}".lstrip("."), inside):
            if key not in ("type", "role") or value != tag:
                yield inner, smallest | {key: value}


def _is_answer(kind: Any) -> bool:
    """A part of an answer, which may be sent back as it is: the types of requests have it too."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)
