"""Save points and held-back requests, with no model."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.cache.prefix_tree import PrefixTree
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.reuse import PrefixReuse
from mlx_mtp.engine.save_points import MIN_GAIN, NUM_TURNS, save_points, turns
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import InFlightStep, StepPlan
from mlx_mtp.errors import StepError
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.depth import FixedDepth

END = 1
STEP = 16
GAIN = 4


def messages(*lengths: int) -> list[int]:
    """Messages of so many tokens, each with its end."""
    return [t for length in lengths for t in ([5] * (length - 1) + [END])]


def points_of(prompt: list[int], start: int, step: int, gain: int = MIN_GAIN) -> list[int]:
    return save_points(len(prompt), start, turns(prompt, {END}), step, gain)


def test_a_prompt_is_saved_after_its_first_and_last_turns_and_at_its_end():
    prompt = [*messages(100, 200, 300, 400), *[5] * 7]
    assert points_of(prompt, 0, 4096) == [100, 600, 1000, 1007]
    # What is there already is not saved again.
    assert points_of(prompt, 600, 4096) == [1000, 1007]
    assert points_of(prompt, 1000, 4096) == [1007]
    assert points_of(prompt, 1007, 4096) == []


def test_near_turns_are_not_cut_but_the_last():
    prompt = [*messages(*[10] * 100), *[5] * 3]
    points = points_of(prompt, 0, 4096)
    assert points == [1000, 1003]
    assert points_of(messages(20), 0, 4096) == [20]
    assert points_of([5] * (MIN_GAIN - 1) + [END, 5], 0, 4096) == [MIN_GAIN, MIN_GAIN + 1]
    assert points_of([5] * (MIN_GAIN - 2) + [END, 5], 0, 4096) == [MIN_GAIN]


def test_a_system_prompt_is_saved_however_short_the_question():
    prompt = [*messages(3000, 10), *[5] * 3]
    assert points_of(prompt, 0, 512) == [512, 1024, 2048, 3000, 3013]
    # The next question finds all of it.
    assert points_of([*messages(3000, 20), 5], 3000, 512) == [3021]


def test_long_texts_are_saved_at_doubling_distances_where_chunks_end():
    points = points_of([5] * 10_000, 0, 512)
    assert points == [512, 1024, 2048, 4096, 8192, 10_000]
    assert points_of([5] * 10_000, 3000, 512) == [4096, 8192, 10_000]


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=80),
    st.integers(0, 80),
    st.integers(1, 20),
    st.integers(1, 9),
)
def test_save_points_are_few_and_apart(prompt, start, step, gain):
    start = min(start, len(prompt))
    points = points_of(prompt, start, step, gain)
    assert points == sorted(set(points))
    assert all(start < p <= len(prompt) for p in points)
    assert bool(points) == (start < len(prompt)) == (points[-1:] == [len(prompt)])
    cuts = [start, *points[:-1]]
    assert all(b - a >= gain for a, b in itertools.pairwise(cuts))
    doubled = sum(1 for k in range(80) if step << k < len(prompt))
    assert len(points) <= NUM_TURNS + 2 + doubled


@dataclass(frozen=True)
class Fake:
    nbytes: int = 1

    def split(self, at: int) -> tuple[Fake, Fake]:
        return Fake(), Fake()


class World:
    """A scheduler with a prefix cache, and a runner that only saves what it should."""

    def __init__(self, rows: int = 8, step: int = STEP) -> None:
        self.tree = PrefixTree(1000)
        self.reuse = PrefixReuse(self.tree, {END}, step, GAIN)
        config = EngineConfig(max_num_seqs=rows, prefill_step_size=step)
        self.policy = Scheduler(config, FixedDepth(2), self.reuse)
        self.saves = True
        self.computed: dict[str, int] = {}
        self.admitted: list[str] = []

    def add(
        self, name: str, prompt, salt: str = "", max_tokens: int = 2, client: str = ""
    ) -> Sequence:
        sampling = SamplingParams(max_tokens=max_tokens)
        wanted = Request(name, tuple(prompt), sampling, cache_salt=salt, client=(client,))
        sequence = Sequence(wanted, (END,), max_tokens)
        self.policy.add(sequence)
        return sequence

    def step(self, fail: bool = False) -> StepPlan:
        plan = self.policy.schedule()
        steps = []
        for row, start, length in plan.chunk.rows if plan.chunk else ():
            if row.request_id not in self.admitted:
                self.admitted.append(row.request_id)
            row.launched(length)
            if fail:
                steps.append(InFlightStep((row,), (length,), error=StepError("broken")))
                continue
            self.computed[row.request_id] = self.computed.get(row.request_id, 0) + length
            end = start + length
            if end in row.save_points:
                if self.saves:
                    self.save(row.salt, row.prompt[:end])
                row.saved(end)
            tokens = (7,) if end == row.num_prompt else ()
            steps.append(InFlightStep((row,), (length,), is_prefill=True, token_ids=[tokens]))
        for row in plan.decode:
            row.launched(1)
            finished = [row.num_output + 1 >= 2]
            steps.append(
                InFlightStep((row,), (1,), num_cached=[1], token_ids=[(7,)], finished=finished)
            )
        self.policy.update(steps)
        return plan

    def save(self, salt: str, tokens: tuple[int, ...]) -> None:
        here = self.tree.covered(salt, tokens)
        self.tree.insert(salt, tokens, here, Fake() if here < len(tokens) else None, Fake())

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if self.policy.idle:
                self.policy.schedule()
                assert all(not n.pins for n in self.tree.nodes())
                return
            self.step()
        raise AssertionError("some request waits for ever")


def test_a_burst_that_was_held_back_does_not_go_before_other_clients():
    world = World(rows=4)
    for number in range(100):
        world.add(f"burst {number}", [*[5] * 60, 100 + number], client="burst")
    for _ in range(3):
        world.step()
    world.add("one", [6] * 20, client="other")
    world.run()
    burst = [name for name in world.admitted if name != "one"]
    assert burst == [f"burst {number}" for number in range(100)]
    assert world.admitted.index("one") < 15


def test_requests_that_share_a_prefix_wait_for_the_first():
    world = World()
    shared = [5] * 60
    for name in "abcd":
        world.add(name, shared)
    world.step()
    assert world.policy.num_waiting == 3
    world.run()
    assert world.computed == {"a": 60, "b": 0, "c": 0, "d": 0}
    assert (world.reuse.num_queries, world.reuse.num_hits) == (240, 180)


def test_others_pass_those_that_wait():
    world = World()
    world.add("first", [5] * 60)
    world.add("held", [*[5] * 60, 8])
    world.add("other", [9] * 10)
    world.add("salted", [5] * 60, salt="x")
    world.run()
    assert world.admitted.index("held") == 3
    assert world.computed == {"first": 60, "held": 1, "other": 10, "salted": 60}


def test_no_request_waits_for_what_would_win_little_or_is_not_saved():
    world = World()
    world.add("short", [5, 5, 5, 8])
    world.add("alike", [5, 5, 5, 9])
    world.add("long", [5] * 30 + [6] * 3)  # saved at 16, 32 and its end
    world.add("parts", [5] * 15 + [7] * 3)
    world.run()
    assert world.admitted == ["short", "alike", "long", "parts"]
    assert world.computed == {"short": 4, "alike": 4, "long": 33, "parts": 18}


def test_a_leader_that_goes_away_frees_those_that_wait():
    for how in ("cancel", "fail", "not saved"):
        world = World()
        world.saves = how != "not saved"
        world.add("leader", [5] * 60)
        world.add("held", [5] * 60)
        world.step()
        if how == "cancel":
            world.policy.cancel("leader")
        elif how == "fail":
            world.step(fail=True)
        world.run()
        assert world.computed["held"] == {"cancel": 60 - 16, "fail": 60 - 16, "not saved": 60}[how]


def test_a_held_request_can_be_cancelled_and_failed():
    world = World()
    world.add("leader", [5] * 60)
    world.add("one", [5] * 60)
    world.add("two", [5] * 60)
    world.step()
    world.policy.cancel("one")
    assert world.policy.num_waiting == 1
    outputs = world.policy.fail_all(StepError("down"))
    assert sorted(o.request_id for o in outputs) == ["leader", "two"]
    assert world.policy.idle


def test_a_request_waits_only_for_those_before_it():
    """However many come after it that it could learn from."""
    world = World()
    world.add("leader", [*[5] * 32, *[6] * 30])
    waiting = world.add("held", [*[5] * 32, *[7] * 60])
    for round_ in range(30):
        world.add(f"later {round_}", [*[5] * 32, *[7] * 60, round_ + 10])
        world.step()
        if waiting.num_output:
            break
    assert waiting.num_output, "it was overtaken for ever"
    world.run()


def test_a_pin_ends_however_the_request_does():
    world = World()
    world.add("first", [5] * 40)
    world.run()
    for end in ("cancel", "fail_all", "error"):
        world.add(end, [*[5] * 40, *[6] * 40])
        plan = world.policy.schedule()
        assert [start for _, start, _ in plan.chunk.rows] == [40]
        assert sum(n.pins for n in world.tree.nodes()) == 1
        if end == "cancel":
            world.policy.cancel(end)
        elif end == "fail_all":
            world.policy.fail_all(StepError("down"))
        else:
            for row, _, length in plan.chunk.rows:
                row.launched(length)
                failed = InFlightStep((row,), (length,), error=StepError("broken"))
                world.policy.update([failed])
        world.policy.schedule()
        assert sum(n.pins for n in world.tree.nodes()) == 0


def test_a_pin_ends_before_the_first_chunk_is_planned():
    world = World()
    world.add("first", [5] * 40)
    world.run()
    world.add("long", [9] * 100)
    world.step()
    world.add("cancelled", [*[5] * 40, *[6] * 40])
    plan = world.policy.schedule()
    assert [row.request_id for row, _, _ in plan.chunk.rows] == ["long"]
    assert sum(n.pins for n in world.tree.nodes()) == 1
    world.policy.cancel("cancelled")
    world.policy.schedule()
    assert sum(n.pins for n in world.tree.nodes()) == 0


def test_of_two_the_first_never_waits_for_the_second():
    world = World()
    first, second = (world.add(name, [5] * 60) for name in ("first", "second"))
    assert not world.reuse.held_back(first, [])
    assert not world.reuse.held_back(second, [])
    for each in (first, second):
        world.reuse.begin(each, None)
    assert not world.reuse.held_back(first, [second])
    assert world.reuse.held_back(second, [first])


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(
        st.lists(st.sampled_from([END, 5]), min_size=1, max_size=50), min_size=1, max_size=12
    ),
    rows=st.integers(1, 4),
    step=st.sampled_from([4, 16, 64]),
    data=st.data(),
)
def test_every_request_ends_and_nothing_stays_pinned(prompts, rows, step, data):
    world = World(rows, step)
    everyone = {}
    for number, prompt in enumerate(prompts):
        everyone[f"r{number}"] = world.add(f"r{number}", prompt, data.draw(st.sampled_from("ab")))
        for _ in range(data.draw(st.integers(0, 3))):
            world.step(fail=data.draw(st.integers(0, 9)) == 0)
        if data.draw(st.integers(0, 4)) == 0:
            world.policy.cancel(data.draw(st.sampled_from(sorted(everyone))))
        world.saves = data.draw(st.integers(0, 4)) > 0
    world.run()
    assert all(s.finished for s in everyone.values())
    for sequence in everyone.values():
        if len(sequence.output) and world.computed.get(sequence.request_id) is not None:
            computed = world.computed[sequence.request_id]
            assert computed + sequence.num_reused == sequence.num_prompt
