"""The gated delta rule of prompts on Metal by mlx's own chunked kernel, where that is faster.

mlx has this kernel since 0.32.4; from M5 on it uses tensor units. It runs only if it agrees with
`portable`, as our own kernels must. It has not been run on a Mac; on the CPU mlx's function agrees.
"""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_mtp.kernels import gated_delta, gpu, portable, self_check
from mlx_mtp.kernels.gdn_types import GDNShape, GDNWindow
from mlx_mtp.kernels.view import Operand, to_array, to_arrays

logger = logging.getLogger(__name__)

LEAST = 64  # positions; shorter windows run in our own kernel
NAME = "gated_delta_by_mlx"
_TIMED, _ROUNDS = 512, 4  # positions, and how often


def run_kernel(
    q: Operand,  # l2-normalised, [B, T, Hk, Dk]
    window: GDNWindow,
    state: mx.array,  # before the window, float32 [B, Hv, Dv, Dk]
    lengths: mx.array,  # positions of the window that each row keeps, int32 [B]
) -> tuple[mx.array, mx.array]:
    """Returns outputs [B, T, Hv, Dv] and the state after the kept positions.

    See `recurrence.run_window`.
    """
    # In a 16-bit type mlx would round intermediate results.
    k, v, g, beta = (each.astype(mx.float32) for each in to_arrays(window.masked(lengths)))
    query = to_array(q).astype(mx.float32) * q.shape[-1] ** -0.5
    outputs, after = mx.fast.gated_delta_update(query, k, v, g, beta, state)
    return outputs.astype(q.dtype), after


def fits(window: GDNWindow) -> bool:
    """Returns whether mlx's kernel works here for a prompt of these shapes, faster than our own."""
    if window.length < LEAST or not hasattr(mx.fast, "gated_delta_update"):
        return False
    return _is_used(GDNShape(*window.k.shape[2:], *window.v.shape[2:]), window.k.dtype)


@functools.lru_cache(maxsize=8)
def _is_used(shape: GDNShape, dtype: mx.Dtype) -> bool:
    try:
        error = self_check.gated_delta_prompt_error(run_kernel, _reference, shape, dtype)
        why = "" if error < gpu.TOLERANCE else f"it is off by {error:.1e}"
        if not why and not _is_faster(shape, dtype):
            why = "it is slower"
    except Exception as problem:
        why = f"{type(problem).__name__}: {problem}"
    if why:
        gpu.slower.add(NAME)
        logger.info("mlx's gated delta rule is not used for prompts: %s", why)
    return not why


def _is_faster(shape: GDNShape, dtype: mx.Dtype) -> bool:
    inputs = self_check.RandomInputs(0, shape, dtype)
    (q, window), state = inputs.window(1, _TIMED), inputs.state(1)
    lengths = mx.array([_TIMED], dtype=mx.int32)
    theirs = _seconds(lambda: run_kernel(q, window, state, lengths))
    ours = _seconds(lambda: gated_delta.run_kernel(q, window, state, None, None, lengths)[:2])
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
    q: Operand, window: GDNWindow, state: mx.array, lengths: mx.array
) -> tuple[mx.array, mx.array]:
    return portable.run_chunked(q, window.masked(lengths), state)[:2]
