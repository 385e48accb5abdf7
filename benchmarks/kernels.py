"""The kernels of the gated delta rule, beside other ways to compute it."""

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import gated_delta as mlx_lm_gated_delta

from benchmarks import Row, Rows, row
from benchmarks.timed import take_turns
from mlx_mtp.kernels import gpu, portable, recurrence
from mlx_mtp.kernels.gdn_types import QWEN3_NEXT_80B, GDNShape, PendingWindow
from mlx_mtp.kernels.self_check import RandomInputs

_BUNDLED = GDNShape(4, 32, 8, 32)
_ROWS = (1, 4, 16, 32)
_REPEATS = 5
_CONTENDERS = ("kernel", "mlx-lm's kernel", "mlx-lm's loop", "chunkwise")
_Call = Callable[..., Any]


def kernels() -> Rows:
    """Microseconds per call of the gated delta rule, beside mlx-lm's loop and its kernel.

    On a GPU: the shape of Qwen3-Next-80B in bfloat16; "mlx-lm's kernel" runs only on Metal, and
    "chunkwise" is the portable code. On a CPU: the portable code beside mlx-lm's loop over tokens,
    in float32. Each call continues from the state of the previous call, because independent
    launches would overlap. Ratios are to the first contender that was measured.
    """
    if gpu.backend() is None:
        shapes = {"80B": QWEN3_NEXT_80B, "bundled model": _BUNDLED}
        for (name, shape), (length, calls) in itertools.product(shapes.items(), ((512, 1), (4, 8))):
            inputs = RandomInputs(2, shape, mx.float32)
            yield _timing(f"advance, {name}", inputs, 1, length, calls)
        return
    inputs = RandomInputs(2, QWEN3_NEXT_80B, mx.bfloat16)
    for what, lengths in (("verify", (1, 2, 4)), ("advance", (1, 512))):
        for rows, length in itertools.product(_ROWS, lengths):
            yield _timing(what, inputs, rows, length, 4 if length == 512 else 48)


def _timing(what: str, inputs: RandomInputs, rows: int, length: int, calls: int) -> Row:
    """Returns the contenders' times per call in one case, medians of the rounds."""
    q, window = inputs.window(rows, length)
    start, kept = inputs.state(rows), mx.full((rows,), length, dtype=mx.int32)
    verify, on_gpu, scaled = what == "verify", gpu.backend() is not None, q * q.shape[-1] ** -0.5
    mx.eval(q, window, start, kept, scaled)
    lengths = None if verify else kept

    def ours(state: mx.array, pending: PendingWindow | None) -> Any:
        return recurrence.run_window(q, window, state, pending, kept, lengths)

    def chunkwise(state: mx.array, pending: PendingWindow | None) -> Any:
        state = state if pending is None else portable.fold(pending, kept, state)
        y, state, after = portable.run_chunked(q, window, state, advance=not verify)
        return y, state, after if verify else None

    def theirs(run: Callable[..., Any]) -> _Call:  # always advances the state
        return lambda state: run(scaled, window.k, window.v, window.g, window.beta, state)

    chains: dict[str, _Call | None] = dict.fromkeys(_CONTENDERS)
    chains["chunkwise"] = _chain(chunkwise, calls, start, None)
    if on_gpu:
        chains["kernel"] = _chain(ours, calls, start, None)
    if on_gpu and mx.metal.is_available():
        kernel = theirs(mlx_lm_gated_delta.gated_delta_kernel)
        chains["mlx-lm's kernel"] = _chain(kernel, calls, start)
    if length == 1 or not on_gpu or rows <= 4:  # Else tens of thousands of launches.
        loop = theirs(mlx_lm_gated_delta.gated_delta_ops)
        chains["mlx-lm's loop"] = _chain(loop, calls, start)
    times = take_turns({name: each for name, each in chains.items() if each}, _REPEATS)
    us = {name: 1e6 * statistics.median(each) / calls for name, each in times.items()}
    first, line = next(iter(us.values())), row("us a call | rows | T", what, rows, length)
    for name in chains:
        line |= {name: us.get(name), f"{name}, ratio": us[name] / first if name in us else None}
    return line


def _chain(run: _Call, calls: int, *state: Any) -> _Call:
    """Returns a function that makes `calls` calls, each from the state of the previous call."""
    states = [state]

    def repeat() -> list[Any]:
        for _ in range(calls):
            y, *states[0] = run(*states[0])
        return [y, states[0]]

    return repeat
