"""What chunks of prompts cost by their length and the context before them.

Costs are measured in use, and while no request runs (`mlx_mtp/calibration`). A few times make a
measurement, and what was not measured is inferred from its neighbours. `table` and `load_table`
carry costs from one run to the next.
"""

import math
from collections import Counter

from mlx_mtp.speculative.costs import LEAST_COST, CostKey, Table

CHUNK, CONTEXT = "chunk", "context"  # kinds of costs: of chunks, and of the context before them

_PRIOR = 2e-3  # seconds per token before anything is measured: a large model on a laptop
_CONTEXT = 4096  # tokens of context whose effect is learned as quickly as that of the length
_GAIN = 0.3  # share of the difference between measured and expected that is taken as lasting
_OUTLIER = 2.0  # times the expected seconds: a measurement counts as no more
_FEWEST_CHUNKS = 3  # of a length before it is compared; the fastest of them counts
_STALE = 64  # chunks after which a measurement is no longer held against a length
_MARGIN = 0.9  # of a pause is planned: chunks of one length differ
_BETTER = 0.95  # of the time per token: what a shorter chunk has to reach to be preferred
_LEAST_RISE = 0.5  # of the time per token: what one more token takes at least
_FIRST = 512  # tokens: the length that is tried first
_SHORTEST = 16  # tokens: what shorter chunks take is not measured separately
_LEAST_SPEED = 0.5  # of the most tokens per second: less is not accepted for a short pause


class PrefillCosts:
    """Seconds per token by a chunk's length, and how many more each token of context adds.

    The lengths are equal parts of the longest one, so that chunks still end at its multiples.
    """

    def __init__(self, longest: int) -> None:
        powers = range(longest.bit_length() + 1)
        halves, thirds = ({-(-longest // (n << power)) for power in powers} for n in (1, 3))
        self._halves = sorted(halves, reverse=True)
        self.lengths = sorted(halves | thirds)
        self._units: dict[int, float] = {}  # seconds per token without context
        self._per_context = 0.0  # more seconds per token and token of context
        self._num_launches = 0
        self._seen: set[int] = set()  # lengths that have been launched, which compiles kernels
        self._counts: Counter[int] = Counter()  # measurements
        self._measured: dict[int, int] = {}  # number of the last chunk that was measured
        self._expected: dict[int, float] = {}  # see `_by_length`; empty: to be computed

    def observe(self, tokens: int, context: float, seconds: float) -> None:
        """Learn what a chunk of `tokens` took that had `context` tokens before it."""
        length = self._nearest(tokens)
        self._num_launches += 1
        if length not in self._seen:
            self._seen.add(length)
            return
        unit = seconds / tokens
        if self._counts[length] < _FEWEST_CHUNKS:
            # The least of them counts, as later ones may compile kernels, too.
            alone = max(unit - self._per_context * context, unit / 2)
            self._units[length] = min(alone, self._units.get(length, alone))
        else:
            known = self._units[length]
            expected = known + self._per_context * context
            unit = min(unit, _OUTLIER * expected)
            share = context / _CONTEXT
            change = _GAIN * (unit - expected) / (1 + share * share)
            self._units[length] = max(known + change, unit / 100)
            self._per_context = max(self._per_context + change * share / _CONTEXT, 0.0)
        self._counts[length] += 1
        self._measured[length] = self._num_launches
        self._expected = {}

    def seconds(self, tokens: int, context: float) -> float:
        """Expected seconds of a chunk."""
        unit = self._by_length()[self._nearest(tokens)]
        return tokens * (unit + self._per_context * context)

    def fastest(self, left: int) -> int:
        """The length of the most tokens per second, for a prompt with `left` tokens left.

        Lengths twice as long are tried while that helps, in prompts of several chunks; if the first
        of them doesn't, half as long ones.
        """
        units = self._by_length()
        first = best = max(n for n in self._halves if n <= _FIRST)
        longer = [n for n in reversed(self._halves) if n > first]
        for candidates in ([first, *longer], [n for n in self._halves if n < first]):
            for length in candidates if best == first else ():
                if not self.is_measured(length):
                    return length if left >= 2 * max(length, first) else best
                if length != best and units[length] > _BETTER * units[best]:
                    break
                best = length
        return best

    def longest_within(self, seconds: float, context: float) -> int:
        """The longest chunk expected to take less, among those that leave prompts half their speed.

        If there is none: the shortest that leaves it, or else one longer than all measured ones, as
        those may be so slow because of what each chunk takes, however short.

        A length that was not measured lately is taken to have as many seconds added by the context
        as a shorter one that was. Otherwise chunks could get ever shorter: if reading the context
        takes as long for fewer tokens, a short chunk shows more seconds for each of them.
        """
        fresh, units = self._fresh(), {}
        for length, unit in self._by_length().items():
            alike = max((n for n in fresh if n <= length), default=length)
            units[length] = unit + self._per_context * context * alike / length
        slowest = (self._least_unit() + self._per_context * context) / _LEAST_SPEED
        allowed = [n for n in self.lengths if units[n] <= slowest]
        short = [n for n in allowed if n * units[n] <= _MARGIN * seconds]
        if short:
            return max(short)
        if allowed:
            return min(allowed)
        return next((n for n in self.lengths if n > max(self._units)), self.lengths[-1])

    def is_measured(self, length: int) -> bool:
        return self._counts[length] >= _FEWEST_CHUNKS

    def to_measure(self, seconds: float) -> list[int]:
        """Lengths with too few measurements that are expected to take at most `seconds`.

        Until two lengths are measured, the shortest one is returned in any case: the first two tell
        what each chunk takes, however short.
        """
        left = [n for n in reversed(self._halves) if n >= _SHORTEST and not self.is_measured(n)]
        return [n for n in left if self.seconds(n, 0) <= seconds] or left[: len(self._units) < 2]

    def table(self) -> Table:
        context = {CostKey(CONTEXT, 1, 1): self._per_context}
        units = {CostKey(CHUNK, 1, length): unit for length, unit in sorted(self._units.items())}
        return units | (context if self._per_context >= LEAST_COST else {})

    def load_table(self, table: Table) -> None:
        keys = ((n, CostKey(CHUNK, 1, n)) for n in self.lengths)
        self._units = {length: table[key] for length, key in keys if key in table}
        self._per_context = table.get(CostKey(CONTEXT, 1, 1), 0.0)
        self._counts = Counter(dict.fromkeys(self._units, _FEWEST_CHUNKS))
        self._expected = {}

    def _least_unit(self) -> float:
        """Seconds per token of the fastest length: a measured one, or a longer one.

        Each token more than the longest measured length is taken to add what it adds between the
        shortest and the longest.
        """
        if not self._units:
            return _PRIOR
        seconds = sorted((length, length * unit) for length, unit in self._units.items())
        (short, least), (long, most) = seconds[0], seconds[-1]
        rise = max(most - least, 0.0) / (long - short) if short < long else most / long
        best = (most + max(_FIRST - long, 0) * rise) / max(_FIRST, long)
        return min(best, *self._units.values())

    def _nearest(self, tokens: int) -> int:
        return min(self.lengths, key=lambda each: abs(math.log(each / max(tokens, 1))))

    def _fresh(self) -> list[int]:
        """Lengths that were measured lately, and often enough."""
        oldest = self._num_launches - _STALE
        return [n for n, at in self._measured.items() if at > oldest and self.is_measured(n)]

    def _by_length(self) -> dict[int, float]:
        """Seconds per token of all lengths, without context.

        A length that was not measured lies on the line between its neighbours, or continues the one
        before it. So does a length that seems to take more than that, if its measurements are old
        or few: it may be tried again.
        """
        if self._expected:
            return self._expected
        fresh = self._fresh()
        first = min(self._units, default=self.lengths[0])
        last, seconds, per_token = 0, 0.0, self._units.get(first, _PRIOR)
        units = {}
        for length in self.lengths:
            unit = (seconds + (length - last) * per_token) / length
            if length in fresh:
                unit = self._units[length]
            elif length in self._units:
                unit = min(self._units[length], unit)
            units[length] = unit
            if length in self._units:
                rise = (unit * length - seconds) / (length - last)
                per_token = min(max(rise, _LEAST_RISE * unit), unit)
                last, seconds = length, unit * length
                if above := min((n for n in fresh if n > length), default=0):
                    per_token = (self._units[above] * above - seconds) / (above - length)
        self._expected = units
        return units
