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
from mlx_mtp.speculative.costs_in_use import (
    BLOCK,
    CALIBRATED,
    KNOTS,
    LEAST_FIXED,
    MACHINE,
    UNKNOWN,
    CostsInUse,
)

# Kinds of costs: of steps whose drafts the MTP head proposes, or the host (so without passes of the
# head), or the host for one row alone; what steps take in use (see `CostsInUse.factors`); of chunks
# of prompts, and of the context before these.
MTP, HOST, RAGGED, USE = "mtp", "host", "ragged", "use"
CHUNK, CONTEXT = "chunk", "context"

LEAST_COST = 1e-15  # in a table

# Of decode steps.
# Cost of a draft before anything is measured: about as much as it gains, a third of it for the
# head's pass. And that of a place that pads a window to the longest one, per row.
_SLOPE = {MTP: 0.8, HOST: 0.52}
_PADDING = 0.03
_LEAST_PADDING = 0.01
_LEAST_VERIFY = 0.5  # cost of a window, whatever was measured
_LEAST_SLOPE = 0.03  # of a draft, whatever was measured: less is noise
_COMPARISONS = 8  # latest ones of a kind that count
_LOADED_COMPARISONS = 4  # that a cost of an earlier run counts as
_VARIANCE = 0.01  # of a comparison
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


class StepShape(NamedTuple):
    """All that the cost of a decode step depends on here."""

    rows: int
    drafts: int  # verified, of all rows
    passes: int  # of the MTP head
    longest: int  # drafts of the row with the most

    @property
    def padding(self) -> int:
        """Places by which the rows' windows are shorter than the longest."""
        return self.rows * self.longest - self.drafts


class CostKey(NamedTuple):
    """What a cost is kept for."""

    kind: str
    rows: int
    size: float  # of steps: drafts per row, one of `KNOTS`; of a chunk: its tokens

    @property
    def shape(self) -> StepShape:
        """Of steps that have this cost."""
        size = int(self.size)
        drafts = size if self.kind == RAGGED else self.rows * size
        return StepShape(self.rows, drafts, size if self.kind == MTP else 0, size)


Table = Mapping[CostKey, float]
"""Costs to keep: of steps in seconds (`USE`: factors), of chunks in seconds per token."""


WindowKind = tuple[str, float]  # MTP, HOST or RAGGED, and drafts per row (one of `KNOTS`)


class BatchCosts(NamedTuple):
    """Costs of steps of one number of rows, relative to its step without drafts.

    `verify` are those of windows with 0, 1, 2, .. drafts of all rows, `passes` those of 0, 1, 2, ..
    passes of the head, and `padding` that of each place (see `StepShape.padding`).
    """

    verify: Sequence[float]
    passes: Sequence[float]
    padding: float

    def cost(self, shape: StepShape) -> float:
        drafting = self.verify[shape.drafts] + self.passes[shape.passes]
        return drafting + self.padding * shape.padding

    def in_use(self, rows: int, factors: Sequence[float], more: Sequence[float]) -> "BatchCosts":
        """The same with factors on all that a step, drafts and padding take, and `more` by knot."""
        fixed, drafting, padding = factors
        plain = max(fixed + more[0], LEAST_FIXED)
        verify = [
            max((fixed + drafting * (cost - 1.0) + _between(more, n / rows)) / plain, _LEAST_VERIFY)
            for n, cost in enumerate(self.verify)
        ]
        passes = [drafting / plain * cost for cost in self.passes]
        return BatchCosts([1.0, *verify[1:]], passes, padding / plain * self.padding)


class StepCosts:
    """Costs of decode steps, relative to a step of as many rows without drafts.

    While no request runs, cells of steps are compared with steps without drafts beside them
    (`compare`), which gives curves of costs. What requests see differs from that by what each step
    takes beside the model, such as a longer context or the host's work. So in use factors scale the
    curves (see `CostsInUse`).
    """

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # seconds of steps without drafts, by rows
        self._ratios: dict[int, dict[WindowKind, deque[float]]] = {}  # by rows
        self._curves: dict[int, BatchCosts] = {}  # by rows, as calibrated
        self._in_use: dict[int, CostsInUse] = {}  # by rows
        # The first launch of a shape compiles kernels and fills buffer pools.
        self._seen: set[tuple[int, ...]] = set()
        # Of the last step: rows, and the number of drafts of each; None: they differ.
        self._kind: tuple[int, int | None] = 0, None
        self._batch_costs: dict[int, BatchCosts] = {}

    def compare(self, cell: CostKey, seconds: float, plain: float) -> None:
        """Take over the seconds of a cell's steps, and of steps without drafts beside them."""
        kinds = self._ratios.setdefault(cell.rows, {})
        ratios = kinds.setdefault((cell.kind, cell.size), deque(maxlen=_COMPARISONS))
        ratios.append(seconds / plain)
        self._plain[cell.rows] = plain
        self._curves.clear()
        self._batch_costs.clear()

    def observe(self, shape: StepShape, seconds: float | None) -> None:
        """Learn from a step in use; None: its time is not known."""
        rows, drafts, passes, longest = shape
        is_even = drafts == rows * passes == rows * longest
        kind = rows, longest if is_even else None
        if self._kind != kind or not seconds:
            self._end_block()
        self._kind = kind
        if not seconds:
            return
        if (launch := (rows, passes, longest)) not in self._seen:
            self._seen.add(launch)
            return
        if rows not in self._in_use:
            self._in_use[rows] = self._new(rows)
        curve = self._curve(rows)
        padding = curve.padding * shape.padding
        drafting = curve.cost(shape) - 1.0 - padding
        if self._in_use[rows].add(drafts / rows, drafting, padding, seconds) == BLOCK:
            self._end_block()

    def of_batch(self, rows: int) -> BatchCosts:
        if rows not in self._batch_costs:
            in_use = self._known().get(rows) or self._new(rows)
            costs = self._curve(rows).in_use(rows, in_use.factors, in_use.more)
            self._batch_costs[rows] = costs
        return self._batch_costs[rows]

    def is_measured(self, rows: int) -> bool:
        """Whether steps without drafts of about as many rows were, in use."""
        near = (each for size, each in self._in_use.items() if 0.6 < size / rows < 1.6)
        return any(each.counts[0] for each in near)

    def table(self) -> Table:
        table = {CostKey(MTP, rows, 0): seconds for rows, seconds in sorted(self._plain.items())}
        for rows, kinds in sorted(self._ratios.items()):
            for (kind, size), ratios in sorted(kinds.items()):
                table[CostKey(kind, rows, size)] = statistics.median(ratios) * self._plain[rows]
        for rows, in_use in sorted(self._in_use.items()):
            if in_use.counts[0]:
                table |= {CostKey(USE, rows, n): factor for n, factor in enumerate(in_use.factors)}
        return table

    def load_table(self, table: Table) -> None:
        """Take over costs of numbers of rows whose step without drafts has one."""
        for (kind, rows, size), seconds in table.items():
            plain = table.get(CostKey(MTP, rows, 0))
            if plain and kind in (*_SLOPE, RAGGED) and size in KNOTS:
                self._plain[rows] = plain
                for _ in range(_LOADED_COMPARISONS if size else 0):
                    self.compare(CostKey(kind, rows, size), seconds, plain)
        for rows in {key.rows for key in table if key.kind == USE}:
            factors = [table.get(CostKey(USE, rows, n), 1.0) for n in range(3)]
            self._in_use[rows] = self._new(rows, factors)
            self._in_use[rows].counts[0] = 1

    def _end_block(self) -> None:
        rows, _ = self._kind
        if (in_use := self._in_use.get(rows)) and in_use.end_block():
            self._batch_costs.clear()  # Other numbers of rows may follow this one.

    def _known(self) -> dict[int, CostsInUse]:
        return {rows: each for rows, each in self._in_use.items() if any(each.counts)}

    def _new(self, rows: int, factors: Sequence[float] = ()) -> CostsInUse:
        """Of steps of so many rows, by default as for the nearest number of rows."""
        if not factors:
            known = self._known()
            near = min(known, key=lambda size: abs(math.log(size / rows)), default=0)
            factors = known[near].factors if 0.4 < near / rows < 2.5 else (1.0, 1.0, 1.0)
        deviations: Sequence[float] = UNKNOWN
        if self._ratios:
            curve = self._curve(rows)
            draft, place = curve.verify[rows] - 1.0 + curve.passes[1], curve.padding * rows
            relative = zip(CALIBRATED, (draft, place))
            deviations = [max(share, least / cost) for (share, least), cost in relative]
        deviations = (MACHINE, MACHINE, *deviations)
        return CostsInUse(self._seconds(rows), factors, deviations)

    def _seconds(self, rows: int) -> float:
        """Calibrated seconds of a step without drafts, linear in rows; 0.0 if none was measured."""
        if not self._plain:
            return 0.0
        sizes = sorted(self._plain)
        above = min(max(bisect_right(sizes, rows), 1), len(sizes) - 1)
        low, high = sizes[above - 1], sizes[above]
        if low == high or len(sizes) == 1:
            return self._plain[sizes[0]]
        share = min(max((rows - low) / (high - low), 0.0), 2.0)
        return max(self._plain[low] + share * (self._plain[high] - self._plain[low]), 1e-9)

    def _curve(self, rows: int) -> BatchCosts:
        if rows not in self._curves:
            medians = {
                size: {kind: statistics.median(ratios) for kind, ratios in kinds.items()}
                for size, kinds in self._ratios.items()
            }
            mtp, host = (
                [self._cost(medians, rows, (kind, x)) for x in KNOTS] for kind in (MTP, HOST)
            )
            more = [max(a - b, 0.0) for a, b in zip(mtp, host)]
            passes = [_between(more, n) for n in range(MAX_DRAFT_TOKENS + 1)]
            verify = [_between(host, n / rows) for n in range(rows * MAX_HOST_DRAFTS + 1)]
            padding = self._padding(medians, rows) / rows
            self._curves[rows] = BatchCosts(verify, passes, padding)
        return self._curves[rows]

    def _padding(self, medians: Mapping[int, Mapping[WindowKind, float]], rows: int) -> float:
        """Cost of a place for each row, by what the nearest number of rows has measured."""
        for size in sorted(medians, key=lambda size: abs(math.log(size / rows))):
            costs = []
            for (kind, longest), ratio in medians[size].items():
                if kind == RAGGED:
                    mean = longest / size
                    more = ratio - self._cost(medians, size, (HOST, mean))
                    costs.append(max(more, 0.0) / (longest - mean))
            if costs:
                return max(statistics.mean(costs), _LEAST_PADDING)
        return _PADDING

    def _cost(
        self, medians: Mapping[int, Mapping[WindowKind, float]], rows: int, kind: WindowKind
    ) -> float:
        """The cost that the measured kinds nearby, this one among them, say that a draft has.

        Each is weighted by its variance: the noise of its comparisons, and its distance.
        """
        source, x = kind
        ratio = weight = _PRIOR_WEIGHT  # Of what drafts cost to what `_SLOPE` says.
        for size in sorted(medians, key=lambda size: abs(math.log(size / rows)))[:_DONORS]:
            for (other, knot), cost in medians[size].items():
                if other != RAGGED:
                    away = abs(math.log(size / rows)) + abs(math.log((1 + knot) / (1 + x)))
                    more = max(cost - 1.0, _LEAST_SLOPE)
                    noise = _VARIANCE / len(self._ratios[size][other, knot])
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
