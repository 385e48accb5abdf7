"""The cost of prefill chunks, by their length and by the context before them.

Costs are measured in use, and while no request runs (`mlx_mtp/calibration`). A length counts as
measured after a few chunks; the costs of other lengths are inferred from their neighbours. `table`
and `load_table` carry costs from one run of the server to the next.
"""

import math
from collections import Counter

from mlx_mtp.speculative.costs import LEAST_COST, CostKey, Table

CHUNK, CONTEXT = "chunk", "context"  # kinds of costs: of chunks, and of the context before them

_PRIOR = 2e-3  # seconds per token before anything is measured: a large model on a laptop
_CONTEXT = 4096  # tokens of context at which a measurement corrects both costs by the same seconds
_GAIN = 0.3  # share of the difference between measured and expected seconds that is learned
_OUTLIER = 2.0  # times the expected seconds: a longer measurement is cut to this
_FEWEST_CHUNKS = 3  # of a length until it counts as measured; the fastest of these chunks is used
_STALE = 64  # chunks after which an old measurement no longer rules a slow length out
_MARGIN = 0.9  # share of a pause that is planned, as the time of chunks of one length varies
_BETTER = 0.95  # times the best time per token: another length must take at most this to replace it
_LEAST_RISE = 0.5  # times the time per token: the least that one more token is assumed to take
_FIRST = 512  # tokens of the length that is tried first
_SHORTEST = 16  # tokens; shorter chunks are not measured by calibration
_LEAST_SPEED = 0.5  # share of the highest speed that a chunk must reach, even beyond a short pause


class PrefillCosts:
    """Seconds per token by a chunk's length, and seconds that each token of context adds to these.

    The lengths divide the longest one into equal parts, so that chunks still end at its multiples.
    """

    def __init__(self, longest: int) -> None:
        powers = range(longest.bit_length() + 1)
        halves, thirds = ({-(-longest // (n << power)) for power in powers} for n in (1, 3))
        self._halves = sorted(halves, reverse=True)
        self.lengths = sorted(halves | thirds)
        self._units: dict[int, float] = {}  # seconds per token without context
        self._per_context = 0.0  # seconds added per token and token of context
        self._num_launches = 0
        self._seen: set[int] = set()  # lengths that have been launched, which compiles kernels
        self._counts: Counter[int] = Counter()  # measurements of each length
        self._measured: dict[int, int] = {}  # `_num_launches` at each length's last measurement
        self._expected: dict[int, float] = {}  # cache of `_by_length`; empty: outdated

    def observe(self, tokens: int, context: float, seconds: float) -> None:
        """Learn that a chunk of `tokens` tokens after `context` tokens took `seconds`."""
        length = self._nearest(tokens)
        self._num_launches += 1
        if length not in self._seen:
            self._seen.add(length)
            return
        unit = seconds / tokens
        if self._counts[length] < _FEWEST_CHUNKS:
            # The fastest chunk counts, as those after a length's first can compile kernels, too.
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
        """Returns the expected seconds of a chunk of `tokens` tokens after `context` tokens."""
        unit = self._by_length()[self._nearest(tokens)]
        return tokens * (unit + self._per_context * context)

    def fastest(self, left: int) -> int:
        """Returns the length with the most tokens per second, for a prompt with `left` tokens left.

        The length is doubled, from `_FIRST` on, while that helps; if it doesn't help, it is halved
        while that helps. Unmeasured lengths are tried only on prompts of at least two chunks.
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

    def longest_within(self, seconds: float, context: float, left: int = 0) -> int:
        """Returns the longest length expected to take at most `seconds` after `context` tokens.

        Returns `left`, the number of tokens that complete the prompts, if that is longer than this
        length and takes no longer than `seconds`, so that a few tokens need no chunk of their own.

        Only lengths with at least `_LEAST_SPEED` of the highest speed qualify. If none of them is
        short enough, the shortest one is returned; if no length qualifies, the next one above all
        measured lengths, as these may be slow because of a fixed cost per chunk.

        The context is assumed to add as many seconds to a length that was not measured lately as to
        the next shorter one that was. Otherwise chunks could get ever shorter: if reading the
        context takes the same time for fewer tokens, a short chunk has a higher cost per token.
        """
        fresh, units = self._fresh(), {}
        for length, unit in self._by_length().items():
            alike = max((n for n in fresh if n <= length), default=length)
            units[length] = unit + self._per_context * context * alike / length
        slowest = (self._least_unit() + self._per_context * context) / _LEAST_SPEED
        allowed = [n for n in self.lengths if units[n] <= slowest]
        short = [n for n in allowed if n * units[n] <= _MARGIN * seconds]
        if left > max(short, default=0) and self.seconds(left, context) <= _MARGIN * seconds:
            return left
        if short:
            return max(short)
        if allowed:
            return min(allowed)
        return next((n for n in self.lengths if n > max(self._units)), self.lengths[-1])

    def is_measured(self, length: int) -> bool:
        return self._counts[length] >= _FEWEST_CHUNKS

    def to_measure(self, seconds: float) -> list[int]:
        """Returns lengths with too few measurements, expected to take at most `seconds` each.

        Until two lengths are measured, the shortest one is returned in any case, because the fixed
        cost per chunk follows from two lengths.
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
        """Seconds per token of the fastest length: a measured one, or a longer one up to `_FIRST`.

        Each token beyond the longest measured length is assumed to take as long as one between the
        shortest and the longest measured length.
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
        """Lengths with enough measurements, the last of which is recent."""
        oldest = self._num_launches - _STALE
        return [n for n, at in self._measured.items() if at > oldest and self.is_measured(n)]

    def _by_length(self) -> dict[int, float]:
        """Seconds per token of all lengths, without context.

        The seconds of an unmeasured length are interpolated between its measured neighbours, or
        extrapolated from the one below it. This also caps the seconds of a length with old or few
        measurements, so that a length that seemed slow can be tried again.
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
