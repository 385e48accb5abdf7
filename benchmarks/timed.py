"""Cases within a time limit, tables that are printed row by row, and the GPU's time by kernel."""

import importlib.util
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import mlx.core as mx

from mlx_mtp.selftest.timing import TimedCall, microseconds

T = TypeVar("T")

_BEGAN = time.perf_counter()
_REPEATS = 5

# The parts of the GPU's work by the names of kernels; the first that fits.
PARTS = {
    "recurrence": r"gated_delta",
    "attention": r"softmax|sdpa|attention|fmha|flash",
    "experts": r"gather_qmm|grouped|few_rows_\d_\d_1_",
    "products": r"few_rows|gemm|qmm|qmv|gemv|cutlass|dequant|expand|xmma|nvjet|splitK",
    "rest": r"",
}


def shares(seconds: float, items: Sequence[T]) -> Iterator[tuple[T, float]]:
    """Each with the time (`perf_counter`) at which its equal share of what is left ends."""
    end = time.perf_counter() + seconds
    for number, item in enumerate(items):
        now = time.perf_counter()
        yield item, now + (end - now) / (len(items) - number)


def within(end: float, cases: Sequence[T]) -> Iterator[T]:
    """The first, and more as long as the time has not come; then says which are left out."""
    for number, case in enumerate(cases):
        if number and time.perf_counter() > end:
            print(f"The time is over; not measured: {[*cases[number:]]}", flush=True)
            return
        yield case


def table(*heads: str) -> Callable[..., None]:
    """Print the head of a table; returns what prints a row, with the seconds since the start."""
    print(f"| {' | '.join(heads)} | at, s |\n|{'---|' * (len(heads) + 1)}", flush=True)

    def row(*cells: object) -> None:
        seconds = time.perf_counter() - _BEGAN
        print(f"| {' | '.join(map(str, cells))} | {seconds:.0f} |", flush=True)

    return row


class Profile(NamedTuple):
    """What the GPU did: milliseconds by part, and each kernel's, with its launches.

    Kernels may overlap, so that they take longer together than the GPU is busy.
    """

    parts: dict[str, float]
    kernels: list[tuple[str, float, int]]  # the longest first
    busy: float  # milliseconds

    @property
    def num_launches(self) -> int:
        return sum(count for _, _, count in self.kernels)


def profiled(run: Callable[[], object]) -> Profile | None:
    """Run it under torch's profiler; None without torch or CUDA, and then it does not run."""
    if not mx.cuda.is_available() or importlib.util.find_spec("torch") is None:
        return None
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.zeros(1).cuda()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        mx.synchronize()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    spans = []
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = kernels[event.name]
            entry[0] += event.device_time / 1e3
            entry[1] += 1
            spans.append((event.time_range.start / 1e3, event.time_range.end / 1e3))
    parts = dict.fromkeys(PARTS, 0.0)
    for name, (ms, _) in kernels.items():
        parts[next(part for part, found in PARTS.items() if re.search(found, name))] += ms
    ordered = sorted(kernels.items(), key=lambda item: -item[1][0])
    listed = [(name, ms, int(count)) for name, (ms, count) in ordered]
    return Profile(parts, listed, union(spans))


def union(spans: Sequence[tuple[float, float]]) -> float:
    """How long at least one of these is under way, each from its start to its end."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def gpu_microseconds(launch: TimedCall) -> float:
    """What the GPU works on a launch; without torch or CUDA what it takes by the clock."""

    def repeat() -> None:
        for _ in range(_REPEATS):
            mx.eval(list(launch()))

    repeat()  # also compiles kernels
    run = profiled(repeat)
    return microseconds(launch) if run is None else 1e3 * run.busy / _REPEATS
