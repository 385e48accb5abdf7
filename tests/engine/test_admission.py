"""Admission by bytes: what runs together always fits, and what waits for memory gets in."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.memory import Admission
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence, Status
from mlx_mtp.speculative.depth import FixedDepth
from tests.engine.test_scheduler import finish_chunk, finish_decode, sequence


def rectangle(rows: int, longest: int) -> int:
    return rows * (longest + 10)


def scheduler(nbytes: int | None) -> Scheduler:
    memory = None if nbytes is None else Admission(nbytes, rectangle)
    return Scheduler(
        EngineConfig(max_num_seqs=8, prefill_step_size=64), FixedDepth(2), memory=memory
    )


def running(policy: Scheduler) -> list[Sequence]:
    return [s for s in policy._admitted() if not s.finished]


def turn(policy: Scheduler) -> None:
    """A step, as a runner would do it."""
    plan = policy.schedule()
    if plan.chunk is not None:
        finish_chunk(policy, plan)
    finish_decode(policy, plan, stop=False)


def test_a_row_is_counted_with_its_prompt_and_all_it_may_emit_and_lengthens_the_others():
    rows = [sequence("a", 10, 20), sequence("b", 25, 5)]
    assert [row.most_cached for row in rows] == [30, 30]
    assert Admission(80, rectangle).fits(rows)
    assert not Admission(79, rectangle).fits(rows)
    # A longer third makes room for itself and makes the others' room grow.
    assert not Admission(3 * 90 - 1, rectangle).fits([*rows, sequence("c", 80, 0)])
    assert Admission(3 * 90, rectangle).fits([*rows, sequence("c", 80, 0)])


def test_what_does_not_fit_now_waits_and_is_admitted_when_rows_end():
    policy = scheduler(100)
    for name in "abc":
        policy.add(sequence(name, 20, 5))  # 35 bytes each.
    assert len(policy.schedule().chunk.rows) == 2, "members of one group count before it runs"
    assert [s.request_id for s in running(policy)] == ["a", "b"]
    assert policy.num_waiting == 1
    policy.cancel("a")
    policy.schedule()
    assert [s.request_id for s in running(policy)] == ["b", "c"]


def test_one_alone_is_always_admitted_and_without_a_limit_rows_alone_count():
    """`Engine.submit` rejects what could never run; nothing must wait for memory that is free."""
    policy = scheduler(1)
    policy.add(sequence("a", 500, 500))
    assert policy.schedule().chunk is not None
    policy = scheduler(None)
    for i in range(10):
        policy.add(sequence(str(i), 5, 10**6))
    policy.schedule()
    assert len(running(policy)) == 8


def test_a_stream_of_small_ones_does_not_starve_a_large_one():
    policy = scheduler(300)
    for i in range(3):
        policy.add(sequence(f"small-{i}", 10, 30))
    turn(policy)
    large = sequence("large", 200, 50)
    policy.add(large)
    for i in range(3, 200):
        # Without the rule there would always be some that fit, and never room for the large one.
        policy.add(sequence(f"small-{i}", 10, 30))
        turn(policy)
        if large.status is not Status.WAITING:
            break
    assert i < 60
    assert running(policy) == [large]
    while not large.finished:
        turn(policy)
    turn(policy)
    assert len(running(policy)) > 1  # And the small ones go on.


@settings(max_examples=60)
@given(
    requests=st.lists(st.tuples(st.integers(1, 120), st.integers(2, 20)), min_size=1, max_size=25),
    nbytes=st.integers(150, 800),
    arrivals=st.integers(1, 5),
)
def test_all_requests_end_and_all_that_run_fit(
    requests: list[tuple[int, int]], nbytes: int, arrivals: int
):
    policy = scheduler(nbytes)
    coming = [sequence(str(i), prompt, answer) for i, (prompt, answer) in enumerate(requests)]
    everyone, order = list(coming), []
    for _ in range(1000):
        for one in coming[:arrivals]:
            policy.add(one)
        del coming[:arrivals]
        turn(policy)
        rows = running(policy)
        order += [s for s in rows if s not in order]
        # By the prompts and all that may be emitted, whatever the sequence says of itself.
        longest = max((len(s.prompt) + s.max_new_tokens for s in rows), default=0)
        assert len(rows) <= 1 or rectangle(len(rows), longest) <= nbytes
        if not coming and policy.idle:
            break
    assert all(s.finished for s in everyone)
    # None was overtaken (one that ends within the step in which it came may be missed here).
    numbers = [int(s.request_id) for s in order]
    assert numbers == sorted(numbers)
