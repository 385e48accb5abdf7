"""Documents with one value replaced, as in a damaged file or one of another program."""

import copy
from collections.abc import Iterator
from typing import Any

STEERING = "\x1b]52;c;eA==\x07\x9b2J\r\n\u202eforged \x1b[2J\ud800"
ODD = (None, True, -1, 1e400, 10**400, "", STEERING, [], {}, [None], {STEERING: STEERING})


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of the document and of each value in it; of a list, only the first entry."""
    yield path
    if isinstance(document, dict):
        for key, value in document.items():
            yield from places(value, (*path, key))
    elif isinstance(document, list) and document:
        yield from places(document[0], (*path, 0))


def replaced(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Returns a copy with another value at a path."""
    if not path:
        return value
    found = copy.deepcopy(document)
    holder = found
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return found


def odd_versions(document: Any, values: tuple[Any, ...] = ODD) -> Iterator[Any]:
    """Yields the document with each of `values` in each place, and with each key left out."""
    for path in places(document):
        for value in values:
            yield replaced(document, path, value)
        if path and isinstance(path[-1], str):
            without = replaced(document, path, None)
            holder = without
            for key in path[:-1]:
                holder = holder[key]
            del holder[path[-1]]
            yield without


def steers(text: str) -> bool:
    """Returns True if a text has one of the control sequences in `STEERING`."""
    return any(each in text for each in ("\x1b]", "\x07", "\x9b", "\u202e", "\x1b[2J", "\ud800"))
