"""What is called a hang, and what is only slow."""

from __future__ import annotations

import threading

import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine import health as module
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.health import (
    HANG_SECONDS,
    NEW_KIND_SECONDS,
    SLOWNESS,
    START_SECONDS,
    Heartbeat,
)
from mlx_mtp.engine.runner import ModelRunner
from tests.engine.test_engine import Client, client, wait_until
from tests.harness import greedy, plain, request
from tests.tiny_models import VOCAB

__all__ = ["client"]
DECODE = ("decode", 0, 1, 2)
PREFILL = ("prefill", 9, 1, 2)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def beat(clock: Clock) -> Heartbeat:
    return Heartbeat(clock=clock)


def step(beat: Heartbeat, clock: Clock, kind: tuple[object, ...], seconds: float) -> bool:
    """One step; whether it was called a hang at its end."""
    beat.begin_planning()
    beat.begin(kind, "a step")
    clock.now += seconds
    hung = beat.hang() is not None
    beat.end()
    assert beat.hang() is None
    return hung


def test_a_fast_step_that_hangs_is_told_within_five_seconds(beat: Heartbeat, clock: Clock) -> None:
    for _ in range(4):
        assert not step(beat, clock, DECODE, 0.02)
    beat.begin(DECODE, "a decoding step of 2 rows")
    clock.now += HANG_SECONDS - 0.1
    assert beat.hang() is None
    clock.now += 0.3
    assert "in a decoding step of 2 rows for 4.2 s, which may take 4.0 s" in (beat.hang() or "")
    beat.end()
    assert beat.hang() is None


def test_slow_steps_are_known_by_their_past(beat: Heartbeat, clock: Clock) -> None:
    """A prefill chunk of 20 s on a CPU, and one that takes five times as long further on."""
    for _ in range(4):
        assert not step(beat, clock, PREFILL, 20.0)
    assert not step(beat, clock, PREFILL, 100.0)
    assert step(beat, clock, PREFILL, SLOWNESS * 100.0 + 1)
    # What chunks take says nothing of decoding.
    for _ in range(4):
        assert not step(beat, clock, DECODE, 0.02)
    assert step(beat, clock, DECODE, HANG_SECONDS + 0.1)


def test_first_steps_may_compile_kernels(beat: Heartbeat, clock: Clock) -> None:
    assert not step(beat, clock, DECODE, START_SECONDS - 1)
    assert not step(beat, clock, DECODE, START_SECONDS - 1)
    assert not step(beat, clock, DECODE, NEW_KIND_SECONDS - 1)
    assert not step(beat, clock, PREFILL, START_SECONDS - 1)
    for _ in range(200):
        step(beat, clock, DECODE, 0.02)
    assert step(beat, clock, DECODE, HANG_SECONDS + 0.1)
    other = (*DECODE[:2], 4, 2)
    assert not step(beat, clock, other, NEW_KIND_SECONDS - 1)
    assert step(beat, clock, ("decode", 0, 5, 2), NEW_KIND_SECONDS + 1)


def test_a_hang_does_not_hide_the_next_one(beat: Heartbeat, clock: Clock) -> None:
    for _ in range(4):
        step(beat, clock, DECODE, 0.02)
    assert step(beat, clock, DECODE, 3600.0)
    assert step(beat, clock, DECODE, 2 * HANG_SECONDS + 0.1)


def test_a_machine_that_became_slow_is_believed_after_a_few_steps(
    beat: Heartbeat, clock: Clock
) -> None:
    for _ in range(4):
        step(beat, clock, DECODE, 0.02)
    told = [step(beat, clock, DECODE, 60.0) for _ in range(10)]
    assert told[0]
    assert not any(told[4:])


def test_the_start_has_time_and_planning_has_little(beat: Heartbeat, clock: Clock) -> None:
    beat.begin_start()
    clock.now += START_SECONDS - 1
    assert beat.hang() is None
    clock.now += 2
    assert "in its start" in (beat.hang() or "")
    beat.end()
    beat.begin_planning()
    clock.now += HANG_SECONDS + 0.1
    assert "planning" in (beat.hang() or "")


def test_a_step_that_hangs_is_told_while_it_lasts(client, tiny_models, monkeypatch) -> None:
    """A real engine whose known steps suddenly don't end, until they do."""
    monkeypatch.setattr(module, "NEW_KIND_SECONDS", 0.0)
    config = EngineConfig(num_draft_tokens=2)
    served: Client = client(config=config, heartbeat=Heartbeat(hang_seconds=1.0))
    model = tiny_models["qwen3_next"]
    wanted = [request(f"r{i}", [5, 6], greedy(40, ignore_eos=True)) for i in range(3)]
    for each in wanted[:2]:
        served.engine.submit(each)
        served.wait(each.request_id)
    wait_until(lambda: served.engine.hang_reason is None)

    go_on = threading.Event()
    original = ModelRunner.run

    def hanging(self, plan):
        if plan.decode:
            assert go_on.wait(60)
        return original(self, plan)

    monkeypatch.setattr(ModelRunner, "run", hanging)
    served.engine.submit(wanted[2])
    # On a busy machine the prefill before it may be called a hang too.
    wait_until(lambda: "a decoding step of 1 row" in (served.engine.hang_reason or ""))
    # It may recover, so what it has waits; whether to ask it for more is the server's affair.
    assert served.engine.healthy
    go_on.set()
    served.wait("r2")
    wait_until(lambda: served.engine.hang_reason is None)
    assert tuple(served.tokens("r2")) == plain(model, wanted[2], VOCAB).tokens


def test_the_core_says_what_it_does(tiny_models) -> None:
    from tests.harness import Driver

    driver = Driver(tiny_models["qwen3_next"], vocab_size=VOCAB)
    told: list[tuple[tuple[object, ...], str]] = []
    driver.core._heartbeat.begin = lambda kind, name: told.append((kind, name))
    driver.add(request("a", range(2, 22), greedy(8, ignore_eos=True)))
    driver.run()
    assert isinstance(driver.core, EngineCore)
    assert told[0] == (("prefill", 5, 0, 2), "a prefill chunk of 20 tokens")
    # With look-ahead a chunk is waited for in the turn after it.
    assert told[1][0][0] == "prefill"
    assert (("decode", 0, 1, 2), "a decoding step of 1 row") in told
