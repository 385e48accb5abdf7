"""Acceptance rates of drafts, and those of n-gram drafts by the length of the match before them.

A draft is tried only if those before it were accepted, so rates are conditional, and their running
product is the cumulative acceptance: the probability that a window is accepted up to a draft.
"""

from mlx_mtp.config import MAX_RUN

MOST_MATCH = 127  # tokens; a longer match is treated like one of this length
_NGRAM_TRIALS = 2.0  # weight of an n-gram's prior, in trials
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
