"""Compares kernels with their references, in float32 on the CPU, on small random inputs."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_mtp.kernels import portable
from mlx_mtp.kernels.gdn_types import (
    QWEN3_NEXT_80B,
    GDNProjections,
    GDNShape,
    GDNWindow,
    ShortConvWeights,
)
from mlx_mtp.kernels.view import column_view, to_array, to_arrays

# The factor by which a type's rounding error in sums can exceed float32's: a few half units.
_COARSENESS = {mx.float32: 1, mx.float16: 50, mx.bfloat16: 200}


class RandomInputs:
    """Random inputs for GatedDeltaNet layers of a shape, and for attention."""

    def __init__(self, seed: int, shape: GDNShape, dtype: mx.Dtype) -> None:
        self._random = np.random.default_rng(seed)
        self.shape = shape
        self.dtype = dtype  # of the activations

    def normal(self, *shape: int) -> mx.array:
        """Returns float32 numbers of a standard normal distribution."""
        return mx.array(self._random.standard_normal(shape, dtype=np.float32))

    def counts(self, rows: int, most: int) -> mx.array:
        """Returns int32 [B] from 0 to `most`; the first row has `most`, and the second one 0."""
        counts = self._random.integers(0, most + 1, rows, dtype=np.int32)
        counts[:2] = (most, 0)[:rows]
        return mx.array(counts)

    def state(self, rows: int) -> mx.array:
        return self.normal(rows, self.shape.value_heads, self.shape.value_dim, self.shape.key_dim)

    def window(self, rows: int, length: int) -> tuple[mx.array, GDNWindow]:
        """Returns queries [B, T, Hk, Dk] and a window; queries and keys are unit vectors."""
        hk, dk, hv, dv, _ = self.shape
        q, k = (self.normal(rows, length, hk, dk) for _ in range(2))
        q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        v = self.normal(rows, length, hv, dv)
        beta = mx.sigmoid(self.normal(rows, length, hv))
        # Decays are mostly 0.7 to 0.98: a product of many smaller ones would underflow.
        g = mx.sigmoid(self.normal(rows, length, hv) + 2)
        q, k, v, beta = (a.astype(self.dtype) for a in (q, k, v, beta))
        # The decay stays float32, as in the models.
        return q, GDNWindow(k, v, g, beta)

    def projected(self, rows: int, length: int) -> GDNProjections:
        """Returns a layer's projections, views of one array as in the models."""
        hk, dk, hv, dv, _ = self.shape
        ratio = hv // hk
        step = 2 * dk + ratio * (dv + 2)
        wide = self.normal(rows * length, hk * step).astype(self.dtype)
        firsts = 0, dk, 2 * dk, 2 * dk + ratio * dv, 2 * dk + ratio * (dv + 1)
        shapes = (hk, dk), (hk, dk), (hk, ratio, dv), (hk, ratio), (hk, ratio)
        pairs = zip(firsts, shapes, strict=True)
        return GDNProjections(
            *(column_view(wide, (rows, length), at, step, each) for at, each in pairs)
        )

    def convolution(self) -> ShortConvWeights:
        shape = self.shape
        weight = self.normal(shape.channels, shape.conv_size, 1).astype(self.dtype)
        return ShortConvWeights(
            weight, self.normal(shape.value_heads), self.normal(shape.value_heads)
        )

    def history(self, rows: int, previous: int) -> mx.array:
        length = self.shape.conv_size - 1 + previous
        return self.normal(rows, length, self.shape.channels).astype(self.dtype)


def difference(found: Iterable[mx.array], true: Iterable[mx.array]) -> float:
    """Returns the largest error of all pairs of arrays, relative to the pair's largest number.

    The error is divided by the `_COARSENESS` of the coarser of both types.
    """
    shares = []
    for ours, theirs in zip(found, true, strict=True):
        ours32, theirs32 = (a.astype(mx.float32) for a in (ours, theirs))
        share = mx.abs(ours32 - theirs32).max() / mx.abs(theirs32).max()
        shares.append(float(share) / max(_COARSENESS[a.dtype] for a in (ours, theirs)))
    return float(np.max(shares))  # Python's max could drop a NaN.


def largest_difference(
    program: Callable[[Callable[..., Any]], Sequence[mx.array]],
    run_kernel: Callable[..., Any],
    reference: Callable[..., Any],
) -> float:
    """Returns the `difference` between a program's results with a kernel and with its reference."""
    mx.eval(found := program(run_kernel))
    with mx.stream(mx.cpu):
        return difference(found, program(reference))


def gated_delta_error(run_kernel: Callable[..., Any], shape: GDNShape, dtype: mx.Dtype) -> float:
    """Returns the largest difference for a window, and for a window or a prompt after it."""
    inputs = RandomInputs(0, shape, dtype)
    first, second, state = inputs.window(2, 2), inputs.window(2, 3), inputs.state(2)
    prompt, lengths = inputs.window(2, 6), mx.array([6, 5], dtype=mx.int32)
    num_kept = mx.array([1, 2], dtype=mx.int32)

    def program(step: Callable[..., Any]) -> list[mx.array]:
        _, folded, pending = step(*first, state, None, None)
        y, folded, after = step(*second, folded, pending, num_kept)
        _, advanced, _ = step(*prompt, state, pending, num_kept, lengths)
        return [y, folded, to_array(after.delta), advanced]

    return largest_difference(program, run_kernel, portable.run_window)


def gated_delta_prompt_error(
    run_kernel: Callable[..., Any],
    reference: Callable[..., Any],
    shape: GDNShape,
    dtype: mx.Dtype,
) -> float:
    """Returns the largest difference of states and kept outputs for prompts of two lengths."""
    inputs, lengths = RandomInputs(0, shape, dtype), [130, 77]
    (q, window), state = inputs.window(2, 130), inputs.state(2)

    def program(run: Callable[..., Any]) -> list[mx.array]:
        y, after, *_ = run(q, window, state, mx.array(lengths, dtype=mx.int32))
        return [after, *(y[row, :length] for row, length in enumerate(lengths))]

    return largest_difference(program, run_kernel, reference)


def short_conv_error(run_kernel: Callable[..., Any], shape: GDNShape, dtype: mx.Dtype) -> float:
    """Returns the largest difference for two windows, the second one as long as a prompt's."""
    inputs = RandomInputs(0, shape, dtype)
    convolution, history = inputs.convolution(), inputs.history(2, 0)
    first, second = inputs.projected(2, 2), inputs.projected(2, 18)
    num_kept = mx.array([1, 2], dtype=mx.int32)

    def program(convolve: Callable[..., Any]) -> list[mx.array]:
        _, _, conv_input = convolve(first, convolution, history, None)
        q, window, conv_input = convolve(second, convolution, conv_input, num_kept)
        return [*to_arrays([q, *window]), conv_input]

    return largest_difference(program, run_kernel, portable.short_conv)


# The capacity of each buffer, and where the row in each slot ends. Checks take 1, 4 or all buffers.
_BUFFERS = ((512, (256, 300)), (512, (17,)), (512, (255,)), (256, (40,)), (512, (257,)))


def window_attention(
    run_kernel: Callable[..., mx.array],
    heads: tuple[int, int, int],  # query heads, KV heads, head dimension
    dtype: mx.Dtype,
    longest: int,
) -> float:
    """Returns the largest difference of attention for windows of 1 to `longest` tokens.

    Raises ValueError if a position's result depends on the other positions of a pass.
    """
    num_heads, kv_heads, dim = heads
    inputs = RandomInputs(0, QWEN3_NEXT_80B, dtype)
    buffers = [
        inputs.normal(2, len(ends), kv_heads, size, dim).astype(dtype) for size, ends in _BUFFERS
    ]
    flat = [array.reshape(-1, dim) for array in buffers]
    places = [
        (number, slot, size, end)
        for number, (size, ends) in enumerate(_BUFFERS)
        for slot, end in enumerate(ends)
    ]
    differences = list[float]()
    lengths = dict.fromkeys((1, max(1, 16 * kv_heads // num_heads), longest))
    for length, count in itertools.product(lengths, (2, 5, 6)):
        rows, positions = list[tuple[int, ...]](), list[int]()
        for place in places[:count]:
            tokens = 1 if place is places[1] else length
            rows.append((*place[:3], len(positions), tokens))
            positions += range(place[3] - tokens, place[3])
        queries = inputs.normal(len(positions), num_heads, dim).astype(dtype)
        where = mx.array(positions, dtype=mx.int32)
        found = run_kernel(queries, where, flat, kv_heads, tuple(rows))
        for number, slot, size, first, tokens in rows:
            own, last = slice(first, first + tokens), slice(first + tokens - 1, first + tokens)
            entries = buffers[number][:, slot : slot + 1]
            differences.append(_attention(found[own], queries[own], where[own], *entries))
            alone = ((number, slot, size, 0, 1),)
            if not mx.array_equal(
                run_kernel(queries[last], where[last], flat, kv_heads, alone), found[last]
            ):
                raise ValueError("a position depends on what is beside it")
    return float(np.max(differences))


def chunk_attention(
    run_kernel: Callable[..., mx.array], heads: tuple[int, int, int], dtype: mx.Dtype
) -> float:
    """Returns the largest difference of attention for one chunk of a prompt.

    Raises ValueError if a query's result depends on where the chunk is cut.
    """
    num_heads, kv_heads, dim = heads
    inputs, (first, length, end) = RandomInputs(0, QWEN3_NEXT_80B, dtype), (75, 200, 300)
    keys, values = (inputs.normal(1, kv_heads, end, dim) for _ in "kv")
    # Scores grow with the position, so that earlier sums have to be rescaled.
    entries = [a.astype(dtype) for a in (keys * mx.linspace(0.5, 8, end)[:, None], values)]
    queries = inputs.normal(length, num_heads, dim).astype(dtype)
    positions = mx.arange(first, first + length, dtype=mx.int32)
    found = run_kernel(queries, *entries, positions)
    for cut in (37, 130):
        own = slice(None, cut), slice(cut, None)
        parts = [run_kernel(queries[each], *entries, positions[each]) for each in own]
        if not mx.array_equal(mx.concatenate(parts), found):
            raise ValueError("a query depends on where the chunk is cut")
    return _attention(found, queries, positions, *entries)


def _attention(
    found: mx.array, queries: mx.array, positions: mx.array, keys: mx.array, values: mx.array
) -> float:
    mx.eval(found)
    with mx.stream(mx.cpu):
        wide = [a.astype(mx.float32) for a in (queries[None].swapaxes(1, 2), keys, values)]
        mask = mx.arange(keys.shape[2]) <= positions[:, None]
        scale = queries.shape[-1] ** -0.5
        true = mx.fast.scaled_dot_product_attention(*wide, scale=scale, mask=mask)
        return difference([found], [true[0].swapaxes(0, 1)])
