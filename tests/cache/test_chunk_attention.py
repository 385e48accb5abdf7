"""Attention of chunks in blocks of queries, against mlx's own."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.layout import Layout
from mlx_mtp.cache.packing import Packing
from mlx_mtp.kernels import chunk_attention

DIM, HEADS, KV_HEADS = 32, 6, 2


def normal(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@settings(max_examples=40, deadline=None)
@given(start=st.integers(0, 700), length=st.integers(18, 300), block=st.sampled_from([16, 64, 512]))
def test_a_chunk_attends_to_the_same(start, length, block):
    """Whatever precedes it, and not to what lies behind it."""
    layout, cache = Layout(1), RaggedKVCache()
    layout.arrange([start + length], [start + length])
    packing = Packing(layout, mx.array([start], dtype=mx.int32), [length])
    buffer = layout.buffers[0]
    lines = 2 * buffer.slots * KV_HEADS * buffer.capacity
    cache.buffers[buffer] = normal(lines, DIM, seed=start)
    queries = normal(length, HEADS, DIM, seed=7)
    expected = cache.attend(packing, queries, DIM**-0.5)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chunk_attention, "fits", lambda _: True)
        patched.setattr(chunk_attention, "BLOCK", block)
        found = cache.attend(packing, queries, DIM**-0.5)
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-4, atol=1e-5)
