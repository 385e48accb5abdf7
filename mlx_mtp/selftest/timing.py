"""Times calls, each repeated until it takes long enough to measure."""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx

TimedCall = Callable[[], Iterable[Any]]  # of arrays and tuples of them

_ROUNDS = 5
_LEAST_SECONDS = 2e-3  # of a round: several launches, or the host's work is all that is seen


def microseconds(launch: TimedCall) -> float:
    """The median of what a launch takes, repeated in one evaluation until it takes long enough."""
    repeats = 1
    while (seconds := _seconds(launch, repeats)) < _LEAST_SECONDS:
        repeats *= 2
    rounds = [seconds, *(_seconds(launch, repeats) for _ in range(_ROUNDS - 1))]
    return 1e6 * statistics.median(rounds) / repeats


def _seconds(launch: TimedCall, repeats: int) -> float:
    results = [result for _ in range(repeats) for result in launch()]
    began = time.perf_counter()
    mx.eval(results)
    return time.perf_counter() - began
