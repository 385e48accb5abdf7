"""Whether the draft policy's estimates come true: acceptance of drafts, and costs of steps."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

from benchmarks import Rows, row
from benchmarks.never_slower import WORK
from mlx_mtp.bench.arguments import CALIBRATION_SECONDS
from mlx_mtp.bench.measure import Asking
from mlx_mtp.bench.offline import EngineSubject
from mlx_mtp.bench.prompts import PromptSource
from mlx_mtp.build import build_engine
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.step import InFlightStep, StepRow
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.costs import MTP, StepShape
from mlx_mtp.speculative.draft_policy import AdaptiveDrafts, Choice, RowDrafting
from mlx_mtp.speculative.ngram import MOST_MATCH, NgramDrafter
from mlx_mtp.text.tokenizer import Tokenizer

# Classes: the maximum of each, and its name. Of tokens per row of a step, of a draft's estimated
# acceptance and position in its window, and of a copied run: the length of the match before it, and
# the share of the row's last run that was right.
_TOKENS = (1.0, "1"), (2.0, "2"), (3.0, "3"), (4.0, "4"), (8.0, "5 to 8"), (64.0, "more")
_ACCEPTANCES = (0.2, "0.0 to 0.2"), *((n / 10, f"{(n - 1) / 10} to {n / 10}") for n in range(3, 11))
_POSITIONS = (1, "1"), (2, "2"), (4, "3 to 4"), (8, "5 to 8"), (16, "9 to 16")
_MATCHES = (3, "3"), (7, "4 to 7"), (15, "8 to 15"), (31, "16 to 31"), (MOST_MATCH, "32 or more")
_LAST = (-1.0, "first run"), (0.0, "wrong"), (0.5, "half"), (0.99, "most"), (1.0, "right")
_T = TypeVar("_T")
_Classes = Sequence[tuple[float, str]]
_FEWEST = 30  # drafts, or steps, of a point
_SIDE, _MARGIN, _MOST_COST = 320, 50, 4.0  # pixels of a plot and beside it; end of the costs' axes
_COLORS = {"head": "#1f77b4", "copies": "#d95f02"}


class _Draft(NamedTuple):
    source: str
    estimated: float
    accepted: bool  # this draft and all before it in its window were emitted
    position: int  # in its window, from 1
    match: int  # length of the match before a copied run, when it was chosen
    last: float  # share of the row's last copied run that was emitted, as known then; -1: none


class _Step(NamedTuple):
    source: str  # "copies" if any row copies
    shape: StepShape
    seconds: float
    cost: float  # estimated


class _Point(NamedTuple):
    """Estimates of one class: their mean, and what came."""

    source: str
    kind: str  # an interval of acceptances, or a shape of steps
    number: int  # of drafts or of steps
    estimated: float
    measured: float


class Watch:
    """Records the estimates with which `AdaptiveDrafts` decides, and what came of them."""

    def __init__(self) -> None:
        self.drafts, self.steps = list[_Draft](), list[_Step]()
        # Of each row in the last choice: acceptance of its run and of the head's drafts, and the
        # run's classes (`match` and `last` of `_Draft`).
        self._offered: list[tuple[Sequence[float], Sequence[float], int, float]] = []
        self._estimates: dict[StepRow, tuple[Sequence[float], int, float]] = {}
        self._last: dict[RowDrafting, float] = {}
        self._copies = False

    def choose(self, policy: Any, rows: Sequence[RowDrafting], **how: Any) -> Choice:
        head = policy._head_rates.cumulative_acceptance()
        before = [(each, min(each.ahead, each.expected), each.waiting) for each in rows]
        choice = _CHOOSE(policy, rows, **how)
        # A row with unread tokens was not asked for a run.
        self._offered = [
            (
                [] if each.unread else each.offer(ahead)[1],
                head[:waiting],
                _match(each),
                self._last.get(each, -1.0),
            )
            for each, ahead, waiting in before
        ]
        return choice

    def plan(self, scheduler: Scheduler, chunk: Any, decode: tuple[StepRow, ...]) -> bool:
        sync = _PLAN(scheduler, chunk, decode)
        for each, (host, head, match, last) in zip(decode, self._offered):
            self._estimates[each] = (head if each.source == MTP else host), match, last
        return sync

    def observe(self, scheduler: Scheduler, step: InFlightStep) -> None:
        for each in step.rows:
            source = "head" if each.source == MTP else "copies"
            estimates, match, last = self._estimates.pop(each, ((), 0, -1.0))
            # As in `HeadRates`, drafts after an answer's end count as rejected.
            if each.num_cached:
                for place, estimate in enumerate(estimates[: each.num_verified]):
                    accepted = place < each.num_accepted
                    self.drafts.append(_Draft(source, estimate, accepted, place + 1, match, last))
                if each.source != MTP and each.num_verified:
                    share = each.num_accepted / each.num_verified
                    self._last[each.sequence.drafting] = share
        self._copies = any(each.source != MTP for each in step.rows)
        _OBSERVE(scheduler, step)

    def learn(self, policy: Any, head: Any, shape: StepShape, seconds: float | None) -> None:
        if seconds is not None:
            cost = policy._costs.of_batch(shape.rows, sync=shape.sync).cost(shape)
            source = "copies" if self._copies else "head"
            self.steps.append(_Step(source, shape, seconds, cost))
        _LEARN(policy, head, shape, seconds)


def _match(row: RowDrafting) -> int:
    copying = (each for each in row.host.values() if isinstance(each, NgramDrafter))
    return max((each.match for each in copying), default=0)


_CHOOSE, _LEARN = AdaptiveDrafts.choose, AdaptiveDrafts.observe
_PLAN, _OBSERVE = Scheduler._choose_drafts, Scheduler._observe


def calibrated(
    work: tuple[str, ...] = ("story", "edit", "agent", "closed"),
    streams: tuple[int, ...] = (1, 8, 16),
    rounds: int = 4,
    max_tokens: int = 120,
    seed: int = 0,
    picture: Path | None = None,
) -> Rows:
    """What the draft policy expects of drafts and steps, and what comes of them.

    The bundled model answers greedy requests by default settings, without HTTP; each number of
    streams has an engine of its own, which has calibrated its costs before. A draft's estimate is
    the probability that it and all drafts before it in its window are emitted; those after an
    answer's end are not. Drafts are grouped by estimate, by position in the window and, if they are
    copies, by the length of the match before their run, and by how much of the row's last run was
    right. A step's cost is relative to a step without drafts. As few steps have no drafts, measured
    costs are scaled so that the median of measured over estimated cost is 1 for each number of
    rows.

    Args:
        work: kinds of requests, as in `never_slower`
        streams: numbers of concurrent requests
        picture: an SVG file to write, with one plot of the drafts and one of the steps
    """
    drafts, costs = list[_Draft](), list[_Point]()
    for count in streams:
        watch = Watch()
        with watched(watch):
            _answer(work, count, rounds, max_tokens, seed)
        drafts += watch.drafts
        costs += of_steps(watch.steps)
    copies = [each for each in drafts if each.source == "copies"]
    rates = [*_of_drafts(drafts, _ACCEPTANCES, lambda each: each.estimated)]
    positions = _of_drafts(drafts, _POSITIONS, lambda each: each.position)
    matches = _of_drafts(copies, _MATCHES, lambda each: each.match)
    ends = _of_drafts(copies, _LAST, lambda each: each.last)
    groups = ("acceptance", rates), ("position", positions), ("match", matches), ("last run", ends)
    for name, points in groups:
        names = f"source | {name} | drafts | estimated | measured"
        yield from (row(names, *each) for each in points)
    yield from (row("source | rows x tokens | steps | estimated | measured", *c) for c in costs)
    if picture is not None:
        plots = ("acceptance of drafts", 1.0, rates), ("cost of steps", _MOST_COST, costs)
        picture.write_text(_svg(*plots), "utf-8")
        yield f"Written: {picture}"


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Record in `watch` what the policies of all engines expect and see."""
    with (
        patch.object(AdaptiveDrafts, "choose", lambda *args, **named: watch.choose(*args, **named)),
        patch.object(AdaptiveDrafts, "observe", lambda *args: watch.learn(*args)),
        patch.object(Scheduler, "_choose_drafts", lambda *args: watch.plan(*args)),
        patch.object(Scheduler, "_observe", lambda *args: watch.observe(*args)),
    ):
        yield


def _answer(work: Sequence[str], streams: int, rounds: int, max_tokens: int, seed: int) -> None:
    """Answer `rounds` times `streams` requests of each kind."""
    model, tokenizer = load_model(BUNDLED_MODEL, enable_mtp=True), Tokenizer.load(BUNDLED_MODEL)
    config = EngineConfig(
        max_num_seqs=streams, calibration_seconds=CALIBRATION_SECONDS, prefix_cache_size=1 << 28
    )
    engine = build_engine(model, config, tokenizer.vocab_size, tokenizer.eos_token_ids)
    sampling, source = SamplingParams(max_tokens, temperature=0.0), PromptSource(seed)
    with EngineSubject("", engine, tokenizer, Asking(max_tokens)) as subject:
        for _, kind in itertools.product(range(rounds), work):
            chats = (
                tokenizer.render_chat(body["messages"], body.get("tools"))
                for body in WORK[kind](source, streams)
            )
            encoded = (tokenizer.encode(chat, add_special_tokens=False) for chat in chats)
            subject.ask_token_ids([(ids, sampling) for ids in encoded])


def _of_drafts(
    drafts: Sequence[_Draft], classes: _Classes, value: Callable[[_Draft], float]
) -> Iterator[_Point]:
    groups = _grouped(drafts, lambda each: (each.source, _class_of(value(each), classes)))
    for source, (_, name) in itertools.product(_COLORS, classes):
        own = groups.get((source, name), [])
        if len(own) >= _FEWEST:
            estimated = statistics.mean(each.estimated for each in own)
            came = statistics.mean(each.accepted for each in own)
            yield _Point(source, name, len(own), estimated, came)


def of_steps(steps: Sequence[_Step]) -> Iterator[_Point]:
    """Yields estimated and measured costs by rows, source of drafts and tokens per row."""
    unit = {
        rows: statistics.median(step.seconds / step.cost for step in group)
        for rows, group in _grouped(steps, lambda step: step.shape.rows).items()
    }
    groups = _grouped(steps, lambda step: (step.shape.rows, step.source, _tokens(step.shape)))
    for (rows, source, tokens), group in sorted(groups.items()):
        if len(group) >= _FEWEST:
            measured = statistics.median(step.seconds for step in group) / unit[rows]
            estimated = statistics.median(step.cost for step in group)
            yield _Point(source, f"{rows} x {tokens}", len(group), estimated, measured)


def _tokens(shape: StepShape) -> str:
    """Returns the class of a step's tokens per row."""
    return _class_of(1 + shape.drafts / shape.rows, _TOKENS)


def _class_of(value: float, classes: _Classes) -> str:
    return next(name for most, name in classes if value <= most)


def _grouped(items: Sequence[_T], key: Callable[[_T], Any]) -> dict[Any, list[_T]]:
    groups = defaultdict[Any, list[_T]](list)
    for each in items:
        groups[key(each)].append(each)
    return groups


def _svg(*plots: tuple[str, float, Sequence[_Point]]) -> str:
    """Returns a picture of plots of measured over estimated values, each with its largest value."""
    width, height = len(plots) * (_SIDE + 2 * _MARGIN), _SIDE + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, (title, most, points) in enumerate(plots):
        left, bottom = number * (_SIDE + 2 * _MARGIN) + _MARGIN, _MARGIN + _SIDE
        middle = left + _SIDE // 2
        parts += [
            f'<rect x="{left}" y="{_MARGIN}" width="{_SIDE}" height="{_SIDE}" fill="none" '
            'stroke="#888"/>',
            f'<path d="M{left} {bottom}l{_SIDE} -{_SIDE}" stroke="#888" stroke-dasharray="4"/>',
            f'<text x="{middle}" y="{_MARGIN - 14}" text-anchor="middle">{title}</text>',
            f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle">estimated</text>',
            f'<text transform="translate({left - 34} {bottom - _SIDE // 2}) rotate(-90)" '
            'text-anchor="middle">measured</text>',
        ]
        for mark in (0, most / 2, most):
            along = _SIDE * mark / most
            parts += [
                f'<text x="{left + along:.0f}" y="{bottom + 17}" '
                f'text-anchor="middle">{mark:g}</text>',
                f'<text x="{left - 6}" y="{bottom - along + 4:.0f}" '
                f'text-anchor="end">{mark:g}</text>',
            ]
        for point in points:
            x, y = (_SIDE * min(each / most, 1.0) for each in (point.estimated, point.measured))
            radius = 2 + math.log10(point.number)
            parts.append(
                f'<circle cx="{left + x:.1f}" cy="{bottom - y:.1f}" r="{radius:.1f}" '
                f'fill="{_COLORS[point.source]}" fill-opacity="0.7"/>'
            )
    for number, (source, color) in enumerate(_COLORS.items()):
        y = _MARGIN + 20 + 20 * number
        parts += [
            f'<circle cx="{_MARGIN + 16}" cy="{y - 4}" r="5" fill="{color}"/>',
            f'<text x="{_MARGIN + 28}" y="{y}">{source}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])
