"""Which requests there is memory for. No arrays, no model: policy alone.

All rows of a batch share one rectangle, as long as the longest of them, so that a row that joins
may make room for each of the others grow. What a set of rows may come to take is therefore a
function of their number and of the longest alone, each counted with its whole prompt and all the
tokens that it may emit.

The rule for those that wait: none overtakes a request that waits for memory. Rows that run end
some time, none joins them meanwhile, and so its turn comes; a stream of small requests can't hold
a large one up. The price is that small ones wait with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol


class Row(Protocol):
    """What admission needs to know of a sequence."""

    @property
    def most_cached(self) -> int:
        """Tokens that its caches can come to hold."""


class Admission:
    """Says whether rows may run together.

    Args:
        nbytes: that all rows together may take.
        cost: what they take at most, by their number and the longest's tokens; it must not fall
            when either grows.
    """

    def __init__(self, nbytes: int, cost: Callable[[int, int], int]) -> None:
        self._nbytes = nbytes
        self._cost = cost

    def fits(self, rows: Iterable[Row]) -> bool:
        """There is memory for these rows, whatever becomes of them.

        One alone always is let in: `Engine.submit` refuses what could never run.
        """
        lengths = [row.most_cached for row in rows]
        return len(lengths) <= 1 or self._cost(len(lengths), max(lengths)) <= self._nbytes
