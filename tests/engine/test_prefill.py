"""Chunks of prompts and their turns, without a model, on a clock that is moved by costs."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.chunk_costs import PrefillCosts
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.prefill import PrefillScheduler
from mlx_mtp.engine.request import Request, RequestOptions
from mlx_mtp.engine.scheduler import MOST_TOGETHER, Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import InFlightStep, StepPlan, StepRow
from mlx_mtp.prefix.cache import PrefixCache
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.draft_policy import FixedDrafts
from tests.support.cases import ask, driver, words
from tests.support.harness import greedy, request

Cost = Callable[[int, float], float]  # seconds, by a chunk's tokens and the tokens before it
LONG = 60_000
PAUSE = 0.1
DECODE = 0.015
STREAM = 10**6  # tokens of an answer that outlasts a test


def machine(fixed: float, token: float, context: float) -> Cost:
    return lambda tokens, before: fixed + tokens * (token + context * before)


MACHINES: dict[str, Cost] = {
    "a large GPU": machine(0.004, 2e-5, 4e-10),
    "a laptop, experts": machine(0.03, 6e-4, 4e-9),
    "a laptop, dense": machine(0.04, 8e-3, 1e-8),
    "a CPU": machine(0.0, 5e-4, 2e-8),
    "a GPU, attention from 64 tokens on": lambda tokens, before: (
        0.03
        + (3e-4 * tokens + 1e-6 * before if tokens < 64 else tokens * (1.1e-4 + 2.2e-10 * before))
    ),
    "steps of 64": lambda tokens, before: 0.01 + 0.03 * math.ceil(tokens / 64),
}


class World:
    """A scheduler whose steps take a machine's time; with look-ahead they are read later."""

    def __init__(self, cost: Cost, *, overlap: bool = True, **config: float) -> None:
        config = {"prefill_step_size": 512, "max_decode_pause": 1e3 * PAUSE} | config
        self.config = EngineConfig(**config)
        self.policy = Scheduler(self.config, FixedDrafts(0))
        self.cost, self.overlap = cost, overlap
        self.now = self.free = 0.0  # the host's time; when the device has finished its work
        self.in_flight: list[tuple[InFlightStep, float]] = []
        self.first: dict[str, float] = {}  # time of each first token
        self.chunks: list[tuple[int, float, bool]] = []  # tokens, seconds, beside running rows
        self.together: set[int] = set()  # tokens of chunks that share a forward pass with rows

    def add(self, name: str, prompt: int, answer: int = 1) -> Sequence:
        sampling = SamplingParams(max_tokens=answer)
        sequence = Sequence(Request(name, (3,) * prompt, sampling), (), answer)
        self.policy.add(sequence)
        return sequence

    def stream(self) -> None:
        """Start a row that decodes for the whole test."""
        self.add("stream", 1, STREAM)
        while not self.policy._running:
            self.step()

    def launch(self, step: InFlightStep, seconds: float) -> None:
        for row in step.rows:
            row.sequence.note_launched(row.length)
        step.seconds = seconds
        self.free = max(self.free, self.now) + seconds
        self.in_flight.append((step, self.free))

    def step(self) -> None:
        plan, before = self.policy.schedule(), len(self.in_flight)
        if plan.chunk:
            for row in plan.chunk:
                row.num_cached = row.length
                row.token_ids = (7,) if row.is_last else ()
                row.finished = row.is_last and row.sequence.max_new_tokens == 1
            tokens = sum(row.length for row in plan.chunk)
            seconds = self.cost(tokens, sum(row.start for row in plan.chunk) / len(plan.chunk))
            self.chunks.append((tokens, seconds, bool(plan.decode)))
            if plan.together:
                self.together.add(tokens)
            self.launch(InFlightStep(plan.chunk, is_prefill=True), seconds)
        if plan.decode:
            for row in plan.decode:
                row.length, row.num_cached, row.token_ids = 1, 1, (7,)
            self.launch(InFlightStep(plan.decode), DECODE)
        number = before if self.overlap else len(self.in_flight)
        ready, self.in_flight = self.in_flight[:number], self.in_flight[number:]
        for step, end in ready:
            self.now = max(self.now, end)
            for output in self.policy.update([step]):
                if output.token_ids:
                    self.first.setdefault(output.request_id, self.now)
        if not ready and not self.in_flight:
            self.now += 0.001

    def until(self, *names: str) -> None:
        for _ in range(200_000):
            if self.first.keys() >= set(names):
                return
            self.step()
        raise AssertionError(f"{names} starve")

    def seconds(self, name: str, prompt: int) -> float:
        """Returns a prompt's seconds from its arrival to its first token, without other prompts."""
        self.add(name, prompt)
        began = self.now
        self.until(name)
        return self.first[name] - began


def known(cost: Cost, *, running: bool, **more: bool) -> World:
    """Returns a world that has computed a prompt of several chunks, beside a stream or alone."""
    world = World(cost, **more)
    if running:
        world.stream()
    world.seconds("before", 6000)
    world.chunks.clear()
    return world


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", MACHINES)
def test_two_long_prompts_and_a_short_one_behind_them(name, overlap, running):
    length = 5000 if name == "a laptop, dense" else LONG  # Its chunks have 6 tokens.
    alone = known(MACHINES[name], running=running, overlap=overlap)
    long, short = alone.seconds("long", length), alone.seconds("short", 700)
    # The step in flight when a prompt arrives, and with look-ahead the one launched after it.
    wait = (2 if overlap else 1) * (max(seconds for _, seconds, _ in alone.chunks) + DECODE)
    world = known(MACHINES[name], running=running, overlap=overlap)
    began = world.now
    for prompt in ("one", "two"):
        world.add(prompt, length)
    for _ in range(40):
        world.step()
    arrived = world.now
    world.add("short", 700)
    world.until("short")
    assert world.first["short"] - arrived <= 2 * short + wait
    world.until("two")
    # Half a percent is allowed, because chunk lengths are measured in another order.
    assert world.first["one"] - began <= (long + short) * 1.005 + wait
    assert world.first["two"] - began <= (2 * long + short) * 1.005 + wait


@pytest.mark.parametrize("name", MACHINES)
def test_chunks_beside_a_stream_are_as_long_as_its_pause_allows(name):
    cost = MACHINES[name]
    world = World(cost)
    world.stream()
    world.seconds("long", 30_000)
    beside = [(tokens, seconds) for tokens, seconds, running in world.chunks if running]
    assert world.together == {tokens for tokens, _ in beside if tokens <= MOST_TOGETHER}
    # Leaves out the first chunks, before their lengths are measured, and those cut by save points.
    beside, first = beside[8:], beside[0]
    assert first[0] < 64
    assert max(seconds for _, seconds in beside) <= PAUSE
    whole = [(tokens, seconds) for tokens, seconds in beside[:-1] if tokens == max(beside)[0]]
    lengths, longest = PrefillCosts(512).lengths, whole[0][0]
    if longest < 512:
        longer = lengths[lengths.index(longest) + 1]
        assert cost(longer, 2000) > 0.65 * PAUSE
    # Prompts are not much slower than necessary.
    fastest = min(cost(n, 30_000) / n for n in lengths)
    assert all(seconds / tokens < 2.3 * fastest for tokens, seconds in whole)


@pytest.mark.parametrize("tokens", range(30, 76, 5))
def test_prompts_that_fit_into_the_pause_take_one_chunk_beside_a_stream(tokens):
    """Also if they are a little longer than a length that is measured."""
    cost = machine(0.01, 1e-3, 0.0)
    world = World(cost)
    world.stream()
    world.seconds("long", 6000)
    world.chunks.clear()
    world.seconds("short", tokens)
    assert [size for size, _, _ in world.chunks] == [tokens]


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("name", ["a large GPU", "a GPU, attention from 64 tokens on"])
def test_one_chunk_of_each_length_that_compiles_kernels_makes_the_others_hardly_slower(
    name, number
):
    compiling, counts = 4.0, Counter[int]()

    def cost(tokens: int, before: float) -> float:
        counts[tokens] += 1
        return MACHINES[name](tokens, before) + compiling * (counts[tokens] == number)

    def seconds(cost: Cost) -> float:
        world = World(cost, prefill_step_size=2048)
        world.stream()
        took = world.seconds("long", LONG)
        return took - compiling * sum(each > compiling for _, each, _ in world.chunks)

    assert seconds(cost) < 1.25 * seconds(MACHINES[name])


@pytest.mark.parametrize("name", MACHINES)
def test_chunks_grow_again_after_the_machine_was_busy(name):
    """If 20 of 100 chunks take four times as long, the other chunks lose little speed."""
    length = 6000 if name == "a laptop, dense" else LONG

    def seconds(busy: float) -> float:
        count, lost = itertools.count(), []

        def cost(tokens: int, before: float) -> float:
            alone = MACHINES[name](tokens, before)
            lost.append((busy - 1) * alone if next(count) % 100 < 20 else 0)
            return alone + lost[-1]

        world = World(cost, prefill_step_size=2048)
        world.stream()
        return world.seconds("long", length) - sum(lost)

    assert seconds(4) < 3 * seconds(1)


@pytest.mark.parametrize("fixed", [0.08, 0.12, 0.2])
@pytest.mark.parametrize("known_alone", [False, True])
def test_a_machine_that_is_too_slow_for_the_pause_keeps_half_of_its_speed(fixed, known_alone):
    """Each chunk has a large fixed cost, as if it read all weights; known before or not."""
    slow = machine(fixed, 1e-3, 0.0)
    world = known(slow, running=False) if known_alone else World(slow)
    world.stream()
    world.seconds("long", 30 * 512)
    beside = [tokens for tokens, _, running in world.chunks if running]
    tokens = {*beside[30:]} & {*PrefillCosts(512).lengths}  # Other lengths had to be tried.
    assert max(slow(n, 0) / n for n in tokens) < 2 * slow(512, 0) / 512 * 1.01
    assert min(tokens) < 512


def test_without_a_bound_every_chunk_is_a_whole_step():
    world = World(MACHINES["a laptop, dense"], max_decode_pause=0.0)
    world.stream()
    world.seconds("long", 5 * 512)
    assert {tokens for tokens, _, running in world.chunks if running} == {512}


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([1, 40, 300, 2000, 9000])),
        min_size=1,
        max_size=25,
    ),
    rows=st.integers(1, 6),
    overlap=st.booleans(),
)
def test_nobody_starves(arrivals, rows, overlap):
    """A prompt takes at most twice the work left of it and of earlier prompts, and a few chunks."""
    unit = 1e-3
    world = World(lambda tokens, _: unit * tokens, overlap=overlap, max_num_seqs=rows)
    everyone: list[Sequence] = []
    most: dict[str, float] = {}
    for number, (steps, prompt) in enumerate(arrivals):
        for _ in range(steps):
            world.step()
        everyone.append(world.add(f"{number}", prompt))
        left = sum(s.num_prompt - s.num_cached for s in everyone if not s.finished)
        most[f"{number}"] = world.now + unit * (2 * left + 4 * 512)
    world.until(*most)
    assert {name: at for name, at in world.first.items() if at > most[name]} == {}


def used(costs: PrefillCosts, cost: Cost, length: int, count: int, before: float = 0) -> None:
    for _ in range(count):
        costs.observe(length, before, cost(length, before))


def test_the_fastest_length_is_found_in_long_prompts_and_a_short_one_is_computed_whole():
    def cost(tokens: int, before: float) -> float:
        return tokens * {512: 1.3e-3, 256: 1.1e-3, 128: 1e-3, 64: 1.2e-3}[tokens]

    costs, found = PrefillCosts(512), []
    for _ in range(30):
        assert costs.fastest(left=600) in (512, *found)
        found.append(costs.fastest(left=5000))
        used(costs, cost, found[-1], 1)
    # The first measurement of a length doesn't count.
    assert found[:16] == [512] * 4 + [256] * 4 + [128] * 4 + [64] * 4
    assert found[16:] == [128] * 14
    assert costs.fastest(left=600) == 128


@pytest.mark.parametrize(("fixed", "best"), [(0.2, 2048), (0.06, 1024), (0.0, 512)])
def test_longer_chunks_are_tried_where_they_may_be_planned(fixed, best):
    """Lengths above 512 are tried while they gain 5%, in prompts of at least two such chunks."""
    cost, costs, found = machine(fixed, 1e-3, 0.0), PrefillCosts(2048), []
    for _ in range(20):
        assert costs.fastest(left=3 * 512) <= max(found, default=512)
        found.append(costs.fastest(left=60_000))
        used(costs, cost, found[-1], 1)
    assert found[:4] == [512] * 4 and found[-1] == best
    assert costs.fastest(left=0) == best


def test_what_was_measured_long_ago_is_not_held_against_a_length_and_outliers_hardly():
    """A length measured only a few times is not rejected either."""
    cost = machine(0.0, 1e-3, 0.0)
    costs = PrefillCosts(512)
    used(costs, lambda n, b: 5 * cost(n, b), 86, 5)  # The machine was busy.
    used(costs, cost, 43, 5)
    assert costs.longest_within(PAUSE, 0) == 43
    used(costs, cost, 43, 70)
    assert costs.longest_within(PAUSE, 0) == 86
    used(costs, cost, 86, 20)
    costs.observe(86, 0, 30.0)
    assert costs.seconds(86, 0) < 1.4 * cost(86, 0)
    costs = PrefillCosts(512)
    used(costs, cost, 43, 5)
    used(costs, lambda n, b: 5 * cost(n, b), 86, 3)  # A length's first one does not count.
    assert costs.longest_within(PAUSE, 0) == 86
    used(costs, lambda n, b: 5 * cost(n, b), 86, 1)
    assert costs.longest_within(PAUSE, 0) == 43


def test_the_context_is_learned_and_all_is_kept():
    cost, costs = MACHINES["a CPU"], PrefillCosts(512)
    for number in range(300):
        costs.observe(64, 200 * number, cost(64, 200 * number))
    again = PrefillCosts(512)
    again.load_table(costs.table())
    for each in (costs, again):
        for before in (0, 30_000, 60_000):
            assert each.seconds(64, before) == pytest.approx(cost(64, before), rel=0.2)
            assert each.seconds(128, before) == pytest.approx(cost(128, before), rel=0.2)


def test_prompts_that_are_computed_together_share_the_pause():
    config = EngineConfig(max_decode_pause=100.0)
    prefills = PrefillScheduler(config)
    group = [
        Sequence(Request(f"{n}", (3,) * 30, SamplingParams(max_tokens=2)), (), 2) for n in "abc"
    ]
    prefills.groups.append(group)
    chunk = prefills.next_chunk(beside=True)
    assert [row.length for row in chunk] == [43 // 3] * 3


def test_no_chunk_of_few_tokens_is_left_before_a_cut():
    world = known(MACHINES["a CPU"], running=True)
    world.seconds("long", 4 * 512 + 300)
    lengths = [tokens for tokens, _, _ in world.chunks]
    assert all(2 * after >= before for before, after in itertools.pairwise(lengths))


def test_the_progress_of_a_prompt_is_told_where_that_was_asked_for(tiny_models):
    run = driver(tiny_models["qwen3_5"])
    prompt = words(1, 70)
    asked = replace(request("asked", prompt, greedy(4)), options=RequestOptions(progress=True))
    ask(run, asked, request("other", words(2, 40), greedy(4)))
    ask(run, replace(asked, request_id="again", prompt_token_ids=(*prompt, 5, 6)))
    for name, reused, done in (("asked", 0, [0, 16, 32, 48, 64, 70]), ("again", 70, [70, 72])):
        outputs = run.outputs[name]
        told = [output.progress for output in outputs[: len(done)]]
        assert [each.done for each in told] == done
        assert {(each.total, each.reused) for each in told} == {(done[-1], reused)}
        assert [bool(output.token_ids) for output in outputs] == [False] * (len(done) - 1) + [
            True
        ] * (len(outputs) - len(done) + 1)
        assert all(output.progress is None for output in outputs[len(done) :])
    assert all(output.progress is None for output in run.outputs["other"])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("launch", [0.001, 0.1, 3.0, None])
def test_a_chunk_is_timed_apart_from_what_is_launched_behind_it(overlap, launch):
    """Launches take less time than their step, more, or once far more; None is a CPU.

    With 0.1 the host has other work between the launches. On a CPU a launch waits for its step, so
    a chunk's time is at least the step's.
    """
    row = Sequence(Request("a", (3,), SamplingParams(max_tokens=9)), (), 9)
    world = World(MACHINES["a CPU"])
    costs = itertools.cycle([0.5, 0.01, 0.25, 0.02] if launch != 0.1 else [0.03, 0.01, 0.02])
    expected, found = [], []

    def run(_: StepPlan) -> list[InFlightStep]:
        steps = [InFlightStep([StepRow(row, length=1)], is_prefill=p) for p in (True, False)]
        own = 0.001 if launch == 3.0 and len(expected) != 6 else launch
        began = world.now
        for step in steps:
            expected.append(next(costs))
            world.launch(step, expected[-1])
            step.seconds = None
        world.now = world.free if own is None else began + own
        return steps

    def read(step: InFlightStep) -> list[InFlightStep]:
        _, end = world.in_flight.pop(0)
        world.now = max(world.now, end)
        return [step]

    runner = SimpleNamespace(
        run=run, read=read, prefixes=PrefixCache(), save_answers=lambda _: None
    )
    plan = StepPlan((StepRow(row, 0, 1),), (StepRow(row),), frozenset({row}))

    def update(steps: list[InFlightStep]) -> list[InFlightStep]:
        world.now += 2.0 if launch == 0.1 else 0.0
        found.extend(steps)
        return []

    scheduler = SimpleNamespace(num_waiting=0, schedule=lambda: plan, update=update)
    core = EngineCore(scheduler, runner, overlap=overlap, clock=lambda: world.now)
    for _ in range(6):
        core.step()
    assert len(found) == (10 if overlap else 12)
    seconds = [step.seconds for step in found if step.is_prefill]
    expected = expected[: len(found) : 2]
    if launch is None:
        assert all(a >= b - 1e-9 for a, b in zip(seconds, expected, strict=True))
    elif launch == 0.001:
        assert seconds == pytest.approx(expected)
    elif launch == 0.1:
        assert seconds == pytest.approx([0.1] * len(seconds))
    else:  # At most their own time; a step that ended during a long launch has no known time.
        slow = seconds.pop(3)
        assert slow == pytest.approx(3.0)
        assert (seconds.pop(2) is None) == overlap
        assert all(a <= b + 1e-9 for a, b in zip(seconds, expected[:2] + expected[4:]))
