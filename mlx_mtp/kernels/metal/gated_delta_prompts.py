"""The gated delta rule of prompts on Metal by mlx's own chunked kernel, where that is faster.

mlx has it since 0.32.4, with tensor units from M5 on. It has not been run on a Mac; on the CPU the
same function agrees with `portable`.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_mtp.kernels import gated_delta, gpu, portable, self_check
from mlx_mtp.kernels.gdn_types import GDNShape, GDNWindow

LEAST = 64  # positions
_TIMED, _ROUNDS = 512, 4  # positions, and how often
NAME = "gated_delta_by_mlx"


def run_kernel(
    q: mx.array,  # l2-normalised, [B, T, Hk, Dk]
    window: GDNWindow,
    state: mx.array,  # before it, float32 [B, Hv, Dv, Dk]
    lengths: mx.array,  # positions of the window that each row keeps, int32 [B]
) -> tuple[mx.array, mx.array]:
    """Outputs [B, T, Hv, Dv], and the state after the kept positions (`recurrence.run_window`)."""
    k, v, g, beta = window.masked(lengths)
    given = q * q.shape[-1] ** -0.5, k, v, g.astype(mx.float32), beta, state
    outputs, after = mx.fast.gated_delta_update(*given)
    return outputs.astype(q.dtype), after.astype(mx.float32)


def fits(window: GDNWindow) -> bool:
    """Whether it runs such a prompt here, and faster than our own kernel."""
    shape = GDNShape(*window.k.shape[2:], *window.v.shape[2:])
    dtype = window.k.dtype
    return window.length >= LEAST and BY_MLX.works(shape, dtype) and _is_faster(shape, dtype)


def _applies(_: GDNShape, __: mx.Dtype) -> bool:
    return gpu.backend() == "metal" and hasattr(mx.fast, "gated_delta_update")


@functools.lru_cache(maxsize=8)
def _is_faster(shape: GDNShape, dtype: mx.Dtype) -> bool:
    inputs = self_check.RandomInputs(0, shape, dtype)
    (q, window), state = inputs.window(1, _TIMED), inputs.state(1)
    lengths = mx.array([_TIMED], dtype=mx.int32)
    theirs = _seconds(lambda: run_kernel(q, window, state, lengths))
    ours = _seconds(lambda: gated_delta.run_kernel(q, window, state, None, None, lengths)[:2])
    if theirs >= ours:
        gpu.slower.add(NAME)
    return theirs < ours


def _seconds(launch: Callable[[], Any]) -> float:
    mx.eval(launch())
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        mx.eval(launch())
        times.append(time.perf_counter() - began)
    return min(times)


def _reference(
    q: mx.array, window: GDNWindow, state: mx.array, lengths: mx.array
) -> tuple[mx.array, mx.array]:
    return portable.run_chunked(q, window.masked(lengths), state)[:2]


BY_MLX = gpu.Operation(
    "gated delta of prompts by mlx / portable",
    NAME,
    lambda shape, dtype: self_check.gated_delta_prompt_error(run_kernel, _reference, shape, dtype),
    _applies,
)
