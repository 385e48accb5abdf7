"""The time of kernel launches, repeated until it can be measured."""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx

TimedLaunch = Callable[[], Iterable[Any]]  # returns unevaluated arrays, or tuples of them

_ROUNDS = 5
_LEAST_SECONDS = 2e-3  # of a round; in a shorter one the host's work would hide the launches'


def microseconds(launch: TimedLaunch) -> float:
    """Returns median microseconds of a launch, repeated within one evaluation to fill a round."""
    repeats = 1
    while (seconds := _seconds(launch, repeats)) < _LEAST_SECONDS:
        repeats *= 2
    rounds = [seconds, *(_seconds(launch, repeats) for _ in range(_ROUNDS - 1))]
    return 1e6 * statistics.median(rounds) / repeats


def _seconds(launch: TimedLaunch, repeats: int) -> float:
    results = [result for _ in range(repeats) for result in launch()]
    began = time.perf_counter()
    mx.eval(results)
    return time.perf_counter() - began
