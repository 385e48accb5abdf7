"""Requests whose prefix is read from the disk: who waits, for how long, and what comes of it. No
model, no thread: a fake disk answers when a test lets it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.cache.prefix_node import Fetch
from mlx_mtp.cache.prefix_reader import READ_SECONDS
from mlx_mtp.cache.prefix_tree import PrefixTree
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.memory import Admission
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.reuse import PrefixReuse
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.errors import StepError
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.depth import FixedDepth
from tests.cache.test_prefix_tree import FakeDisk, check_integrity, put
from tests.engine.test_reuse import END, GAIN, STEP, World

HERE, COMING, NEVER = Fetch.HERE, Fetch.COMING, Fetch.NEVER


class CountingDisk(FakeDisk):
    """Notes what it was asked for, each time anew."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def fetch(self, nodes, entry) -> Fetch:
        before = set(self.fetched)
        state = super().fetch(nodes, entry)
        if set(self.fetched) - before:
            self.asked.append(entry.end)
        return state


class DiskWorld(World):
    """A scheduler whose prefixes may be on a disk, with a clock that a test turns."""

    def __init__(
        self, rows: int = 8, step: int = STEP, limit: int = 10_000, memory: Admission | None = None
    ) -> None:
        super().__init__(rows, step)
        self.disk = CountingDisk()
        self.tree = PrefixTree(limit, self.disk)
        self.now = 0.0
        self.reuse = PrefixReuse(self.tree, {END}, step, GAIN, clock=lambda: self.now)
        config = EngineConfig(max_num_seqs=rows, prefill_step_size=step)
        self.policy = Scheduler(config, FixedDepth(2), self.reuse, memory)

    def save(self, salt, tokens) -> None:
        put(self.tree, tokens, salt)

    def on_disk(self, *prompts) -> None:
        """These have been computed and are on the disk alone; reads take their time."""
        for number, prompt in enumerate(prompts):
            self.add(f"before {number}", prompt)
            self.run()
        self.tree.clear()
        assert self.tree.nbytes == 0
        self.disk.state = COMING
        self.computed.clear()
        self.admitted.clear()

    def add_for(self, client: str, name: str, prompt) -> Sequence:
        sampling = SamplingParams(max_tokens=2)
        request = Request(name, tuple(prompt), sampling, client=(client,))
        sequence = Sequence(request, (END,), 2)
        self.policy.add(sequence)
        return sequence

    def check_at_rest(self) -> None:
        assert self.policy.idle
        assert self.disk.fetched == {}
        assert all(not node.pins for node in self.tree.nodes())
        assert len(self.reuse._reads) == 0
        check_integrity(self.tree, self.disk)


LONG = [5] * 60
OTHER = [6] * 60


def test_it_waits_while_others_pass_and_begins_when_its_prefix_is_here():
    world = DiskWorld()
    world.on_disk(LONG)
    world.add("wants", [*LONG, 8])
    assert world.step().empty
    assert world.reuse.seconds_left == READ_SECONDS
    world.add("other", [9] * 10)
    for _ in range(4):
        world.step()
    assert world.admitted == ["other"]
    assert world.disk.asked == [60]
    assert world.policy.num_waiting == 1
    world.disk.state = HERE
    world.run()
    assert world.computed == {"other": 10, "wants": 1}
    world.check_at_rest()


@pytest.mark.parametrize("how", ["broken", "slow", "hangs", "evicted", "snapshot evicted"])
def test_a_read_that_comes_to_nothing_costs_the_prefix_and_no_request(how):
    world = DiskWorld()
    world.on_disk(LONG)
    world.disk.broken = how == "broken"
    world.add("wants", [*LONG, 8])
    world.step()
    assert world.admitted == []
    if how == "slow":
        world.now = READ_SECONDS
    elif how == "hangs":
        world.disk.state = NEVER
    else:
        if "evicted" in how:
            # What lies before it goes last.
            for key in [k for k in world.disk.snapshots if how == "evicted" or len(k[1]) == 60]:
                del world.disk.snapshots[key]
            if how == "evicted":
                world.disk.kv.clear()
        world.disk.state = HERE
    world.run()
    # Saved at 16, 32 and the end: the disk still has what lies before.
    expected = 61 - 32 if how == "snapshot evicted" else 61
    assert world.computed == {"wants": expected}
    world.check_at_rest()


def test_when_one_has_waited_too_long_nobody_waits_behind_it():
    world = DiskWorld()
    world.on_disk(LONG, OTHER)
    world.add("one", [*LONG, 8])
    world.add("two", [*OTHER, 8])
    world.add("one again", [*LONG, 8])
    world.step()
    assert world.admitted == []
    world.now = READ_SECONDS
    world.run()
    assert sorted(world.admitted) == ["one", "one again", "two"]
    # The third waited for the first one's prefill instead, as ever.
    assert world.computed == {"one": 61, "two": 61, "one again": 0}
    world.check_at_rest()


def test_those_who_want_the_same_share_one_read():
    world = DiskWorld()
    world.on_disk(LONG)
    for name in "abc":
        world.add(name, [*LONG, ord(name), 8])
    world.add("same", LONG)
    world.step()
    world.disk.state = HERE
    world.run()
    assert world.disk.asked == [60]
    assert world.computed == {"a": 2, "b": 2, "c": 2, "same": 0}
    world.check_at_rest()


def test_one_read_at_a_time_and_clients_take_turns():
    world = DiskWorld()
    prompts = [[n] * 60 for n in range(10, 14)]
    world.on_disk(*prompts)
    # More than a turn's worth, so that the second client's comes after one of the first's.
    long = [7] * 1100
    world.disk.state = HERE
    world.on_disk(long)
    for number, prompt in enumerate([long, *prompts[:3]]):
        world.add_for("greedy", f"greedy {number}", prompt)
    world.step()
    world.add_for("modest", "modest", prompts[3])
    world.step()
    assert world.disk.asked == [1100]
    assert all(key[-1][0] == 7 for key in world.disk.fetched)
    world.disk.state = HERE
    world.run()
    assert world.admitted[:2] == ["greedy 0", "modest"]
    assert sum(world.computed.values()) == 0
    world.check_at_rest()


def test_a_request_that_goes_away_leaves_its_turn_to_the_next():
    world = DiskWorld()
    world.on_disk(LONG, OTHER)
    world.add("one", LONG)
    world.add("two", OTHER)
    world.add("three", [*LONG, 8])
    world.step()
    assert world.disk.asked == [60]
    world.policy.cancel("two")
    world.policy.cancel("one")
    assert world.disk.fetched == {}
    world.step()
    assert len(world.disk.asked) == 2
    world.disk.state = HERE
    world.run()
    assert world.computed == {"three": 1}
    world.check_at_rest()


def test_the_end_of_the_engines_thread_forgets_reads():
    world = DiskWorld()
    world.on_disk(LONG, OTHER)
    world.add("one", LONG)
    world.add("two", OTHER)
    world.step()
    outputs = world.policy.fail_all(StepError("down"))
    assert sorted(o.request_id for o in outputs) == ["one", "two"]
    world.check_at_rest()


def test_want_of_memory_drops_what_was_read_and_it_is_read_again():
    world = DiskWorld()
    world.on_disk(LONG)
    world.add("one", LONG)
    world.step()
    world.tree.clear()
    assert world.tree.fetched_nbytes == 0
    world.step()
    world.disk.state = HERE
    world.run()
    assert world.disk.asked == [60, 60]
    assert world.computed == {"one": 0}
    world.check_at_rest()


def test_a_node_that_is_split_while_it_is_read():
    """Another request leaves the prefix in its middle, and brings the upper half into memory."""
    world = DiskWorld(step=64)
    world.on_disk(LONG)
    world.add("wants", [*LONG, 8])
    world.step()
    world.add("branch", [*LONG[:20], 9, 9])
    for _ in range(4):
        world.step()
    assert world.computed == {"branch": 22}
    assert sorted(n.end for n in world.tree.nodes()) == [20, 22, 60]
    world.disk.state = HERE
    world.run()
    assert world.computed == {"branch": 22, "wants": 1}
    world.check_at_rest()


def test_a_prefix_that_another_computed_meanwhile_is_not_read():
    world = DiskWorld(step=64)
    world.on_disk(LONG)
    wants = world.add("wants", [*LONG, 8])
    world.step()
    put(world.tree, LONG, wants.salt)
    # The disk never answers, and need not.
    world.run()
    assert wants.num_reused == 60
    world.check_at_rest()


def test_what_memory_forgets_of_the_path_while_the_rest_is_read_is_read_too():
    world = DiskWorld(step=64, limit=10_000)
    world.on_disk(LONG, [*LONG, *OTHER])
    world.disk.state = HERE
    world.add("first half", LONG)
    world.run()
    world.disk.state = COMING
    world.add("wants", [*LONG, *OTHER])
    world.step()
    in_flight = dict(world.disk.fetched)
    world.tree._forget(next(iter(world.tree._entries)))
    assert world.tree.nbytes == 0
    world.step()
    assert len(world.disk.fetched) == len(in_flight) + 1
    world.disk.state = HERE
    world.run()
    assert world.computed["wants"] == 0
    world.check_at_rest()


def test_bytes_on_their_way_count():
    """Room is made for them before they are read, and kept until they are used."""
    world = DiskWorld(step=64, limit=300)
    world.on_disk(LONG)
    world.disk.state = HERE
    for token in (10, 11):
        put(world.tree, [token] * 50)
    assert world.tree.nbytes == 200
    world.disk.state = COMING
    world.add("wants", LONG)
    world.step()
    assert world.tree.fetched_nbytes == 110
    assert world.tree.nbytes + world.tree.fetched_nbytes <= 300
    for token in range(20, 30):
        put(world.tree, [token] * 50)
        check_integrity(world.tree, world.disk)
    assert world.reuse.stats().nbytes == world.tree.nbytes + 110
    world.disk.state = HERE
    world.run()
    assert world.computed == {"wants": 0}
    world.check_at_rest()


def test_what_has_no_room_in_memory_is_computed_at_once():
    world = DiskWorld(step=64)
    world.on_disk(LONG)
    world.tree.limit = 100
    world.add("wants", LONG)
    world.step()
    assert world.admitted == ["wants"]
    assert world.disk.asked == []
    world.run()
    assert world.computed == {"wants": 60}


def test_none_overtakes_one_that_waits_for_memory_though_its_prefix_is_on_the_disk():
    world = DiskWorld(memory=Admission(100, lambda rows, longest: rows * longest))
    world.on_disk([*LONG, *LONG[:30]])
    world.add("runs", [9] * 40, max_tokens=2)
    world.step()
    world.add("large", [*LONG, *LONG[:30]])
    world.add("small", [8] * 4)
    world.step()
    # It isn't read for while it can't run, and the small one, which could, stays behind it.
    assert world.disk.asked == []
    assert world.admitted == ["runs"]
    world.disk.state = HERE
    world.run()
    assert world.admitted == ["runs", "large", "small"]
    world.check_at_rest()


def test_while_it_is_read_for_smaller_ones_pass():
    world = DiskWorld(memory=Admission(100, lambda rows, longest: rows * longest))
    world.on_disk(LONG)
    world.add("large", LONG)
    world.add("small", [8] * 4)
    world.step()
    assert world.admitted == ["small"]
    world.disk.state = HERE
    world.run()
    assert world.admitted == ["small", "large"]


def test_one_whose_prefix_is_here_waits_for_a_row_without_losing_it():
    world = DiskWorld(rows=1)
    world.on_disk(LONG)
    world.add("wants", LONG)
    world.step()
    world.add("other", [9] * 40)
    world.step()
    world.disk.state = HERE
    world.now = 10 * READ_SECONDS
    world.run()
    assert world.admitted == ["other", "wants"]
    assert world.computed["wants"] == 0


def test_a_prompt_that_is_being_computed_is_waited_for_rather_than_read_for():
    """One that waits for the disk begins to wait for a leader: it gives its turn there back."""
    world = DiskWorld(step=16)
    world.on_disk([*LONG, 8, 8], [4] * 60)
    world.disk.broken = True
    world.add("leader", [*LONG, 7, *OTHER])
    world.add("follower", [*LONG, 7, *OTHER, 3])
    world.add("third", [4] * 60)
    world.step()
    world.disk.broken = False
    world.disk.state = HERE
    for _ in range(3):
        world.step()
    assert world.admitted == ["leader", "third"]
    world.run()
    assert world.computed == {"leader": 121, "third": 0, "follower": 1}
    world.check_at_rest()


def test_of_those_whose_prefix_cannot_be_had_one_computes_it():
    world = DiskWorld(step=1024)  # They would fit a chunk together.
    world.on_disk(LONG)
    world.disk.state = NEVER
    for name in "abc":
        world.add(name, [*LONG, 8])
    world.run()
    assert world.computed == {"a": 61, "b": 0, "c": 0}
    world.check_at_rest()


texts = st.lists(st.sampled_from([END, 5]), min_size=1, max_size=50)


@settings(max_examples=150, deadline=None)
@given(
    earlier=st.lists(texts, max_size=6),
    prompts=st.lists(texts, min_size=1, max_size=12),
    rows=st.integers(1, 4),
    step=st.sampled_from([4, 16, 64]),
    limit=st.sampled_from([120, 300, 10_000]),
    data=st.data(),
)
def test_every_request_ends_whatever_the_disk_does(earlier, prompts, rows, step, limit, data):
    world = DiskWorld(rows, step, limit)
    world.on_disk(*earlier)
    everyone: dict[str, Sequence] = {}
    for number, prompt in enumerate(prompts):
        name = f"r{number}"
        everyone[name] = world.add_for(data.draw(st.sampled_from("xyz")), name, prompt)
        world.disk.state = data.draw(st.sampled_from([HERE, COMING, COMING, NEVER]))
        for _ in range(data.draw(st.integers(0, 3))):
            plan = world.step(fail=data.draw(st.integers(0, 9)) == 0)
            # Nothing runs: then all that are here wait for a read, and one is under way.
            if not plan.live and world.policy.num_waiting:
                assert world.reuse.seconds_left > 0
                assert world.disk.fetched
            check_integrity(world.tree, world.disk)
        what = data.draw(st.integers(0, 9))
        if what == 0:
            world.policy.cancel(data.draw(st.sampled_from(sorted(everyone))))
        elif what == 1:
            world.tree.clear()
        elif what == 2:
            world.disk.snapshots.clear()
        elif what == 3:
            world.now += READ_SECONDS
        world.disk.broken = data.draw(st.integers(0, 4)) == 0
    world.disk.state = data.draw(st.sampled_from([HERE, COMING, NEVER]))
    for _ in range(500):
        world.now += READ_SECONDS / 10
        world.step()
    world.run()
    assert all(s.finished for s in everyone.values())
    world.check_at_rest()
