"""Acceptance rates of drafts: of all rows, and how much better or worse each row is.

A draft is tried only if those before it were accepted, so rates are conditional, and their running
product is the cumulative acceptance: the probability that a window is accepted up to a draft.
"""

import math
from itertools import accumulate
from operator import mul

from mlx_mtp.config import MAX_RUN

MOST_MATCH = 127  # tokens; a longer match is treated like one of this length
_FIRST_RATE = 0.8  # prior of the head's first position
_DECLINE = 0.95  # prior of a later position, relative to the rate of the one before it
_NEIGHBOUR_TRIALS = 1.0  # weight of these priors, in trials
_NGRAM_TRIALS = 2.0  # weight of an n-gram's prior, in trials
_FADE = 0.9975  # share of the counts of the head's drafts that stays with each step
_POOL_TRIALS = 6.0  # weight of the rate of all requests in that of one
_NGRAM_RATES = (0.35, 0.6, 0.8, 0.9, 0.95, 0.97)  # priors by class of a match's length
# The class of each length: powers of two from 4 on.
_CLASSES = [
    min(max(length.bit_length() - 2, 0), len(_NGRAM_RATES) - 1)
    for length in range(MOST_MATCH + MAX_RUN + 1)
]


class AcceptanceRates:
    """Trials and acceptances by index; each trial fades the earlier ones by `memory`."""

    def __init__(self, size: int, memory: float) -> None:
        self.memory = memory
        self._tried, self._accepted = [0.0] * size, [0.0] * size

    def count(self, index: int, accepted: bool) -> None:
        self._tried[index] = self._tried[index] * self.memory + 1.0
        self._accepted[index] = self._accepted[index] * self.memory + accepted

    def rate(self, index: int, prior: float, weight: float) -> float:
        return (self._accepted[index] + weight * prior) / (self._tried[index] + weight)


class HeadRates(AcceptanceRates):
    """Rates of the MTP head's drafts in all rows, by position in the window."""

    def __init__(self, size: int) -> None:
        super().__init__(size, 1.0)
        self._rates: list[float] = []
        self.fade(1)

    def observe(self, num_drafts: int, num_gained: int) -> float:
        """Count a row's window, which emitted `num_gained` tokens more than without drafts.

        A draft after an answer's end counts as a miss. Returns the number of misses that were to be
        expected.
        """
        num_tried = min(num_gained + 1, num_drafts)
        for position in range(num_tried):
            self.count(position, position < num_gained)
        return num_tried - sum(self._rates[:num_tried])

    def fade(self, num_rows: int) -> None:
        """Call when the rows of a step have been counted.

        With many rows more trials are remembered. All counts fade a little, as a position that is
        not tried any more may have changed.
        """
        self.memory = 1.0 - 0.02 / math.sqrt(num_rows)
        self._tried = [_FADE * tried for tried in self._tried]
        self._accepted = [_FADE * accepted for accepted in self._accepted]
        rates: list[float] = []
        for position in range(len(self._tried)):
            prior = _DECLINE * rates[-1] if rates else _FIRST_RATE
            rates.append(self.rate(position, prior, _NEIGHBOUR_TRIALS))
        self._rates = rates

    def cumulative_acceptance(self, miss_ratio: float) -> list[float]:
        """Of the first, second, .. draft of a row that misses `miss_ratio` times as often."""
        return list(
            accumulate((max(1.0 - miss_ratio * (1.0 - rate), 0.0) for rate in self._rates), mul)
        )


class NgramRates(AcceptanceRates):
    """Rates of n-gram drafts, by the length of the match before them."""

    def __init__(self, memory: float) -> None:
        super().__init__(len(_NGRAM_RATES), memory)

    def observe(self, match: int, num_accepted: int, *, missed: bool) -> None:
        """Count the tokens after a match; each accepted one makes the match longer."""
        for length in range(match, match + num_accepted + missed):
            self.count(_CLASSES[length], length < match + num_accepted)

    def cumulative_acceptance(self, match: int, count: int, pool: "NgramRates") -> list[float]:
        """Of the first, second, .. of `count` tokens after a match; `pool`: of all requests."""
        cumulative, product, last, rate = [], 1.0, -1, 0.0
        for index in _CLASSES[match : match + count]:
            if index != last:
                prior = pool.rate(index, _NGRAM_RATES[index], _NGRAM_TRIALS)
                last, rate = index, self.rate(index, prior, _POOL_TRIALS)
            product *= rate
            cumulative.append(product)
        return cumulative
