"""How likely drafts are to be accepted: counted for all rows, and how much better or worse each is.

A draft counts only where those before it were accepted, so the rates are conditional, and their
running product is the chance that a window is accepted up to there.
"""

import math
from itertools import accumulate
from operator import mul

from mlx_mtp.config import MAX_RUN

MOST_MATCH = 127  # a longer match is not told from one of so many
_FIRST_RATE = 0.8  # prior of the head's first position
_DECLINE = 0.95  # prior of another one, relative to the rate of the one before it
_NEIGHBOUR_TRIALS = 1.0  # weight of such a prior in trials
_COPY_TRIALS = 2.0  # and of one for copies
_FADE = 0.9975  # of what was counted stays with each step
_POOL_TRIALS = 6.0  # weight of the rate of all rows in that of one
_COPY_RATES = (0.35, 0.6, 0.8, 0.9, 0.95, 0.97)  # priors by class
# Of a match of so many tokens: powers of two, from 4 on.
_CLASSES = [
    min(max(match.bit_length() - 2, 0), len(_COPY_RATES) - 1)
    for match in range(MOST_MATCH + MAX_RUN + 1)
]


class Rates:
    """Trials and successes by index, which fade by `memory` a trial."""

    def __init__(self, size: int, memory: float) -> None:
        self.memory = memory
        self._tried, self._passed = [0.0] * size, [0.0] * size

    def count(self, index: int, passed: bool) -> None:
        self._tried[index] = self._tried[index] * self.memory + 1.0
        self._passed[index] = self._passed[index] * self.memory + passed

    def rate(self, index: int, prior: float, weight: float) -> float:
        return (self._passed[index] + weight * prior) / (self._tried[index] + weight)


class HeadRates(Rates):
    """Of the head's drafts in all rows, by their position in the window."""

    def __init__(self, size: int) -> None:
        super().__init__(size, 1.0)
        self._rates: list[float] = []
        self.fade(1)

    def observe(self, num_drafts: int, num_gained: int) -> float:
        """Count a row's window, which brought so many tokens more than without drafts.

        A draft behind an answer's end missed, too. Returns how many misses were to be expected in
        what was tried.
        """
        tried = min(num_gained + 1, num_drafts)
        for position in range(tried):
            self.count(position, position < num_gained)
        return tried - sum(self._rates[:tried])

    def fade(self, num_rows: int) -> None:
        """A step of so many rows has been counted.

        Where many rows try, more of what they try is remembered; and a little of everything is
        forgotten, for what is not tried any more may have changed.
        """
        self.memory = 1.0 - 0.02 / math.sqrt(num_rows)
        self._tried = [_FADE * tried for tried in self._tried]
        self._passed = [_FADE * passed for passed in self._passed]
        rates: list[float] = []
        for position in range(len(self._tried)):
            prior = _DECLINE * rates[-1] if rates else _FIRST_RATE
            rates.append(self.rate(position, prior, _NEIGHBOUR_TRIALS))
        self._rates = rates

    def cumulative_acceptance(self, misses: float) -> list[float]:
        """That the first, second, .. draft is accepted, of a row with so many times more misses."""
        return list(
            accumulate((max(1.0 - misses * (1.0 - rate), 0.0) for rate in self._rates), mul)
        )


class NgramRates(Rates):
    """Of copied tokens, by the length of the match before them."""

    def __init__(self, memory: float) -> None:
        super().__init__(len(_COPY_RATES), memory)

    def observe(self, match: int, num_passed: int, *, failed: bool) -> None:
        """Count tokens that followed a match of so many, and made it longer."""
        for length in range(match, match + num_passed + failed):
            self.count(_CLASSES[length], length < match + num_passed)

    def cumulative_acceptance(self, match: int, count: int, pool: "NgramRates") -> list[float]:
        """That the first, second, .. of so many tokens after a match comes next."""
        chances, reached, last, rate = [], 1.0, -1, 0.0
        for place in _CLASSES[match : match + count]:
            if place != last:
                prior = pool.rate(place, _COPY_RATES[place], _COPY_TRIALS)
                last, rate = place, self.rate(place, prior, _POOL_TRIALS)
            reached *= rate
            chances.append(reached)
        return chances
