"""What launches cost by their shape: decode steps, and chunks of prompts.

Both are measured in use, and while no request runs (`mlx_mtp/calibration`). The first time of a
shape is dropped, a few times make a measurement, and what was not measured is inferred from its
neighbours. `table` and `load_table` carry costs from one run to the next.
"""

import math
import statistics
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mlx_mtp.config import MAX_DRAFT_TOKENS, MAX_HOST_DRAFTS

# Kinds of costs: of steps whose drafts the MTP head proposes, or the host (so without passes of the
# head), of chunks of prompts, and of the context before these.
MTP, HOST, CHUNK, CONTEXT = "mtp", "host", "chunk", "context"
KNOTS = (0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)  # drafts per row

LEAST_COST = 1e-15  # in a table

# Of decode steps.
# Cost of a draft before anything is measured: about as much as it gains, a third of it for the
# head's pass.
_SLOPE = {MTP: 0.8, HOST: 0.52}
_LEAST_SLOPE = 0.03  # of a draft, whatever was measured: less is noise
_READING_STEPS = 8  # steps of a reading: their low median, as a step may be late but never early
_FEWEST_STEPS = 3  # that a reading needs if the kind of step changes before it is full
_MAX_AGE = 64  # steps after which a reading is not compared with: too much may have changed
_COMPARISONS = 8  # latest ones of a kind that count
_LEAST_NOISE = 0.02  # relative standard error of a comparison
_UNCERTAINTY = 0.1  # relative, of a cost with one comparison
_LOADED_COMPARISONS = 4  # that a cost of an earlier run counts as
_PRIOR_WEIGHT = 0.02  # of `_SLOPE`, relative to a measurement at distance 1
_DONORS = 6  # numbers of rows that a missing cost is inferred from, at most

# Of chunks.
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


class CostKey(NamedTuple):
    """What a cost is kept for."""

    kind: str
    rows: int
    size: float  # of steps: drafts per row, one of `KNOTS`; of a chunk: its tokens


Table = Mapping[CostKey, float]
"""Costs to keep: of steps in any one unit per number of rows, of chunks in seconds per token."""


class StepShape(NamedTuple):
    """All that the cost of a decode step depends on here."""

    rows: int
    drafts: int  # verified, of all rows
    passes: int  # of the MTP head


class _Comparisons:
    """The latest comparisons of a kind of step. Their median is its cost: some were disturbed."""

    def __init__(self, cost: float, times: int = 1) -> None:
        self.latest = deque([cost] * times, maxlen=_COMPARISONS)
        self.cost = cost

    def add(self, cost: float) -> None:
        self.latest.append(cost)
        self.cost = statistics.median(self.latest)


WindowKind = tuple[str, float]  # MTP or HOST, and drafts per row (one of `KNOTS`)
_PLAIN: WindowKind = (MTP, 0)


class BatchCosts:
    """Costs of steps of one number of rows, relative to its step without drafts.

    `verify` are those of windows with 0, 1, 2, .. drafts of all rows, `passes` those of 0, 1, 2, ..
    passes of the head.
    """

    def __init__(self, verify: Sequence[float], passes: Sequence[float]) -> None:
        self._verify, self._passes = verify, passes

    def cost(self, drafts: int, passes: int) -> float:
        return self._verify[drafts] + self._passes[passes]

    def window_costs(self, most: int, passes: int) -> list[float]:
        """Costs of verifying 0 to `most` drafts, as far as windows may have them."""
        return [cost + self._passes[passes] for cost in self._verify[: most + 1]]


class StepCosts:
    """Costs of decode steps, relative to a step of as many rows without drafts.

    A kind of step is compared with the kind that ran just before it, so a hot machine or a longer
    context changes nothing. Comparisons are noisy: a cost is a mean over those of the kinds nearby,
    weighted by their variance.
    """

    def __init__(self) -> None:
        self._num_launches = 0
        # A shape's first launch compiles kernels and fills buffer pools.
        self._seen: set[StepShape] = set()
        self._measured: dict[int, dict[WindowKind, _Comparisons]] = {}  # by rows
        # By rows, the kind, seconds, and number of the step of the last reading.
        self._last: dict[int, tuple[WindowKind, float, int]] = {}
        self._current: tuple[int, WindowKind] = 0, _PLAIN
        self._samples: list[float] = []  # of the current kind
        self._batch_costs: dict[int, BatchCosts] = {}
        self._noise = _LEAST_NOISE

    def observe(self, shape: StepShape, seconds: float | None) -> None:
        """Count a step; None: its time is not known."""
        self._num_launches += 1
        if seconds is None:
            return
        if shape not in self._seen:
            self._seen.add(shape)
            return
        rows, drafts, passes = shape
        knot = min(KNOTS, key=lambda each: abs(each - drafts / rows))
        # The nearest kind: equal windows of the head's drafts, or none of its passes.
        kind = MTP if 2 * passes >= knot else HOST, knot
        if self._current != (rows, kind):
            self.end_reading()
            self._current = rows, kind
        if drafts != knot * rows or passes != (knot if kind[0] == MTP else 0):
            seconds *= self._cost(rows, kind) / self.of_batch(rows).cost(drafts, passes)
        self._samples.append(seconds)
        if len(self._samples) == _READING_STEPS:
            self.end_reading()

    def end_reading(self) -> None:
        """Use the samples if they are enough. Call before steps of another kind."""
        samples, self._samples = self._samples, []
        if len(samples) < _FEWEST_STEPS:
            return
        rows, kind = self._current
        seconds, now = statistics.median_low(samples), self._num_launches
        last_kind, last_seconds, last_step = self._last.get(rows, (kind, seconds, now))
        self._last[rows] = kind, seconds, now
        kinds = self._measured.setdefault(rows, {})
        if kind == _PLAIN:
            kinds[kind] = _Comparisons(1.0)
        if last_kind == kind or now - last_step > _MAX_AGE:
            return
        cost = self._cost(rows, last_kind) * seconds / last_seconds
        if kind == _PLAIN:  # The unit of all others: the kind before it is what is known better.
            kind, cost = last_kind, last_seconds / seconds
        if kind in kinds:
            kinds[kind].add(cost)
        else:
            kinds[kind] = _Comparisons(cost)
        # By the distances of comparisons to the median of their kind; loaded ones are equal.
        all_kinds = [each for kinds in self._measured.values() for each in kinds.values()]
        measured = [each for each in all_kinds if len({*each.latest}) > 2]
        if apart := [abs(x / each.cost - 1.0) for each in measured for x in {*each.latest}]:
            self._noise = max(1.5 * statistics.median(apart), _LEAST_NOISE)
        self._batch_costs.clear()

    def of_batch(self, rows: int) -> BatchCosts:
        if rows not in self._batch_costs:
            mtp, host = ([self._cost(rows, (s, x)) for x in KNOTS] for s in (MTP, HOST))
            more = [max(a - b, 0.0) for a, b in zip(mtp, host)]
            passes = [_between(more, n) for n in range(MAX_DRAFT_TOKENS + 1)]
            verify = [_between(host, n / rows) for n in range(rows * MAX_HOST_DRAFTS + 1)]
            self._batch_costs[rows] = BatchCosts(verify, passes)
        return self._batch_costs[rows]

    def is_measured(self, rows: int, depth: int) -> bool:
        """Whether steps of about as many rows, each with `depth` drafts of the head, were."""
        near = (kinds for size, kinds in self._measured.items() if 0.6 < size / rows < 1.6)
        return any((MTP, depth) in kinds for kinds in near)

    def uncertainty(self, rows: int, *depths: int) -> float:
        """Standard error of the ratio of these depths' costs, from their comparisons' number."""
        kinds = self._measured.get(rows, {})
        counts = [len(kinds[MTP, n].latest) if (MTP, n) in kinds else 0 for n in depths if n]
        return _UNCERTAINTY / math.sqrt(0.5 + min(counts, default=0))

    def table(self) -> Table:
        return {
            CostKey(kind, rows, size): measured.cost
            for rows, kinds in sorted(self._measured.items())
            for (kind, size), measured in sorted(kinds.items())
        }

    def load_table(self, table: Table) -> None:
        """Take over costs of numbers of rows whose step without drafts has one."""
        for (kind, rows, size), cost in table.items():
            plain = table.get(CostKey(MTP, rows, 0))
            if plain and kind in _SLOPE and size in KNOTS:
                kinds = self._measured.setdefault(rows, {})
                kinds[kind, size] = _Comparisons(cost / plain, _LOADED_COMPARISONS)
        self._batch_costs.clear()

    def _cost(self, rows: int, kind: WindowKind) -> float:
        """The cost that the measured kinds nearby, this one among them, say that a draft has.

        Each is weighted by its variance: the noise of its comparisons, and its distance.
        """
        source, x = kind
        ratio = weight = _PRIOR_WEIGHT  # Of what drafts cost to what `_SLOPE` says.
        for size in sorted(self._measured, key=lambda size: abs(math.log(size / rows)))[:_DONORS]:
            for (other, knot), measured in self._measured[size].items():
                if knot:
                    away = abs(math.log(size / rows)) + abs(math.log((1 + knot) / (1 + x)))
                    more = max(measured.cost - 1.0, _LEAST_SLOPE)
                    noise = (2.0 * self._noise) ** 2 / len(measured.latest)
                    near = 1.0 / (noise + (away + (other != source)) ** 4)
                    ratio, weight = ratio + near * more / (_SLOPE[other] * knot), weight + near
        return 1.0 + _SLOPE[source] * x * ratio / weight


def _between(curve: Sequence[float], x: float) -> float:
    """A curve over `KNOTS` at x, linear between them."""
    above = min(max(bisect_right(KNOTS, x), 1), len(KNOTS) - 1)
    low, high = KNOTS[above - 1], KNOTS[above]
    return curve[above - 1] + (x - low) / (high - low) * (curve[above] - curve[above - 1])


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
