"""Which steps' times are their cost, by a clock that the test moves."""

import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.core import EngineCore, StepTimer
from mlx_mtp.engine.step import InFlightStep
from mlx_mtp.errors import StepError
from tests.engine.test_scheduler import Watched, sequence
from tests.harness import Driver, greedy, request
from tests.tiny_models import VOCAB

ROWS = (sequence("a", 4), sequence("b", 4))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def decode(window: int, proposed: int, rows=ROWS, **more) -> list[InFlightStep]:
    return [InFlightStep(rows, (window + 1,) * len(rows), num_proposed=proposed, **more)]


def laps(*steps: list[InFlightStep], overlap: bool = True) -> list[float | None]:
    """Each step takes one second longer than the one before it; the time that counts of each."""
    clock = Clock()
    timer, times = StepTimer(clock), []
    for number, read in enumerate(steps):
        clock.now += number
        following = steps[number + 1] if number + 1 < len(steps) else []
        times.append(timer.lap(read, following if overlap else read))
    return times


def test_steps_in_an_unbroken_row_are_timed():
    # Nothing comes before the first, nor behind the last.
    assert laps(*[decode(2, 2)] * 5) == [None, 1, 2, 3, None]
    change = [*[decode(2, 2)] * 3, decode(2, 0), *[decode(0, 0)] * 3]
    assert laps(*change) == [None, 1, None, None, 4, 5, None]
    assert laps(*change, overlap=False) == [None, 1, 2, None, 4, 5, 6]


PREFILL = [InFlightStep(ROWS[:1], (9,), is_prefill=True)]
BREAKS = {
    "idle": [],
    "chunk": [*PREFILL, *decode(2, 2)],
    "left": decode(2, 2, rows=ROWS[:1]),
    "joined": decode(2, 2, rows=(*ROWS, sequence("c", 4))),
    "failed": decode(2, 2, error=StepError("broken")),
    "deeper": decode(2, 3),
    "cut": decode(1, 2),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_breaks_the_row(name):
    steps = [*[decode(2, 2)] * 3, BREAKS[name], *[decode(2, 2)] * 4]
    times, alone = laps(*steps), laps(*steps, overlap=False)
    assert times[3] is alone[3] is None
    assert times[2] is None  # the step behind it was another one
    assert alone[2] is not None
    assert times[-2] is not None


@pytest.mark.parametrize(("overlap", "depth"), [(True, 2), (False, 0)])
def test_the_policy_observes_every_decode_step(tiny_models, overlap, depth):
    """Times by the injected clock, rows and windows."""
    policy, clock = Watched(depth), Clock()
    config = EngineConfig(num_draft_tokens=depth, overlap=overlap)
    driver = Driver(tiny_models["qwen3_5"], vocab_size=VOCAB, config=config, depth=policy)
    driver.core = EngineCore(driver.scheduler, driver.runner, overlap=overlap, clock=clock)
    driver.add(request("long", [5, 6, 7], greedy(30, ignore_eos=True)))
    driver.add(request("short", [8, 9], greedy(12, ignore_eos=True)))
    while not driver.core.idle:
        clock.now += 0.25
        driver.step()
    timed = [step for step in policy.seen if step.seconds is not None]
    assert {(step.seconds, step.depth) for step in timed} == {(0.25, depth)}
    assert {step.batch_size for step in timed} == {1, 2}
    # The first step of two rows, the change to one row, the ends: few are not timed.
    assert len(timed) >= len(policy.seen) - 8
    stats = driver.core.stats()
    assert stats.depths == ((1, depth), (2, depth))
    assert stats.parked is (depth == 0)
