"""Compares kernels with the portable code, in float32 on the CPU, on small random cases."""

import itertools
from collections.abc import Callable, Iterable

import mlx.core as mx
import numpy as np

from mlx_mtp.kernels import portable
from mlx_mtp.kernels.attention_plan import Row, plan
from mlx_mtp.kernels.gdn_types import QWEN3_NEXT_80B, Convolution, Projected, Shape, Window
from mlx_mtp.kernels.gpu import Launch

# Half a unit in the last place of results near 1, over that of float32.
_COARSER = {mx.float32: 1, mx.float16: 1 << 13, mx.bfloat16: 1 << 16}
# The same, of results that are rounded a few times and compared with the largest one.
_COARSER_SHARE = {mx.float32: 1, mx.float16: 50, mx.bfloat16: 200}


class Cases:
    """Random inputs for layers of a shape."""

    def __init__(self, seed: int, shape: Shape, dtype: mx.Dtype) -> None:
        self._random = np.random.default_rng(seed)
        self.shape = shape
        self.dtype = dtype  # of the activations

    def normal(self, *shape: int) -> mx.array:
        return mx.array(self._random.standard_normal(shape, dtype=np.float32))

    def counts(self, rows: int, most: int) -> mx.array:
        """int32 [B], 0 to `most`, the two ends among them where there is room."""
        drawn = self._random.integers(0, most + 1, rows, dtype=np.int32)
        drawn[:2] = (most, 0)[:rows]
        return mx.array(drawn)

    def state(self, rows: int) -> mx.array:
        return self.normal(rows, self.shape.value_heads, self.shape.value_dim, self.shape.key_dim)

    def window(self, rows: int, length: int) -> tuple[mx.array, Window]:
        """Queries [B, T, Hk, Dk] and a window; q and k are of length one."""
        hk, dk, hv, dv, _ = self.shape
        q, k = (self.normal(rows, length, hk, dk) for _ in range(2))
        q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        v = self.normal(rows, length, hv, dv)
        beta = mx.sigmoid(self.normal(rows, length, hv))
        # Mostly 0.7 to 0.98: a product of many smaller ones is lost in denormals.
        g = mx.sigmoid(self.normal(rows, length, hv) + 2)
        q, k, v, beta = (a.astype(self.dtype) for a in (q, k, v, beta))
        # The decay stays float32, as the models have it.
        return q, Window(k, v, g, beta)

    def projected(self, rows: int, length: int) -> Projected:
        """What a layer's projections give: q, k and v slices of one array, as in the models."""
        hk, dk, hv, dv, _ = self.shape
        ratio = hv // hk
        wide = self.normal(rows, length, hk, 2 * dk + ratio * (dv + 2)).astype(self.dtype)
        ends = (dk, 2 * dk, 2 * dk + ratio * dv, 2 * dk + ratio * (dv + 1))
        q, k, v, a, b = mx.split(wide, ends, axis=-1)
        return Projected(q, k, v.reshape(rows, length, hk, ratio, dv), a, b)

    def convolution(self) -> Convolution:
        shape = self.shape
        weight = self.normal(shape.channels, shape.conv_size, 1).astype(self.dtype)
        return Convolution(weight, self.normal(shape.value_heads), self.normal(shape.value_heads))

    def history(self, rows: int, previous: int) -> mx.array:
        length = self.shape.conv_size - 1 + previous
        return self.normal(rows, length, self.shape.channels).astype(self.dtype)


def gated_delta(launch: Launch, shape: Shape, dtype: mx.Dtype) -> float:
    """The largest difference of windows by `gated_delta.launch`, in float32's measure."""
    cases = Cases(0, shape, dtype)
    first, second, state = cases.window(2, 2), cases.window(2, 3), cases.state(2)
    prompt, most = cases.window(2, 6), mx.array([6, 5], dtype=mx.int32)
    kept = mx.array([1, 2], dtype=mx.int32)

    def windows(step: Launch) -> list[mx.array]:
        _, folded, pending = step(*first, state, None, None)
        y, folded, after = step(*second, folded, pending, kept)
        _, advanced, _ = step(*prompt, state, pending, kept, most)
        return [y, folded, after.delta, advanced]

    return _difference(windows, launch, portable.step)


def gated_delta_chunks(launch: Launch, shape: Shape, dtype: mx.Dtype) -> float:
    """The largest error of a prompt by `gated_delta_chunks.launch`, relative to the largest."""
    cases = Cases(0, shape, dtype)
    (q, window), state, rows = cases.window(2, 130), cases.state(2), [130, 77]
    found = launch(q, window, state, mx.array(rows, dtype=mx.int32))
    mx.eval(found)
    with mx.stream(mx.cpu):
        true = portable.run(q, window.cut(mx.array(rows)), state)[:2]
        shares = [relative([found[1]], [true[1]])]
        shares += [relative([found[0][b, :n]], [true[0][b, :n]]) for b, n in enumerate(rows)]
    return float(np.max(shares))


def inputs(launch: Launch, shape: Shape, dtype: mx.Dtype) -> float:
    """As `gated_delta`, for `inputs.launch`."""
    cases = Cases(0, shape, dtype)
    convolution, history = cases.convolution(), cases.history(2, 0)
    first, second = cases.projected(2, 2), cases.projected(2, 18)  # as many as a prompt's
    kept = mx.array([1, 2], dtype=mx.int32)

    def windows(prepare: Launch) -> list[mx.array]:
        _, _, conv_input = prepare(first, convolution, history, None)
        q, window, conv_input = prepare(second, convolution, conv_input, kept)
        return [q, *window, conv_input]

    return _difference(windows, launch, portable.prepare)


def relative(found: Iterable[mx.array], true: Iterable[mx.array]) -> float:
    """The largest difference over the largest number, in float32's measure."""
    shares = []
    for a, b in zip(found, true, strict=True):
        ours, theirs = (x.astype(mx.float32) for x in (a, b))
        share = mx.abs(ours - theirs).max() / mx.abs(theirs).max()
        shares.append(float(share) / _COARSER_SHARE[a.dtype])
    return float(np.max(shares))


# Buffers of which `attention` takes one, four or all: capacity, and where each slot's row ends.
_BUFFERS = ((512, (256, 300)), (512, (17,)), (512, (255,)), (256, (40,)), (512, (257,)))


def attention(
    run: Callable[..., mx.array], heads: int, kv_heads: int, dim: int, dtype: mx.Dtype, longest: int
) -> float:
    """The largest error of `attention.attend` over the largest result, for windows up to a length.

    ValueError if a position's result depends on what is beside it.
    """
    cases = Cases(0, QWEN3_NEXT_80B, dtype)
    buffers = [
        cases.normal(2, len(ends), kv_heads, size, dim).astype(dtype) for size, ends in _BUFFERS
    ]
    flat = [array.reshape(-1, dim) for array in buffers]
    places = [
        (number, slot, size, end)
        for number, (size, ends) in enumerate(_BUFFERS)
        for slot, end in enumerate(ends)
    ]
    errors, group = list[float](), heads // kv_heads
    lengths = dict.fromkeys((1, max(1, 16 // group), longest))
    for length, used in itertools.product(lengths, (2, 5, 6)):
        rows, positions = [], list[int]()
        for place in places[:used]:
            count = 1 if place is places[1] else length
            rows.append(Row(*place[:3], len(positions), count))
            positions += range(place[3] - count, place[3])
        queries = cases.normal(len(positions), heads, dim).astype(dtype)
        given = queries, mx.array(positions, dtype=mx.int32)
        found = run(*given, flat, kv_heads, plan(tuple(rows), group))
        for number, slot, size, first, count in rows:
            own, last = slice(first, first + count), slice(first + count - 1, first + count)
            entries = buffers[number][:, slot : slot + 1]
            errors.append(_attention_error(found[own], *(a[own] for a in given), *entries))
            single = plan((Row(number, slot, size, 0, 1),), group)
            alone = run(*(a[last] for a in given), flat, kv_heads, single)
            if not mx.array_equal(alone, found[last]):
                raise ValueError("a position depends on what is beside it")
    return float(np.max(errors))


def chunk_attention(
    run: Callable[..., mx.array], heads: int, kv_heads: int, dim: int, dtype: mx.Dtype
) -> float:
    """The largest error of `flash.attend` over the largest result, for one chunk and its cuts.

    ValueError if a query's result depends on where the chunk is cut.
    """
    cases, (first, length, end) = Cases(0, QWEN3_NEXT_80B, dtype), (75, 200, 300)
    keys, values = (cases.normal(1, kv_heads, end, dim) for _ in "kv")
    # Scores grow, so that what came before has to be scaled.
    entries = [a.astype(dtype) for a in (keys * mx.linspace(0.5, 8, end)[:, None], values)]
    queries = cases.normal(length, heads, dim).astype(dtype)
    positions = mx.arange(first, first + length, dtype=mx.int32)
    found = run(queries, *entries, positions)
    for cut in (37, 130):
        own = slice(None, cut), slice(cut, None)
        parts = [run(queries[each], *entries, positions[each]) for each in own]
        if not mx.array_equal(mx.concatenate(parts), found):
            raise ValueError("a query depends on where the chunk is cut")
    return _attention_error(found, queries, positions, *entries)


def _attention_error(
    found: mx.array, queries: mx.array, positions: mx.array, keys: mx.array, values: mx.array
) -> float:
    mx.eval(found)
    with mx.stream(mx.cpu):
        wide = [a.astype(mx.float32) for a in (queries[None].swapaxes(1, 2), keys, values)]
        mask = mx.arange(keys.shape[2]) <= positions[:, None]
        scale = queries.shape[-1] ** -0.5
        true = mx.fast.scaled_dot_product_attention(*wide, scale=scale, mask=mask)
        true = true[0].swapaxes(0, 1)
        return float(mx.abs(found.astype(mx.float32) - true).max() / mx.abs(true).max())


def _difference(windows: Callable[[Launch], list[mx.array]], ours: Launch, theirs: Launch) -> float:
    found = windows(ours)
    mx.eval(found)
    with mx.stream(mx.cpu):
        true = windows(theirs)
        # A few units in the last place of a coarse type are no error.
        largest = [
            float(mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max()) / _COARSER[a.dtype]
            for a, b in zip(found, true, strict=True)
        ]
    return float(np.max(largest))  # Python's maximum would lose a NaN.
