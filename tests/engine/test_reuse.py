"""Save points, and requests that wait for a prefix which another computes or the disk reads."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.cache.prefix_store import READ_SECONDS
from mlx_mtp.cache.prefix_tree import Fetch
from mlx_mtp.engine.reuse import MIN_GAIN, save_points, turns
from mlx_mtp.engine.sequence import Sequence
from tests.cache.fake_prefixes import check_integrity, put
from tests.engine.prefix_world import END, World

HERE, COMING, NEVER = Fetch.HERE, Fetch.COMING, Fetch.NEVER
LONG = [5] * 60
OTHER = [6] * 60


def messages(*lengths: int) -> list[int]:
    """Messages of so many tokens, each with its end."""
    return [t for length in lengths for t in ([5] * (length - 1) + [END])]


@pytest.mark.parametrize(
    ("prompt", "start", "step", "points"),
    [
        # After the first and the last turns, and at the end; what is there already is not saved.
        ([*messages(100, 200, 300, 400), *[5] * 7], 0, 4096, [100, 600, 1000, 1007]),
        ([*messages(100, 200, 300, 400), *[5] * 7], 600, 4096, [1000, 1007]),
        ([*messages(100, 200, 300, 400), *[5] * 7], 1000, 4096, [1007]),
        ([*messages(100, 200, 300, 400), *[5] * 7], 1007, 4096, []),
        # Near turns are not cut but the last; nothing within `MIN_GAIN` of the start.
        ([*messages(*[10] * 100), *[5] * 3], 0, 4096, [1000, 1003]),
        (messages(20), 0, 4096, [20]),
        ([*[5] * (MIN_GAIN - 1), END, 5], 0, 4096, [MIN_GAIN, MIN_GAIN + 1]),
        ([*[5] * (MIN_GAIN - 2), END, 5], 0, 4096, [MIN_GAIN]),
        # A system prompt is saved however short the question, and the next one finds all of it.
        ([*messages(3000, 10), *[5] * 3], 0, 512, [512, 1024, 2048, 3000, 3013]),
        ([*messages(3000, 20), 5], 3000, 512, [3021]),
        # Long texts at doubling distances, where chunks end anyway.
        ([5] * 10_000, 0, 512, [512, 1024, 2048, 4096, 8192, 10_000]),
        ([5] * 10_000, 3000, 512, [4096, 8192, 10_000]),
    ],
)
def test_save_points(prompt, start, step, points):
    assert save_points(len(prompt), start, turns(prompt, {END}), step) == points


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
    world.run()
    assert world.admitted[:3] == ["a", "other", "salted"]
    expected = {"a": 60, "b": 0, "c": 0, "d": 0, "longer": 1, "other": 10, "salted": 60}
    assert world.computed == expected
    assert (world.reuse.num_queries, world.reuse.num_hits) == (371, 240)


def test_no_request_waits_for_what_would_win_little_or_is_not_saved():
    world = World()
    prompts = {"short": [5, 5, 5, 8], "alike": [5, 5, 5, 9]}
    # The first of these is saved at 16, 32 and its end.
    prompts |= {"long": [5] * 30 + [6] * 3, "parts": [5] * 15 + [7] * 3}
    for name, prompt in prompts.items():
        world.add(name, prompt)
    world.run()
    assert world.admitted == [*prompts]
    assert world.computed == {name: len(prompt) for name, prompt in prompts.items()}


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
    first, second = (world.add(name, [8] * 60) for name in ("first", "second"))
    assert not world.reuse.held_back(first, [])
    assert not world.reuse.held_back(second, [])
    for each in (first, second):
        world.reuse.begin(each, None)
    assert not world.reuse.held_back(first, [second])
    assert world.reuse.held_back(second, [first])


def test_it_waits_while_others_pass_and_begins_when_its_prefix_is_here():
    """Those who want the same share one read, and find it in memory."""
    world = World()
    world.on_disk(LONG)
    for name in "abc":
        world.add(name, [*LONG, ord(name), 8])
    assert world.step().empty
    assert world.reuse.seconds_left == READ_SECONDS
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
    ("how", "left"), [("broken", 61), ("slow", 61), ("hangs", 61), ("gone", 61), ("evicted", 29)]
)
def test_a_read_that_fails_costs_the_prefix_and_no_request(how, left):
    """Saved at 16, 32 and the end: where the last has gone, the disk still has what is before."""
    world = World()
    world.on_disk(LONG, OTHER)
    world.disk.broken = how == "broken"
    world.add("wants", [*LONG, 8])
    world.add("waits", [*OTHER, 8])
    world.add("again", [*LONG, 8])
    world.step()
    assert world.admitted == []
    if how == "slow":
        world.now = READ_SECONDS
    elif how != "hangs":
        gone = {"broken": 1000, "gone": 0, "evicted": 60}[how]
        world.disk.entries = {each for each in world.disk.entries if len(each[1]) < gone}
    world.disk.state = {"hangs": NEVER, "slow": COMING}.get(how, HERE)
    world.run()
    # The third waits for the first one's prefill instead, as ever.
    assert world.computed == {"wants": left, "waits": left, "again": 0}


def test_one_read_at_a_time_and_clients_take_turns():
    """And what has been read is not lost while its request waits for a row."""
    world = World(rows=1)
    prompts = [[n] * 60 for n in range(10, 14)]
    world.on_disk(*prompts)
    # More than a turn's worth, so that the second client's comes after one of the first's.
    long = [7] * 1100
    world.disk.state = HERE
    world.on_disk(long)
    for number, prompt in enumerate([long, *prompts[:3]]):
        world.add(f"greedy {number}", prompt, client="greedy")
    world.step()
    world.add("modest", prompts[3], client="modest")
    world.add("quick", [9] * 40, client="third")
    world.step()
    assert world.disk.asked == [1100]
    world.disk.state, world.now = HERE, 10 * READ_SECONDS
    world.run()
    assert world.admitted[:3] == ["quick", "greedy 0", "modest"]
    assert sum(world.computed.values()) == 40


def test_one_that_waits_for_the_disk_can_go_away():
    world = World()
    world.on_disk(LONG, OTHER)
    for name, prompt in (("one", LONG), ("two", OTHER), ("three", [*LONG, 8])):
        world.add(name, prompt)
    world.step()
    world.policy.cancel("two")
    world.policy.cancel("one")
    assert world.disk.wanted is None
    world.step()
    assert world.disk.asked == [60, 60]
    # Want of memory drops what was read, and it is read again.
    world.tree.clear()
    assert world.tree.fetched_nbytes == 0
    world.step()
    assert world.disk.asked == [60, 60, 60]
    world.add("four", OTHER)
    world.policy.cancel()
    assert world.policy.idle
    world.run()


def test_the_tree_may_change_while_a_prefix_is_read():
    """Another request leaves it in its middle, and what it brought of it goes again."""
    world = World(step=64)
    world.on_disk(LONG, [*LONG, *OTHER])
    world.add("wants", [*LONG, *OTHER, 8])
    world.step()
    world.add("branch", [*LONG[:20], 9, 9])
    for _ in range(5):
        world.step()
    assert world.tree.fetched_nbytes == 100 + 50, "20 tokens are in memory now"
    world.tree._evict(next(iter(world.tree._entries)))
    world.step()
    assert world.tree.fetched_nbytes == 120 + 50
    world.disk.state = HERE
    world.run()
    assert world.computed == {"branch": 22, "wants": 1}
    # Another one computes it meanwhile: then the disk need not answer.
    world.on_disk(LONG)
    wants = world.add("wants", [*LONG, 8])
    world.step()
    put(world.tree, LONG, wants.salt)
    world.run()
    assert wants.num_reused == 60


def test_bytes_on_their_way_count():
    """Room is made for them before they are read, and kept; without it they are not read."""
    world = World(step=64, limit=300)
    world.on_disk(LONG)
    for token in (10, 11):
        put(world.tree, [token] * 50)
    world.add("wants", LONG)
    world.step()
    assert world.tree.fetched_nbytes == 110
    for token in range(20, 30):
        put(world.tree, [token] * 50)
        check_integrity(world.tree)
    world.disk.state = HERE
    world.run()
    assert world.computed == {"wants": 0}
    world.tree.clear()
    world.tree.limit, asked = 100, list(world.disk.asked)
    world.add("large", LONG)
    world.step()
    assert world.admitted == ["wants", "large"]
    assert world.disk.asked == asked
    world.run()
    assert world.computed["large"] == 60


def test_nothing_is_read_for_one_that_waits_for_memory_and_none_overtakes_it():
    world = World(memory=lambda rows, longest: rows * longest <= 100)
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


def test_a_prompt_that_is_being_computed_is_waited_for_rather_than_read_for():
    """One that waits for the disk begins to wait for a leader: another may read then."""
    world = World(step=16)
    world.on_disk([*LONG, 8, 8], [4] * 60)
    world.add("leader", [*LONG, 7, *OTHER])
    world.add("follower", [*LONG, 7, *OTHER, 3])
    world.add("third", [4] * 60)
    world.step()
    assert world.admitted == []
    world.disk.entries = {each for each in world.disk.entries if each[1][0] == 4}
    world.disk.state = HERE
    for _ in range(3):
        world.step()
    assert world.admitted == ["leader", "third"]
    world.run()
    assert world.computed == {"leader": 121, "third": 0, "follower": 1}


texts = st.lists(st.sampled_from([END, 5]), min_size=1, max_size=50)


@given(
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
        world.disk.state = data.draw(st.sampled_from([HERE, COMING, COMING, NEVER]))
        for _ in range(data.draw(st.integers(0, 3))):
            plan = world.step(fail=data.draw(st.integers(0, 9)) == 0)
            # Nothing runs: then all that are here wait for a read, and one is under way.
            if not plan.live and world.policy.num_waiting:
                assert world.reuse.seconds_left > 0
                assert world.disk.wanted
            check_integrity(world.tree)
        what = data.draw(st.integers(0, 9))
        if what == 0:
            world.policy.cancel(data.draw(st.sampled_from(everyone)).request_id)
        elif what == 1:
            world.tree.clear()
        elif what == 2:
            world.disk.entries.clear()
        elif what == 3:
            world.now += READ_SECONDS
        elif what == 4 and data.draw(st.booleans()):
            world.policy.cancel()
        world.disk.broken = data.draw(st.integers(0, 4)) == 0
        world.saves = data.draw(st.integers(0, 4)) > 0
    world.disk.state = data.draw(st.sampled_from([HERE, COMING, NEVER]))
    for _ in range(300):
        world.now += READ_SECONDS / 10
        world.step()
    world.run()
    for sequence in everyone:
        assert sequence.finished
        computed = world.computed.get(sequence.request_id)
        if sequence.output and computed is not None:
            assert computed + sequence.num_reused == sequence.num_prompt


def test_every_request_ends_whatever_the_disk_and_others_do():
    settings(max_examples=60, deadline=None)(every_request_ends)()


@pytest.mark.full
def test_every_request_ends_at_length():
    settings(max_examples=1000, deadline=None)(every_request_ends)()
