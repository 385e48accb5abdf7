"""The scheduler without a model: chunks, turns, admission, memory and the ends of requests."""

import copy
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.core import EngineCore, StepClock
from mlx_mtp.engine.request import Request, RequestOptions, RequestOutput
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import InFlightStep, StepPlan, StepRow
from mlx_mtp.errors import StepError
from mlx_mtp.prefix.cache import PrefixCache
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.costs import StepShape
from mlx_mtp.speculative.draft_policy import FixedDrafts, HeadWindow


def sequence(
    name: str, num_prompt: int, max_tokens: int = 5, drafts: int | None = None
) -> Sequence:
    request = Request(
        name,
        (3,) * num_prompt,
        SamplingParams(max_tokens=max_tokens),
        options=RequestOptions(num_draft_tokens=drafts),
    )
    return Sequence(request, (1,), max_tokens)


def scheduler(memory: int | None = None, **limits: int) -> Scheduler:
    """Returns a scheduler with memory for `memory` tokens in all rows (None: no limit)."""
    usage = None if memory is None else lambda lengths: sum(lengths) / memory
    return Scheduler(EngineConfig(**limits), FixedDrafts(2), usage=usage)


def finish_chunk(policy: Scheduler, plan: StepPlan) -> list[RequestOutput]:
    """Report a plan's chunk as a runner would: a first token where a prompt ends."""
    assert plan.chunk
    for row in plan.chunk:
        row.sequence.note_launched(row.length)
        row.num_cached, row.token_ids = row.length, (7,) if row.is_last else ()
    return policy.update([InFlightStep(plan.chunk, is_prefill=True)])


def finish_decode(policy: Scheduler, plan: StepPlan, *, stop: bool) -> list[RequestOutput]:
    """Report a plan's rows as a runner would: a token each, which is their last if `stop`."""
    for row in plan.decode:
        row.sequence.note_launched(3)
        row.length, row.num_cached, row.token_ids = 3, 1, (7,)
        row.finished = stop or len(row.sequence.output) + 1 == row.sequence.max_new_tokens
    return policy.update([InFlightStep(plan.decode)])


def names(rows) -> list[str]:
    return [row.sequence.request_id for row in rows]


def add(policy: Scheduler, **lengths: int) -> None:
    for name, length in lengths.items():
        policy.add(sequence(name, length))


def test_short_prompts_share_a_chunk_within_its_size_and_long_ones_do_not():
    policy = scheduler(prefill_step_size=16)
    add(policy, a=4, b=5, c=3, d=9, e=30)
    groups = []
    for _ in range(3):
        plan = policy.schedule()
        groups.append(names(plan.chunk))
        finish_chunk(policy, plan)
    assert groups == [["a", "b", "c"], ["d"], ["e"]]


def test_a_long_prompt_takes_turns_with_decoding_and_with_short_ones():
    policy = scheduler(prefill_step_size=16)
    add(policy, first=4)
    finish_chunk(policy, policy.schedule())
    add(policy, long=160)
    policy.schedule()
    add(policy, short=3)
    planned = []
    for _ in range(4):
        plan = policy.schedule()
        assert names(plan.decode)[:1] == ["first"]
        planned += names(plan.chunk)
    assert "short" in planned[:2]
    assert planned.count("long") >= 2


def decoding(policy: Scheduler, names: str) -> tuple[Sequence, ...]:
    """Returns rows with two windows of 3 positions in flight."""
    add(policy, **dict.fromkeys(names, 4))
    finish_chunk(policy, policy.schedule())
    rows = tuple(row.sequence for row in policy.schedule().decode)
    for row in (*rows, *rows):
        row.note_launched(3)
    return rows


def test_finish_reasons_and_output_after_the_end():
    policy = scheduler()
    rows = a, b, c = decoding(policy, "abc")
    first = [
        StepRow(a, length=3, num_cached=2, token_ids=(5, 1), finished=True),
        StepRow(b, length=3, num_cached=2, token_ids=(5, 6), finished=True),
        StepRow(c, length=3, error=StepError("broken")),
    ]
    outputs = policy.update([InFlightStep(first)])
    assert [o.finish_reason for o in outputs] == ["stop", "length", "error"]
    late = InFlightStep([StepRow(row, length=3, num_cached=1, token_ids=(9,)) for row in rows])
    assert policy.update([late]) == []
    assert policy.idle
    assert policy.schedule().live == frozenset()
    assert policy.stats().generation_tokens == 3 + 4


class Watched(FixedDrafts):
    """Records what it observes."""

    def __init__(self) -> None:
        super().__init__(2)
        self.seen: list[tuple[list[HeadWindow], StepShape, float | None]] = []

    def observe(self, head, shape, seconds) -> None:
        self.seen.append((head, shape, seconds))


def test_the_policy_learns_of_decode_steps_alone():
    depth = Watched()
    policy = Scheduler(EngineConfig(), depth)
    a, b, c, d = decoding(policy, "abcd")
    assert depth.seen == []
    # b ends with a draft, d with the token that replaced a draft.
    drafted = {"length": 3, "num_drafts": 2, "num_proposed": 2, "num_accepted": 1}
    first = [
        StepRow(a, **drafted, num_cached=2, token_ids=(5, 6)),
        StepRow(b, **drafted, num_cached=1, token_ids=(1,), finished=True),
        StepRow(c, length=3, num_proposed=2, error=StepError("broken")),
        StepRow(d, **drafted, num_cached=2, token_ids=(5, 1), finished=True),
    ]
    # A row that had ended before has no tokens, but its window was computed.
    second = [StepRow(a, length=3, num_cached=1, token_ids=(5,)), StepRow(b, length=3)]
    policy.update([InFlightStep(first, seconds=0.5)])
    policy.update([InFlightStep(second)])
    a.note_launched(1)
    policy.update([InFlightStep([StepRow(a, length=1, num_cached=1, token_ids=(5,))])])
    # The size of the windows counts for the cost; failed rows are not reported.
    assert depth.seen == [
        ([(2, 1), (2, 0), (2, 1)], StepShape(3, 6, 2, 2), 0.5),
        ([(2, 0)], StepShape(2, 4, 0, 2), None),
        ([], StepShape(1, 0, 0, 0), None),  # A window without drafts says nothing of the head.
    ]
    stats = policy.stats()
    assert (stats.num_draft_windows, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 6, 3)
    assert stats.num_accepted_tokens_per_pos == {"mtp": (3, 0)}
    assert (stats.prompt_tokens, stats.generation_tokens) == (16, 4 + 2 + 1 + 2 + 1 + 1)


@pytest.mark.parametrize(("memory", "counted"), [(None, [0, 3, 4]), (100, [0, 0, 0])])
def test_the_policy_learns_how_many_requests_wait_for_a_row(monkeypatch, memory, counted):
    """At most `max_num_seqs` rows count, and no request that waits for memory."""
    policy, asked = scheduler(memory, max_num_seqs=6, prefill_step_size=8), []
    decoding(policy, "ab")
    choose = policy._drafts.choose
    monkeypatch.setattr(
        policy._drafts, "choose", lambda rows, **how: asked.append(how) or choose(rows, **how)
    )
    for count, others in zip((0, 3, 2), counted):
        add(policy, **{f"{count} {n}": 90 for n in range(count)})
        assert [row.num_proposed for row in policy.schedule().decode] == [2, 2]
        assert asked[-1]["waiting"] == others


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 70), min_size=1, max_size=12),
    step=st.sampled_from([1, 4, 16, 64]),
    rows=st.integers(1, 5),
    data=st.data(),
)
def test_every_prompt_token_is_computed_once_and_every_request_ends(prompts, step, rows, data):
    policy = scheduler(prefill_step_size=step, max_num_seqs=rows)
    waiting = {f"r{i}": sequence(f"r{i}", n) for i, n in enumerate(prompts)}
    for each in waiting.values():
        policy.add(each)
    computed: dict[str, list[int]] = {name: [] for name in waiting}
    ended: set[str] = set()
    for _ in range(2000):
        if policy.idle:
            break
        plan = policy.schedule()
        assert policy.stats().num_requests_running <= rows
        outputs = []
        if plan.chunk:
            longest = max(row.length for row in plan.chunk)
            assert len(plan.chunk) == 1 or longest * len(plan.chunk) <= step
            for row in plan.chunk:
                end = row.start + row.length
                assert row.start // step == (end - 1) // step
                assert end % step == 0 or row.is_last
                computed[row.sequence.request_id] += range(row.start, end)
            outputs += finish_chunk(policy, plan)
        if plan.decode:
            outputs += finish_decode(policy, plan, stop=data.draw(st.booleans()))
        ended |= {o.request_id for o in outputs if o.finish_reason}
    assert ended == set(waiting)
    for name, each in waiting.items():
        assert computed[name] == list(range(each.num_prompt))


def running(policy: Scheduler) -> list[Sequence]:
    return [s for s in policy._admitted() if not s.finished]


@settings(max_examples=60)
@given(
    requests=st.lists(st.tuples(st.integers(1, 120), st.integers(2, 20)), min_size=1, max_size=25),
    most=st.integers(150, 800),
    arrivals=st.integers(1, 5),
)
def test_all_requests_end_in_memory_that_fits_and_none_is_overtaken(requests, most, arrivals):
    """A stream of small requests can't hold up a large one."""
    policy = scheduler(most, max_num_seqs=8, prefill_step_size=64)
    coming = [sequence(str(i), prompt, answer) for i, (prompt, answer) in enumerate(requests)]
    everyone, order = list(coming), []
    for _ in range(1000):
        for one in coming[:arrivals]:
            policy.add(one)
        del coming[:arrivals]
        plan = policy.schedule()
        rows = running(policy)
        order += [s for s in rows if s not in order]
        # Counts prompts and maximum answers, independently of the sequence's own count.
        held = sum(len(s.prompt) + s.max_new_tokens for s in rows)
        assert len(rows) <= 1 or held <= most
        if plan.chunk:
            finish_chunk(policy, plan)
        finish_decode(policy, plan, stop=False)
    assert order == everyone
    assert all(s.finished for s in everyone)


# Which steps' times count as their cost, by a clock that the test moves.

ROWS = (sequence("a", 4), sequence("b", 4))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def decode(window: int, proposed: int, rows=ROWS, **more) -> list[InFlightStep]:
    return [
        InFlightStep([StepRow(s, length=window + 1, num_proposed=proposed) for s in rows], **more)
    ]


def laps(*steps: list[InFlightStep], overlap: bool = True) -> list[float | None]:
    """Returns each step's counted time; each takes one second longer than the one before it."""
    clock = Clock()
    timer, times = StepClock(clock), []
    steps = tuple(list(map(copy.copy, step)) for step in steps)  # the clock tells them apart
    for number, read in enumerate(steps):
        waits_from = clock.now
        clock.now += number
        if read:
            timer.note_read(read[-1], waits_from)
        following = steps[number + 1] if number + 1 < len(steps) else []
        timer.end_round(read, following if overlap else read)
        times.append(read[-1].seconds if read else None)
    return times


def test_steps_in_an_unbroken_row_are_timed():
    # No step comes before the first one or after the last one.
    assert laps(*[decode(2, 2)] * 5) == [None, 1, 2, 3, None]
    change = [*[decode(2, 2)] * 3, decode(2, 0), *[decode(0, 0)] * 3]
    assert laps(*change) == [None, 1, 2, 3, 4, 5, None]
    assert laps(*change, overlap=False) == [None, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("overlap", "sync"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("machine", ["the launch waits", "the read waits", "the host is slower"])
def test_each_decode_step_gets_its_own_time(machine, overlap, sync):
    """The host takes as long as a step in "the host is slower", and the device hardly any time."""
    clock, costs, found = Clock(), itertools.cycle([0.5, 0.2, 0.9, 0.3]), list[InFlightStep]()
    free, of = 0.0, dict[int, tuple[float, float]]()  # the cost of each step, and its end

    def run(_: StepPlan) -> list[InFlightStep]:
        nonlocal free
        (step,), cost = decode(2, 2), next(costs)
        began = clock.now
        clock.now += cost if machine == "the host is slower" else 1e-4
        free = max(free, began) + (1e-4 if machine == "the host is slower" else cost)
        if machine == "the launch waits":
            clock.now = max(clock.now, free)
        of[id(step)] = cost, free
        return [step]

    def read(step: InFlightStep) -> list[InFlightStep]:
        clock.now = max(clock.now, of[id(step)][1])
        found.append(step)
        return [step]

    runner = SimpleNamespace(
        run=run, read=read, prefixes=PrefixCache(), save_answers=lambda _: None
    )
    plan = StepPlan((), tuple(map(StepRow, ROWS)), frozenset(ROWS), sync=sync)
    core = EngineCore(
        SimpleNamespace(num_waiting=0, schedule=lambda: plan, update=lambda steps: steps),
        runner,
        overlap=overlap,
        clock=clock,
    )
    for _ in range(12):
        core.step()
    timed = [(step.seconds, of[id(step)][0]) for step in found if step.seconds is not None]
    assert len(timed) >= 9
    assert {step.sync for step in found if step.seconds is not None} == {sync or not overlap}
    assert [a for a, _ in timed] == pytest.approx([b for _, b in timed], abs=1e-3)


PREFILL = [InFlightStep([StepRow(ROWS[0], length=9)], is_prefill=True)]
BREAKS = {
    "idle": [],
    "chunk": [*PREFILL, *decode(2, 2)],
    "left": decode(2, 2, rows=ROWS[:1]),
    "joined": decode(2, 2, rows=(*ROWS, sequence("c", 4))),
    "failed": decode(2, 2, error=StepError("broken")),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_breaks_the_row(name):
    steps = [*[decode(2, 2)] * 3, BREAKS[name], *[decode(2, 2)] * 4]
    times, alone = laps(*steps), laps(*steps, overlap=False)
    assert times[3] is None
    # If no other step is in flight, only steps that are not decode steps have no cost.
    assert (alone[3] is None) == (name in ("idle", "chunk", "failed"))
    assert times[2] is None  # the next step was of another kind
    assert alone[2] is not None
    assert times[-2] is not None
