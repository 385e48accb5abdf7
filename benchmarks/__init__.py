"""Measurements of speed and memory: `python -m benchmarks` lists them."""

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]
"""Values by column name; columns whose names begin with `_` appear only in the JSON file."""
Rows = Iterator[Row | str]
"""The type of a scenario's output: rows, and lines of text, each of which starts a new table."""


def row(names: str, *values: object) -> Row:
    """Returns a row; `names` holds the names of its columns, separated by " | "."""
    return dict(zip(names.split(" | "), values, strict=True))
