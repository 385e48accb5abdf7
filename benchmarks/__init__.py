"""Measurements of speed and memory: `python -m benchmarks` lists them."""

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]
"""A value for each column; those whose name begins with `_` are in the JSON alone."""
Rows = Iterator[Row | str]
"""What a scenario yields: rows, and lines of text, after which a new table begins."""


def row(names: str, *values: object) -> Row:
    """A row by the names of its columns, which " | " separates."""
    return dict(zip(names.split(" | "), values, strict=True))
