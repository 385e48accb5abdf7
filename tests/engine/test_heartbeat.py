"""The difference between a hanging step and a slow one."""

import threading

import pytest

from mlx_mtp.engine import health
from mlx_mtp.engine.health import HANG_SECONDS, NEW_KIND_SECONDS, SLOWNESS, START_SECONDS, Heartbeat
from mlx_mtp.engine.runner import ModelRunner
from tests.engine.test_engine import Client, client
from tests.engine.test_scheduler import Clock
from tests.support.harness import greedy, plain, request
from tests.support.tiny_models import VOCAB
from tests.support.waiting import wait_until

__all__ = ["client"]
DECODE = ("decode", 0, 1, 2)
PREFILL = ("prefill", 9, 1, 2)


class Beating(Heartbeat):
    """A heartbeat whose clock is moved by steps."""

    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(clock=self.clock)

    def hangs(self, kind: tuple[object, ...], seconds: float, times: int = 1) -> list[bool]:
        """Run steps of `seconds` seconds; returns whether each was called a hang at its end."""
        hung = []
        for _ in range(times):
            self.begin("the planning of a step")
            self.begin("a step", kind)
            hung.append(bool(self.reason_after(seconds)))
            self.end()
            assert self.hang() is None
        return hung

    def reason_after(self, seconds: float) -> str:
        self.clock.now += seconds
        return self.hang() or ""


@pytest.fixture
def known() -> Beating:
    """A heartbeat after four fast decode steps."""
    beating = Beating()
    assert not any(beating.hangs(DECODE, 0.02, times=4))
    return beating


def test_a_fast_step_that_hangs_is_told_within_five_seconds(known):
    known.begin("a decoding step of 2 rows", DECODE)
    assert not known.reason_after(HANG_SECONDS - 0.1)
    assert "a decoding step of 2 rows for 4.2 s, which may take 4.0 s" in known.reason_after(0.3)
    known.begin("the planning of a step")
    assert "planning" in known.reason_after(HANG_SECONDS + 0.1)


def test_a_process_that_was_stopped_did_not_hang(known):
    known.begin("a decoding step of 2 rows", DECODE)
    known.clock.now += 100 * HANG_SECONDS
    known.resume()
    assert not known.reason_after(HANG_SECONDS - 0.1)
    assert known.reason_after(0.2)
    known.end()
    # The stop doesn't count as the step's time.
    known.begin("a decoding step of 2 rows", DECODE)
    assert known.reason_after(SLOWNESS * HANG_SECONDS + 0.1)


def test_slow_steps_are_known_by_their_past(known):
    """A chunk that takes five times as long as earlier ones of 20 s is no hang."""
    assert not any(known.hangs(PREFILL, 20.0, times=4))
    assert known.hangs(PREFILL, 100.0) == [False]
    assert known.hangs(PREFILL, SLOWNESS * 100.0 + 1) == [True]
    # The times of chunks don't count for decode steps.
    assert known.hangs(DECODE, HANG_SECONDS + 0.1) == [True]


def test_the_start_and_first_steps_may_compile_kernels():
    fresh = Beating()
    fresh.begin("its start", allowed=START_SECONDS)
    assert not fresh.reason_after(START_SECONDS - 1)
    assert "in its start" in fresh.reason_after(2)
    assert fresh.hangs(DECODE, START_SECONDS - 1, times=2) == [False, False]
    assert fresh.hangs(DECODE, NEW_KIND_SECONDS - 1) == [False]
    assert fresh.hangs(PREFILL, START_SECONDS - 1) == [False]
    fresh.hangs(DECODE, 0.02, times=200)
    assert fresh.hangs(DECODE, HANG_SECONDS + 0.1) == [True]
    assert fresh.hangs((*DECODE[:2], 4, 2), NEW_KIND_SECONDS - 1) == [False]
    assert fresh.hangs(("decode", 0, 5, 2), NEW_KIND_SECONDS + 1) == [True]


def test_a_hang_does_not_hide_the_next_one_but_a_slow_machine_is_believed(known):
    assert known.hangs(DECODE, 3600.0) == [True]
    assert known.hangs(DECODE, 2 * HANG_SECONDS + 0.1) == [True]
    hung = known.hangs(DECODE, 60.0, times=10)
    assert hung[0]
    assert not any(hung[4:])


def test_a_step_that_hangs_is_told_while_it_lasts(client, tiny_models, monkeypatch):
    """A real engine reports a known step that does not end, until it ends."""
    monkeypatch.setattr(health, "NEW_KIND_SECONDS", 0.0)
    served: Client = client(heartbeat=Heartbeat(hang_seconds=0.5))
    wanted = [request(f"r{i}", [5, 6], greedy(40, ignore_eos=True)) for i in range(3)]
    for each in wanted[:2]:
        served.engine.submit(each)
        served.wait(each.request_id)
    wait_until(lambda: served.engine.hang_reason is None)
    go_on, original = threading.Event(), ModelRunner.run

    def hanging(self, plan):
        assert not plan.decode or go_on.wait(60)
        return original(self, plan)

    monkeypatch.setattr(ModelRunner, "run", hanging)
    served.engine.submit(wanted[2])
    # On a busy machine the prefill before it can be called a hang, too.
    wait_until(lambda: "a decoding step of 1 row" in (served.engine.hang_reason or ""))
    # It can recover, so its requests wait; the server decides whether to submit more.
    assert served.engine.unhealthy_reason is None
    go_on.set()
    served.wait("r2")
    wait_until(lambda: served.engine.hang_reason is None)
    expected = plain(tiny_models["qwen3_next"], wanted[2], VOCAB).tokens
    assert tuple(served.tokens("r2")) == expected
