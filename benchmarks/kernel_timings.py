"""Time of the gated delta rule, ours and mlx-lm's. See `benchmarks.kernels`."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models import gated_delta as mlx_lm_gated_delta

from benchmarks.kernel_checks import BUNDLED
from mlx_mtp.bench.report import render
from mlx_mtp.kernels import gpu, portable, recurrence
from mlx_mtp.kernels.gdn_types import QWEN3_NEXT_80B, GDNWindow, PendingWindow
from mlx_mtp.kernels.self_check import RandomInputs

REPEATS = 5
Step = Callable[[], list[mx.array]]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call, median; calls follow from one another."""

    what: str
    rows: int
    length: int
    microseconds: dict[str, float]


def time_gpu() -> Iterator[Timing]:
    """Ours beside the others, of the 80B's layer."""
    cases = RandomInputs(2, QWEN3_NEXT_80B, mx.bfloat16)
    for rows, length in itertools.product((1, 4, 16, 32), (1, 2, 4)):
        yield Timing(
            "verify", rows, length, timed(contenders(cases, rows, length, verify=True), 48)
        )
    for rows, length in itertools.product((1, 4, 16, 32), (1, 512)):
        steps = contenders(cases, rows, length, verify=False)
        yield Timing("advance", rows, length, timed(steps, 48 if length == 1 else 4))


def time_cpu() -> Iterator[Timing]:
    """The portable code beside mlx-lm's loop, at a prefill chunk and at a verify window."""
    for name, shape in (("80B", QWEN3_NEXT_80B), ("bundled model", BUNDLED)):
        cases = RandomInputs(2, shape, mx.float32)
        for length, calls in ((512, 1), (4, 8)):
            steps = contenders(cases, 1, length, verify=False)
            yield Timing(f"advance, {name}", 1, length, timed(steps, calls))


def contenders(cases: RandomInputs, rows: int, length: int, *, verify: bool) -> dict[str, Step]:
    """Each continues from its own last state, or the launches would run side by side."""
    q, window = cases.window(rows, length)
    start, kept = cases.state(rows), mx.full((rows,), length, dtype=mx.int32)
    mx.eval(q, window, start, kept)
    found: dict[str, Step] = {}
    on_gpu = gpu.backend() is not None
    if on_gpu:
        found["kernel"] = ours(q, window, start, kept, verify=verify)
    if on_gpu and mx.metal.is_available():
        found["mlx-lm's kernel"] = theirs(q, window, start, mlx_lm_gated_delta.gated_delta_kernel)
    if length == 1 or not on_gpu or rows <= 4:
        # Tens of thousands of launches elsewhere.
        found["mlx-lm's loop"] = theirs(q, window, start, mlx_lm_gated_delta.gated_delta_ops)
    found["chunkwise"] = chunkwise(q, window, start, kept, verify=verify)
    return found


def ours(q: mx.array, window: GDNWindow, start: mx.array, kept: mx.array, *, verify: bool) -> Step:
    """The kernel: after the first call each folds the whole window of the one before."""
    state = start
    pending: PendingWindow | None = None

    def step() -> list[mx.array]:
        nonlocal state, pending
        lengths = None if verify else kept
        y, state, pending = recurrence.run(q, window, state, pending, kept, lengths)
        return [y, state, *(pending or ())]

    return step


def chunkwise(
    q: mx.array, window: GDNWindow, start: mx.array, kept: mx.array, *, verify: bool
) -> Step:
    """The portable code in the same part."""
    state = start
    pending: PendingWindow | None = None

    def step() -> list[mx.array]:
        nonlocal state, pending
        if pending is not None:
            state = portable.fold(pending, kept, state)
        y, state, pending = portable.run(q, window, state, advance=not verify)
        if not verify:
            pending = None
        return [y, state, *(pending or ())]

    return step


def theirs(
    q: mx.array,
    window: GDNWindow,
    start: mx.array,
    run: Callable[..., tuple[mx.array, mx.array]],
) -> Step:
    """mlx-lm's: always advances, and could not take a rejected part back."""
    state = start
    scaled = q * q.shape[-1] ** -0.5
    mx.eval(scaled)

    def step() -> list[mx.array]:
        nonlocal state
        y, state = run(scaled, window.k, window.v, window.g, window.beta, state)
        return [y, state]

    return step


def timed(steps: dict[str, Step], calls: int) -> dict[str, float]:
    """Microseconds of a call, in turns, the median of a few rounds of `calls`."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(REPEATS + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            for _ in range(calls):
                last = step()
            mx.eval(last)
            if number:
                seconds[name].append((time.perf_counter() - began) / calls)
    return {name: 1e6 * statistics.median(found) for name, found in seconds.items()}


def timings_table(timings: Sequence[Timing]) -> str:
    """Markdown: microseconds, and in brackets how many times the first column's."""
    names = list(dict.fromkeys(name for t in timings for name in t.microseconds))
    rows = []
    for t in timings:
        first = next(iter(t.microseconds.values()))
        cells = [
            f"{t.microseconds[n]:.0f} ({t.microseconds[n] / first:.2f})"
            if n in t.microseconds
            else "-"
            for n in names
        ]
        rows.append([t.what, str(t.rows), str(t.length), *cells])
    return render(["us a call", "rows", "T", *names], rows)
