"""The generator's source of chance: fast picks, and picks that lean on what was said before."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar
from zlib import crc32

T = TypeVar("T")

DEFAULT_LEAN = 0.0
"""How unequal the options of a leaning pick are: 0 is a fair die, 4 hardly leaves a choice."""
NUM_CLASSES = 64
"""Contexts fall into so many classes, each with weights of its own."""


class Dice(random.Random):
    """A seeded random source that keeps count of the surprise it made.

    Args:
        seed: equal seeds give equal text on every machine (no use of Python's own `hash`).
        lean: see `DEFAULT_LEAN`.

    Attributes:
        bits: surprise of all leaning picks so far, -log2 of the probability of what came.
        num_leaning: how many there were.
    """

    def __init__(self, seed: str | int, lean: float = DEFAULT_LEAN) -> None:
        super().__init__(seed)
        self.lean = lean
        self.bits = 0.0
        self.num_leaning = 0

    def pick(self, options: Sequence[T]) -> T:
        """One of them, all equally likely."""
        return options[int(self.random() * len(options))]

    def chance(self, probability: float) -> bool:
        """True with that probability."""
        return self.random() < probability

    def number(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return low + int(self.random() * (high - low + 1))

    def leaning(self, options: Sequence[T], slot: str, context: str) -> T:
        """One of them; how likely each is depends on the slot and on what was said before.

        The dependence is arbitrary but fixed, as a language's habits are: a model can learn it
        from enough text, a small head only in part, and no one can foresee the choice itself.
        """
        count = len(options)
        if count == 1:
            return options[0]
        self.num_leaning += 1
        kind = crc32(context.encode()) % NUM_CLASSES
        bounds = _bounds(slot, count, kind, self.lean)
        index = bisect(bounds, self.random() * bounds[-1])
        index = min(index, count - 1)
        below = bounds[index - 1] if index else 0.0
        self.bits -= math.log2((bounds[index] - below) / bounds[-1])
        return options[index]


@lru_cache(maxsize=1 << 16)
def _bounds(slot: str, count: int, kind: int, lean: float) -> tuple[float, ...]:
    """Running sums of the options' weights, exp(lean * u) with u in -1 to 1."""
    source = random.Random(f"{slot}/{kind}/{count}")
    return tuple(accumulate(math.exp(lean * (2 * source.random() - 1)) for _ in range(count)))
