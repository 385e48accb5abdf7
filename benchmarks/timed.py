"""Cases within a time limit, calls that take turns, and the GPU's time by kernel."""

import importlib.util
import os
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from benchmarks import Row
from mlx_mtp.selftest.timing import TimedLaunch, microseconds

T = TypeVar("T")
K = TypeVar("K")

_REPEATS = 5

# Patterns of kernel names by part of the GPU's work; the first pattern that matches counts.
PARTS = {
    "recurrence": r"gated_delta",
    "attention": r"softmax|sdpa|attention|fmha|flash",
    "experts": r"gather_qmm|grouped|few_rows_\d_\d_1_",
    "products": r"few_rows|gemm|qmm|qmv|gemv|cutlass|dequant|expand|xmma|nvjet|splitK",
    "rest": r"",
}


def shares(seconds: float, items: Sequence[T]) -> Iterator[tuple[T, float]]:
    """Yields each item with the time (`perf_counter`) when its share of the time left ends."""
    end = time.perf_counter() + seconds
    for number, item in enumerate(items):
        now = time.perf_counter()
        yield item, now + (end - now) / (len(items) - number)


def within(end: float, cases: Sequence[T]) -> Iterator[T]:
    """Yields the first case, and further ones until `end`; prints the cases that are left out."""
    for number, case in enumerate(cases):
        if number and time.perf_counter() > end:
            print(f"The time is over; not measured: {[*cases[number:]]}", flush=True)
            return
        yield case


def take_turns(calls: Mapping[K, Callable[[], Any]], rounds: int) -> dict[K, list[float]]:
    """Returns the seconds to build and evaluate the arrays of each call, in each round.

    One more round comes first and is not counted. Every other round begins with the last call.
    """
    times: dict[K, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        turns = list(calls.items())
        for name, call in turns if number % 2 else reversed(turns):
            began = time.perf_counter()
            mx.eval(call())
            if number:
                times[name].append(time.perf_counter() - began)
    return times


def medians(rows: Sequence[Row]) -> Row:
    """Returns a row with the median of each numeric column, and the first value of text columns."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        name: values[0] if isinstance(values[0], str) else statistics.median(values)
        for name, values in columns.items()
    }


class Profile(NamedTuple):
    """The GPU's work: milliseconds by part, and by kernel with its number of launches.

    Kernels can overlap, so their times can add up to more than the time the GPU is busy.
    """

    parts: dict[str, float]
    kernels: list[tuple[str, float, int]]  # name, milliseconds, launches; the longest first
    busy: float  # milliseconds

    @property
    def num_launches(self) -> int:
        return sum(count for _, _, count in self.kernels)


def profiled(run: Callable[[], object]) -> Profile | None:
    """Run `run` under torch's profiler; without torch or CUDA, returns None without running it."""
    if not mx.cuda.is_available() or importlib.util.find_spec("torch") is None:
        return None
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.zeros(1).cuda()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        mx.synchronize()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    spans = []
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = kernels[event.name]
            entry[0] += event.device_time / 1e3
            entry[1] += 1
            spans.append((event.time_range.start / 1e3, event.time_range.end / 1e3))
    parts = dict.fromkeys(PARTS, 0.0)
    for name, (ms, _) in kernels.items():
        parts[next(part for part, names in PARTS.items() if re.search(names, name))] += ms
    ordered = sorted(kernels.items(), key=lambda item: -item[1][0])
    return Profile(parts, [(name, ms, int(count)) for name, (ms, count) in ordered], union(spans))


def drop_cached(path: Path) -> bool:
    """Drop a file from the page cache, so that the disk is read; returns False if it can't."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def union(spans: Sequence[tuple[float, float]]) -> float:
    """Returns the total time that is covered by at least one (start, end) span."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def gpu_microseconds(launch: TimedLaunch) -> float:
    """Returns the time that the GPU works on a launch; without torch or CUDA, the clock's time."""

    def repeat() -> None:
        for _ in range(_REPEATS):
            mx.eval(list(launch()))

    repeat()  # also compiles kernels
    run = profiled(repeat)
    return microseconds(launch) if run is None else 1e3 * run.busy / _REPEATS
