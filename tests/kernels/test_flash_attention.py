"""Attention of chunks with the scores in registers: the real source on an emulated GPU."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.layout import Layout
from mlx_mtp.cache.packing import Packing
from mlx_mtp.kernels import gpu
from mlx_mtp.kernels.cuda import flash_attention
from tests.support.quick import full

DIM, BF16, F16 = flash_attention.DIM, mx.bfloat16, mx.float16

pytestmark = pytest.mark.usefixtures("matrix_units")


def normal(*shape, seed=0, dtype=BF16):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype"),
    [(4, 2, BF16), pytest.param(6, 1, F16, marks=pytest.mark.full)],
)
def test_it_is_exact_and_a_query_does_not_depend_on_the_cut(heads, kv_heads, dtype, caplog):
    queries, keys = (normal(1, count, DIM, dtype=dtype) for count in (heads, kv_heads))
    queries = mx.broadcast_to(queries[None], (1, flash_attention.LEAST, heads, DIM))
    assert flash_attention.fits(queries, keys[None], DIM**-0.5), caplog.text
    assert not flash_attention.fits(queries, keys[None], 1.0)
    assert not flash_attention.fits(queries[:, 1:], keys[None], DIM**-0.5)
    assert not flash_attention.fits(queries[..., 1:], keys[None], (DIM - 1) ** -0.5)
    assert not flash_attention.fits(queries.astype(mx.float32), keys[None], DIM**-0.5)


@pytest.mark.full
@pytest.mark.parametrize("block", [16, 32])
def test_blocks_of_other_sizes(monkeypatch, block):
    monkeypatch.setattr(flash_attention, "BLOCK", block)
    assert 0 < flash_attention.FLASH_ATTENTION.error((2, 1, DIM), BF16) < gpu.TOLERANCE


@pytest.mark.parametrize(("start", "length"), [full(0, 129), (190, 130), (511, 128)])
def test_through_the_cache_beside_what_is_behind_the_chunk(monkeypatch, start, length):
    """Queries can be a view, and entries after the last position change no bit."""
    monkeypatch.setattr(flash_attention.FLASH_ATTENTION, "_is_right", lambda *_: True)
    layout, cache = Layout(1), RaggedKVCache()
    layout.arrange([start + length], [start + length])
    packing = Packing(layout, mx.array([start], dtype=mx.int32), [length])
    (buffer,) = layout.buffers
    entries = normal(2, buffer.slots, 1, buffer.capacity, DIM)
    queries = normal(2, length, DIM, seed=7).swapaxes(0, 1)
    found = []
    for behind in (0.0, float("nan")):
        known = mx.arange(buffer.capacity)[:, None] < start + length
        kv = mx.where(known, entries, mx.array(behind, dtype=BF16))
        cache.buffers[buffer] = kv.reshape(-1, DIM)
        found.append(cache.attend(packing, queries, DIM**-0.5))
    assert mx.array_equal(*found)
    monkeypatch.setattr(flash_attention, "fits", lambda *_: False)
    cache.buffers[buffer] = entries.reshape(-1, DIM)
    true = cache.attend(packing, queries, DIM**-0.5)
    assert found[0].shape == true.shape and found[0].dtype == true.dtype
    found, true = (np.array(a.astype(mx.float32)) for a in (found[0], true))
    np.testing.assert_allclose(found, true, rtol=2e-2, atol=2e-2)


def test_the_largest_score_comes_last_and_first():
    """A much larger score scales the sums of earlier positions down to nothing."""
    length = 136
    queries = mx.ones((length, 1, DIM), dtype=BF16)
    sizes = mx.where(mx.arange(length) % 70 == 1, 8.0, -1.0) + mx.arange(length) / 64
    keys = (sizes[None, None, :, None] * mx.ones((1, 1, length, DIM))).astype(BF16)
    values = normal(1, 1, length, DIM)
    found = flash_attention.attend(queries, keys, values, mx.arange(length, dtype=mx.int32))
    for position, chosen in ((0, 0), (1, 1), (70, 1), (71, 71), (135, 71)):
        assert mx.array_equal(found[position, 0], values[0, 0, chosen])
