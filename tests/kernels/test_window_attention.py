"""Attention of exact windows on Metal, emulated: right, with the same bits in every pass."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.layout import Layout
from mlx_mtp.cache.packing import Packing
from mlx_mtp.kernels.metal import window_attention
from tests.kernels.attention_cases import BF16, check_that_it_fits, normal
from tests.support.quick import full

on_metal = pytest.mark.parametrize("emulated", ["metal"], indirect=True)


@on_metal
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [
        full(2, 1, 64, BF16),
        full(6, 2, 256, BF16),
        full(8, 1, 128, mx.float16),
        full(2, 2, 96, BF16),
    ],
)
def test_it_is_right_and_a_position_does_not_depend_on_others(
    emulated, heads, kv_heads, dim, dtype, caplog
):
    """The windows have several lengths; rows are in one to five buffers."""
    check_that_it_fits(window_attention.BLOCK_ATTENTION, heads, kv_heads, dim, dtype, caplog)


@on_metal
@pytest.mark.parametrize("ends", [(514, 3), full((2051, 514)), full((16387, 9))])
def test_a_window_across_the_border_of_a_split_has_the_bits_of_its_tokens_alone(emulated, ends):
    """A larger buffer, for which more blocks are launched than have keys, gives the same bits."""
    found = {}
    for room in (0, 3000):
        for lengths in [(5, 1), (1, 3)]:
            layout = Layout(2)
            layout.arrange(ends, [end + room for end in ends])
            cache = RaggedKVCache()
            for buffer in layout.buffers:
                cache.buffers[buffer] = mx.zeros((2 * buffer.slots * buffer.capacity, 64), BF16)
            for row, end in enumerate(ends):
                keys, values = normal(2, 1, end, 64, seed=row)
                cache.put(layout.places[row], 0, keys, values)
            starts = mx.array([end - n for end, n in zip(ends, lengths)], dtype=mx.int32)
            packing = Packing(layout, starts, lengths)
            places = [(row, -i) for row, n in enumerate(lengths) for i in range(n, 0, -1)]
            queries = mx.stack([normal(2, 64, seed=10 + 5 * row - i) for row, i in places])
            exact = cache.attend(packing, queries, 0.125, exact=True)
            true = cache.attend(packing, queries.astype(mx.float32), 0.125)
            np.testing.assert_allclose(exact.astype(mx.float32), true, rtol=2e-2, atol=2e-2)
            for place, own in zip(places, exact):
                assert mx.array_equal(found.setdefault(place, own), own).item()


@on_metal
def test_ragged_rows_of_more_buffers_than_a_launch_has(emulated, monkeypatch):
    """The cache's result equals mlx's; one row has no window, and one is far longer."""
    monkeypatch.setattr(window_attention.BLOCK_ATTENTION, "_is_right", lambda *_: True)
    monkeypatch.setattr(window_attention, "_BUFFERS", (1, 2))
    lengths, starts = [2, 0, 1, 17, 1, 1, 3], [254, 3, 700, 239, 0, 1100, 511]
    layout = Layout(len(starts))
    ends = [start + length for start, length in zip(starts, lengths)]
    layout.arrange(ends, [max(end, 1500 * (row == 4)) for row, end in enumerate(ends)])
    assert len(layout.buffers) > 2
    cache = RaggedKVCache()
    for number, buffer in enumerate(layout.buffers):
        cache.buffers[buffer] = normal(2 * buffer.slots * buffer.capacity, 64, seed=number)
    packing = Packing(layout, mx.array(starts, dtype=mx.int32), lengths)
    queries = normal(packing.num_tokens, 2, 64, seed=7)
    found, true = (
        cache.attend(packing, queries, 0.125, exact).astype(mx.float32) for exact in (1, 0)
    )
    np.testing.assert_allclose(found, true, rtol=2e-2, atol=2e-2)
