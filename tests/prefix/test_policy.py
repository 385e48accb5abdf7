"""Save points, and requests that wait for a prefix that another computes or the disk reads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.request import Request, RequestOptions
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import InFlightStep, StepPlan
from mlx_mtp.errors import StepError
from mlx_mtp.prefix.policy import MIN_GAIN, PrefixReuse, message_ends, save_points
from mlx_mtp.prefix.radix_tree import Fetch, PrefixTree
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.draft_policy import FixedDrafts
from tests.support.prefixes import FakeDisk, check_tree, put
from tests.support.quick import full

HERE, COMING, LATE = Fetch.HERE, Fetch.COMING, Fetch.LATE
END, STEP, GAIN = 1, 16, 4
LONG = [5] * 60
OTHER = [6] * 60


class World:
    """A scheduler with a prefix cache, and a runner that only saves the planned prefixes."""

    def __init__(self, rows: int = 8, step: int = STEP, limit: int = 100_000, usage=None) -> None:
        self.disk = FakeDisk()
        self.tree = PrefixTree(limit, self.disk)
        self.reuse = PrefixReuse(self.tree, {END}, step, GAIN)
        config = EngineConfig(max_num_seqs=rows, prefill_step_size=step)
        self.policy = Scheduler(config, FixedDrafts(2), self.reuse, usage)
        self.saves = True
        self.computed: dict[str, int] = {}  # prompt tokens that each request had computed
        self.admitted: list[str] = []  # requests, in the order of their prompts' start

    def add(self, name: str, prompt, salt: str = "", client: str = "") -> Sequence:
        sampling = SamplingParams(max_tokens=2)
        wanted = Request(
            name, tuple(prompt), sampling, options=RequestOptions(cache_salt=salt, client=(client,))
        )
        sequence = Sequence(wanted, (END,), 2)
        self.policy.add(sequence)
        return sequence

    def on_disk(self, *prompts) -> None:
        """Compute prompts and keep them only on the disk, where reads take time."""
        for number, prompt in enumerate(prompts):
            self.add(f"before {number}", prompt)
            self.run()
        self.tree.clear()
        assert self.tree.nbytes == 0
        self.disk.state = Fetch.COMING
        self.computed.clear()
        self.admitted.clear()

    def step(self, fail: bool = False) -> StepPlan:
        plan = self.policy.schedule()
        steps = []
        for planned in plan.chunk:
            row, length = planned.sequence, planned.length
            if row.request_id not in self.admitted:
                self.admitted.append(row.request_id)
            row.note_launched(length)
            if fail:
                steps.append(InFlightStep([planned]))
                steps[-1].fail(StepError("broken"))
                continue
            self.computed[row.request_id] = self.computed.get(row.request_id, 0) + length
            end = planned.start + length
            if end in row.prefix.save_points:
                if self.saves:
                    put(self.tree, row.prefix.cache_key[:end], row.prefix.salt)
                row.prefix.saved(end)
            planned.num_cached, planned.token_ids = length, (7,) if planned.is_last else ()
            steps.append(InFlightStep([planned], is_prefill=True))
        for planned in plan.decode:
            planned.sequence.note_launched(1)
            planned.length, planned.num_cached, planned.token_ids = 1, 1, (7,)
            planned.finished = len(planned.sequence.output) >= 1
            steps.append(InFlightStep([planned]))
        self.policy.update(steps)
        return plan

    def run(self, limit: int = 2000) -> None:
        """Step until all requests have ended, and check that they leave nothing behind."""
        for _ in range(limit):
            if self.policy.idle:
                self.policy.schedule()
                assert self.disk.wanted is None
                assert not self.tree._pins
                assert not self.reuse._reads
                check_tree(self.tree)
                return
            self.step()
        raise AssertionError("some request waits for ever")


def messages(*lengths: int) -> list[int]:
    """Returns messages of these lengths in tokens, each with its end."""
    return [t for length in lengths for t in ([5] * (length - 1) + [END])]


@pytest.mark.parametrize(
    ("prompt", "start", "step", "points"),
    [
        # After the first and the last turns, and at the end; nothing up to `start` is saved.
        ([*messages(100, 200, 300, 400), *[5] * 7], 0, 4096, [100, 600, 1000, 1007]),
        ([*messages(100, 200, 300, 400), *[5] * 7], 600, 4096, [1000, 1007]),
        ([*messages(100, 200, 300, 400), *[5] * 7], 1000, 4096, [1007]),
        ([*messages(100, 200, 300, 400), *[5] * 7], 1007, 4096, []),
        # Of turns close together only the last is saved; nothing within `MIN_GAIN` of the start.
        ([*messages(*[10] * 100), *[5] * 3], 0, 4096, [1000, 1003]),
        (messages(20), 0, 4096, [20]),
        ([*[5] * (MIN_GAIN - 1), END, 5], 0, 4096, [MIN_GAIN, MIN_GAIN + 1]),
        ([*[5] * (MIN_GAIN - 2), END, 5], 0, 4096, [MIN_GAIN]),
        # A system prompt is saved even before a short question; the next one finds all of it.
        ([*messages(3000, 10), *[5] * 3], 0, 512, [512, 1024, 2048, 3000, 3013]),
        ([*messages(3000, 20), 5], 3000, 512, [3021]),
        # Long texts are saved at doubling distances, where chunks end anyway.
        ([5] * 10_000, 0, 512, [512, 1024, 2048, 4096, 8192, 10_000]),
        ([5] * 10_000, 3000, 512, [4096, 8192, 10_000]),
    ],
)
def test_save_points(prompt, start, step, points):
    assert save_points(len(prompt), start, message_ends(prompt, {END}), step) == points


def test_a_burst_that_was_held_back_does_not_go_before_other_clients():
    world = World(rows=4)
    burst = [f"burst {number}" for number in range(60)]
    for number, name in enumerate(burst):
        world.add(name, [*LONG, 100 + number], client="burst")
    for _ in range(3):
        world.step()
    world.add("one", [6] * 20, client="other")
    world.run()
    assert world.admitted.index("one") < 15
    assert [name for name in world.admitted if name != "one"] == burst


def test_requests_that_share_a_prefix_wait_for_the_first_and_others_pass():
    world = World()
    for name in "abcd":
        world.add(name, LONG)
    world.add("longer", [*LONG, 8])
    world.add("other", [9] * 10)
    world.add("salted", LONG, salt="x")
    for _ in range(3):
        world.step()
    assert world.admitted == ["a", "other"]
    assert "salted" in world.policy.stats().prefills
    assert world.policy.num_waiting == 4
    world.run()
    expected = {"a": 60, "b": 0, "c": 0, "d": 0, "longer": 1, "other": 10, "salted": 60}
    assert world.computed == expected
    assert (world.reuse.num_queries, world.reuse.num_hits) == (371, 240)


def test_a_request_waits_only_for_those_before_it():
    """Later requests with a longer common prefix don't hold it up."""
    world = World()
    world.add("leader", [*[5] * 32, *[6] * 30])
    waiting = world.add("held", [*[5] * 32, *[7] * 60])
    for round_ in range(30):
        world.add(f"later {round_}", [*[5] * 32, *[7] * 60, round_ + 10])
        world.step()
    assert waiting.output, "it was overtaken for ever"
    world.run()


def test_it_waits_while_others_pass_and_begins_when_its_prefix_is_here():
    """Requests for the same prefix share one read, and find the prefix in memory."""
    world = World()
    world.on_disk(LONG)
    for name in "abc":
        world.add(name, [*LONG, ord(name), 8])
    plan = world.step()
    assert not (plan.chunk or plan.decode)
    assert world.reuse.disk_seconds_left == world.disk.seconds_left
    world.add("other", [9] * 10)
    for _ in range(4):
        world.step()
    assert world.admitted == ["other"]
    assert world.policy.num_waiting == 3
    assert world.reuse.stats().nbytes == world.tree.nbytes + 60 + 50
    world.disk.state = HERE
    world.run()
    assert world.disk.asked == [60]
    assert world.computed == {"other": 10, "a": 2, "b": 2, "c": 2}


@pytest.mark.parametrize(
    ("how", "left"), [("broken", 61), ("late", 61), ("gone", 61), ("evicted", 29)]
)
def test_a_read_that_fails_costs_the_prefix_and_no_request(how, left):
    """Prefixes are saved at 16, 32 and the end; if only the last is gone, the others are read."""
    world = World()
    world.on_disk(LONG, OTHER)
    world.disk.broken = how == "broken"
    for name, prompt in (("wants", LONG), ("waits", OTHER), ("again", LONG)):
        world.add(name, [*prompt, 8])
    world.step()
    assert world.admitted == []
    most = {"gone": 0, "evicted": 59}.get(how, 60)
    world.disk.entries = {each for each in world.disk.entries if len(each[1]) <= most}
    world.disk.state = LATE if how == "late" else HERE
    world.step()
    world.disk.state = HERE  # The requests have given up waiting.
    world.run()
    # The third waits for the first one's prefill instead, as without a disk.
    assert world.computed == {"wants": left, "waits": left, "again": 0}


def test_nothing_is_read_for_one_that_waits_for_memory_and_none_overtakes_it():
    world = World(usage=lambda lengths: sum(lengths) / 90)
    world.on_disk([*LONG, *LONG[:30]])
    world.add("runs", [9] * 40)
    world.step()
    world.add("large", [*LONG, *LONG[:30]])
    world.add("small", [8] * 4)
    world.step()
    assert (world.disk.asked, world.admitted) == ([], ["runs"])
    world.disk.state = HERE
    world.run()
    assert world.admitted == ["runs", "large", "small"]


texts = st.lists(st.sampled_from([END, 5]), min_size=1, max_size=50)


EVERYTHING = given(
    earlier=st.lists(texts, max_size=6),
    prompts=st.lists(texts, min_size=1, max_size=12),
    rows=st.integers(1, 4),
    step=st.sampled_from([4, 16, 64]),
    limit=st.sampled_from([120, 300, 10_000]),
    data=st.data(),
)


def every_request_ends(earlier, prompts, rows, step, limit, data):
    world = World(rows, step, limit)
    world.on_disk(*earlier)
    everyone: list[Sequence] = []
    for number, prompt in enumerate(prompts):
        client, salt = data.draw(st.sampled_from("xyz")), data.draw(st.sampled_from(["", "", "a"]))
        everyone.append(world.add(f"{number}", prompt, salt, client))
        world.disk.state = data.draw(st.sampled_from([HERE, COMING, COMING, LATE]))
        for _ in range(data.draw(st.integers(0, 3))):
            plan = world.step(fail=data.draw(st.integers(0, 9)) == 0)
            # If nothing runs, all requests here wait for a read, and one is in progress.
            if not plan.live and world.policy.num_waiting:
                assert world.reuse.disk_seconds_left > 0
                assert world.disk.wanted
            check_tree(world.tree)
        what = data.draw(st.integers(0, 9))
        if what == 0:
            world.policy.cancel(data.draw(st.sampled_from(everyone)).request_id)
        elif what == 1:
            world.tree.clear()
        elif what == 2:
            world.disk.entries.clear()
        elif what == 4 and data.draw(st.booleans()):
            world.policy.cancel()
        world.disk.broken = data.draw(st.integers(0, 4)) == 0
        world.saves = data.draw(st.integers(0, 4)) > 0
    world.disk.state = data.draw(st.sampled_from([HERE, LATE]))
    for _ in range(300):
        world.step()
    world.run()
    for sequence in everyone:
        assert sequence.finished
        computed = world.computed.get(sequence.request_id)
        if sequence.output and computed is not None:
            assert computed + sequence.prefix.num_reused == sequence.num_prompt


@pytest.mark.parametrize("examples", [60, full(1000)])
def test_every_request_ends_whatever_the_disk_and_others_do(examples):
    settings(max_examples=examples, deadline=None)(EVERYTHING(every_request_ends))()
