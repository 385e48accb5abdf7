"""How likely drafts are to be accepted: counted for each row, and for all rows as its prior.

A draft counts only where those before it were accepted, so the rates are conditional, and their
running product is the chance that a window is accepted up to there.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

_FIRST_RATE = 0.8  # prior of the head's first position
_DECLINE = 0.95  # prior of another one, relative to the rate of the one before it
_NEIGHBOUR_TRIALS = 2.0  # weight of such a prior in trials
_POOL_TRIALS = 6.0  # weight of the rate of all rows in that of one
_LONGEST_CLASS = 5  # class of a match: tokens in powers of two, from 4 on
_COPY_RATES = (0.35, 0.6, 0.8, 0.9, 0.95, 0.97)  # priors by class


class Rates:
    """Trials and successes by index, which fade by `memory` a trial."""

    def __init__(self, size: int, memory: float) -> None:
        self._memory = memory
        self._tried, self._passed = [0.0] * size, [0.0] * size

    def count(self, index: int, passed: bool) -> None:
        self._tried[index] = self._tried[index] * self._memory + 1.0
        self._passed[index] = self._passed[index] * self._memory + passed

    def fade(self) -> None:
        """Forget a little of everything: what is not tried any more may have changed."""
        share = 1.0 - (1.0 - self._memory) / 8
        self._tried = [share * tried for tried in self._tried]
        self._passed = [share * passed for passed in self._passed]

    def rate(self, index: int, prior: float, weight: float) -> float:
        return (self._passed[index] + weight * prior) / (self._tried[index] + weight)


class HeadRates(Rates):
    """Of the head's drafts, by their position in the window."""

    def observe(self, num_drafts: int, num_accepted: int, *, cut: bool) -> None:
        """Count a window; cut: the row ended in it, so the draft after these was not tried."""
        for position in range(min(num_accepted + (not cut), num_drafts)):
            self.count(position, position < num_accepted)

    def of_all(self) -> list[float]:
        """The rate of each position, where these are counts of all rows."""
        rates: list[float] = []
        for position in range(len(self._tried)):
            prior = _DECLINE * rates[-1] if rates else _FIRST_RATE
            rates.append(self.rate(position, prior, _NEIGHBOUR_TRIALS))
        return rates

    def chances(self, pool: Sequence[float]) -> list[float]:
        """That a row's first, second, .. draft is accepted; `pool` are the rates of all rows."""
        rates = (self.rate(i, prior, _POOL_TRIALS) for i, prior in enumerate(pool))
        return list(accumulate(rates, mul))


class CopyRates(Rates):
    """Of copied tokens, by the length of the match before them."""

    def __init__(self, memory: float) -> None:
        super().__init__(len(_COPY_RATES), memory)

    def observe(self, match: int, num_passed: int, *, failed: bool) -> None:
        """Count tokens that followed a match of so many, and made it longer."""
        for length in range(match, match + num_passed + failed):
            self.count(_class(length), length < match + num_passed)

    def chances(self, match: int, count: int, pool: "CopyRates") -> list[float]:
        """That the first, second, .. of so many tokens after a match comes next."""
        chances, reached, last, rate = [], 1.0, -1, 0.0
        for length in range(match, match + count):
            if (place := _class(length)) != last:
                prior = pool.rate(place, _COPY_RATES[place], _NEIGHBOUR_TRIALS)
                last, rate = place, self.rate(place, prior, _POOL_TRIALS)
            reached *= rate
            chances.append(reached)
        return chances


def _class(match: int) -> int:
    return min(max(match.bit_length() - 2, 0), _LONGEST_CLASS)
