"""What chunks of prompts cost, by measurement, and how long the next one should be."""

import math
from collections import Counter
from collections.abc import Mapping

_PRIOR = 2e-3  # seconds per token before anything is measured: of a large model on a laptop
_CONTEXT = 4096  # tokens of context whose effect is learned as quickly as that of the length
_GAIN = 0.3  # of the difference between measured and expected, what is taken for lasting
_OUTLIER = 2.0  # times what was expected: no more of one measurement is believed
_FEWEST = 3  # measurements of a length, of which the least counts, before it is compared
_STALE = 64  # chunks after which a cost is no longer held against a length
_MARGIN = 0.9  # of a pause that is planned: chunks of one length differ
_BETTER = 0.95  # of the time per token: what a shorter chunk has to reach to be preferred
_LEAST_RISE = 0.5  # of the time per token: what one more token takes at least
_FIRST = 512  # tokens: longer ones are tried from here on, and shorter ones
_SHORTEST = 16  # tokens: what shorter ones take is not measured by itself
_LEAST_SPEED = 0.5  # of the most tokens per second: less is not accepted for a short pause


class PrefillCosts:
    """Seconds per token by a chunk's length, and what each token before it adds to that.

    The lengths are equal parts of the longest, so its multiples remain places where chunks end.
    """

    def __init__(self, longest: int) -> None:
        powers = range(longest.bit_length() + 1)
        halves, thirds = ({-(-longest // (n << power)) for power in powers} for n in (1, 3))
        self._halves = sorted(halves, reverse=True)
        self.lengths = sorted(halves | thirds)
        self._units: dict[int, float] = {}  # seconds per token with nothing before the chunk
        self._per_context = 0.0  # more seconds per token and token of context
        self._counts: Counter[int] = Counter()  # of measurements
        self._measured: dict[int, int] = {}  # the number of the chunk that was measured last
        self._num_chunks = 0
        self._seen: set[int] = set()
        self._expected: dict[int, float] = {}  # see `_by_length`; empty: to be made

    def observe(self, tokens: int, context: float, seconds: float) -> None:
        """Learn what a chunk of `tokens` took that had `context` tokens before it."""
        length = self._nearest(tokens)
        self._num_chunks += 1
        if length not in self._seen:
            # The first of a length compiles kernels and fills pools of buffers.
            self._seen.add(length)
            return
        unit = seconds / tokens
        if self._counts[length] < _FEWEST:
            # The least of them counts, as later ones may compile kernels, too.
            own = max(unit - self._per_context * context, unit / 2)
            self._units[length] = min(own, self._units.get(length, own))
        else:
            known = self._units[length]
            expected = known + self._per_context * context
            unit = min(unit, _OUTLIER * expected)
            share = context / _CONTEXT
            change = _GAIN * (unit - expected) / (1 + share * share)
            self._units[length] = max(known + change, unit / 100)
            self._per_context = max(self._per_context + change * share / _CONTEXT, 0.0)
        self._counts[length] += 1
        self._measured[length] = self._num_chunks
        self._expected = {}

    def seconds(self, tokens: int, context: float) -> float:
        """What a chunk is expected to take."""
        unit = self._by_length()[self._nearest(tokens)]
        return tokens * (unit + self._per_context * context)

    def fastest(self, left: int) -> int:
        """The length of the most tokens per second, for a prompt that has so many tokens left.

        Twice as long ones are tried, while that helps, in prompts of several chunks; if the first
        of them doesn't, half as long ones.
        """
        units = self._by_length()
        first = best = max(n for n in self._halves if n <= _FIRST)
        longer = [n for n in reversed(self._halves) if n > first]
        for tried in ([first, *longer], [n for n in self._halves if n < first]):
            for length in tried if best == first else ():
                if self._counts[length] < _FEWEST:
                    return length if left >= 2 * max(length, first) else best
                if length != best and units[length] > _BETTER * units[best]:
                    break
                best = length
        return best

    def longest_within(self, seconds: float, context: float) -> int:
        """The longest chunk expected to take less, that leaves prompts half of their speed.

        Where none does, the shortest that leaves it, or one that is longer than all that were
        measured: what each chunk takes, however short, may be most of the time of those.

        To a length that was not measured lately the context is taken to add as many seconds as to a
        shorter one that was. Else chunks could get ever shorter: where reading the context takes as
        long for fewer tokens, a short one shows more for each of them.
        """
        fresh, units = self._fresh(), {}
        for length, unit in self._by_length().items():
            alike = max((n for n in fresh if n <= length), default=length)
            units[length] = unit + self._per_context * context * alike / length
        slowest = (self._least_unit() + self._per_context * context) / _LEAST_SPEED
        allowed = [n for n in self.lengths if units[n] <= slowest]
        fits = [n for n in allowed if n * units[n] <= _MARGIN * seconds]
        if fits:
            return max(fits)
        if allowed:
            return min(allowed)
        return next((n for n in self.lengths if n > max(self._units)), self.lengths[-1])

    def _least_unit(self) -> float:
        """Seconds per token of the best length that was measured, or that a longer one may have.

        That is taken to add what the longest measured takes more than the shortest.
        """
        if not self._units:
            return _PRIOR
        seconds = sorted((length, length * unit) for length, unit in self._units.items())
        (short, least), (long, most) = seconds[0], seconds[-1]
        rise = max(most - least, 0.0) / (long - short) if short < long else most / long
        best = (most + max(_FIRST - long, 0) * rise) / max(_FIRST, long)
        return min(best, *self._units.values())

    def next_unmeasured(self, seconds: float) -> int | None:
        """The shortest length with too few measurements, if it is expected to take no longer.

        The first two are given in any case: they tell what each chunk takes, however short.
        """
        left = (n for n in reversed(self._halves) if n >= _SHORTEST and self._counts[n] < _FEWEST)
        length = next(left, None)
        if length is None or len(self._units) < 2 or self.seconds(length, 0) <= seconds:
            return length
        return None

    def table(self) -> tuple[dict[int, float], float]:
        """What was measured, for `load`."""
        return dict(sorted(self._units.items())), self._per_context

    def load(self, units: Mapping[int, float], per_context: float) -> None:
        self._units = {length: units[length] for length in self.lengths if length in units}
        self._per_context = per_context
        self._counts = Counter(dict.fromkeys(self._units, _FEWEST))
        self._expected = {}

    def _nearest(self, tokens: int) -> int:
        return min(self.lengths, key=lambda each: abs(math.log(each / max(tokens, 1))))

    def _fresh(self) -> list[int]:
        """Lengths that were measured lately, and often enough."""
        oldest = self._num_chunks - _STALE
        lately = (n for n in self._units if self._measured.get(n, -math.inf) > oldest)
        return [n for n in lately if self._counts[n] >= _FEWEST]

    def _by_length(self) -> dict[int, float]:
        """Seconds per token of all lengths, with nothing before the chunk.

        What wasn't measured lies on a line between its neighbours, or goes on as those before it
        do. So does what seems to take more and was measured long ago, or not often: it may be tried
        again.
        """
        if self._expected:
            return self._expected
        fresh = self._fresh()
        first = min(self._units, default=self.lengths[0])
        last, seconds, per_token = 0, 0.0, self._units.get(first, _PRIOR)
        found = {}
        for length in self.lengths:
            unit = (seconds + (length - last) * per_token) / length
            if length in fresh:
                unit = self._units[length]
            elif length in self._units:
                unit = min(self._units[length], unit)
            found[length] = unit
            if length in self._units:
                rise = (unit * length - seconds) / (length - last)
                per_token = min(max(rise, _LEAST_RISE * unit), unit)
                last, seconds = length, unit * length
                if above := min((n for n in fresh if n > length), default=0):
                    per_token = (self._units[above] * above - seconds) / (above - length)
        self._expected = found
        return found
