"""Attention in blocks of queries equals mlx's attention of all queries at once."""

import platform

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.layout import Layout
from mlx_mtp.cache.packing import Packing
from mlx_mtp.kernels import attention, gpu

DIM, HEADS, KV_HEADS = 32, 6, 2


def normal(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@settings(max_examples=40, deadline=None)
@given(start=st.integers(0, 700), length=st.integers(18, 300), block=st.sampled_from([16, 64, 512]))
def test_a_chunk_attends_to_the_same(start, length, block):
    """The result does not depend on the blocks, for any start, or on entries after the chunk."""
    layout, cache = Layout(1), RaggedKVCache()
    layout.arrange([start + length], [start + length])
    packing = Packing(layout, mx.array([start], dtype=mx.int32), [length])
    buffer = layout.buffers[0]
    lines = 2 * buffer.slots * KV_HEADS * buffer.capacity
    cache.buffers[buffer] = normal(lines, DIM, seed=start)
    queries = normal(length, HEADS, DIM, seed=7)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attention, "attends_in_blocks", lambda _: False)
        expected = cache.attend(packing, queries, DIM**-0.5)
        patched.setattr(attention, "attends_in_blocks", lambda _: True)
        for backend, size in ((None, "_CPU_BLOCK"), ("metal", "BLOCK")):
            patched.setattr(gpu, "backend", lambda backend=backend: backend)
            patched.setattr(attention, size, block)
            found = cache.attend(packing, queries, DIM**-0.5)
            np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-4, atol=1e-5)
    known = Packing(layout, mx.array([start], dtype=mx.int32), [length])
    known.ends = [start + length]
    asked = []
    with pytest.MonkeyPatch.context() as patched:
        real = mx.fast.scaled_dot_product_attention

        def noted(*given, **how):
            asked.append((given[1].shape[2], how["mask"]))
            return real(*given, **how)

        patched.setattr(mx.fast, "scaled_dot_product_attention", noted)
        patched.setattr(attention, "attends_in_blocks", lambda _: False)
        found = cache.attend(known, queries, DIM**-0.5)
    assert asked == [(start + length, "causal")], "no array, nor keys behind the end"
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("chip", "system", "length", "fused"),
    [
        ("applegpu_g17s", "26.2", 1024, True),
        ("applegpu_g17s", "26.2", 1023, False),
        ("applegpu_g17s", "26.1", 1024, False),
        ("applegpu_g16d", "26.4", 2048, False),
        ("", "", 2048, False),
    ],
)
def test_a_long_chunk_is_one_operation_where_mlx_fuses_it(monkeypatch, chip, system, length, fused):
    layout, cache = Layout(1), RaggedKVCache()
    layout.arrange([length], [length])
    packing = Packing(layout, mx.array([0], dtype=mx.int32), [length])
    packing.ends, asked = [length], []
    buffer = layout.buffers[0]
    cache.buffers[buffer] = mx.zeros((2 * buffer.slots * buffer.capacity, 256))
    monkeypatch.setattr(gpu, "backend", lambda: "metal")
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": chip})
    monkeypatch.setattr(platform, "mac_ver", lambda: (system, (), ""))
    monkeypatch.setattr(
        mx.fast,
        "scaled_dot_product_attention",
        lambda queries, *_, **how: asked.append(how["mask"]) or queries,
    )
    cache.attend(packing, mx.zeros((length, 1, 256)), 1 / 16)
    assert asked == ["causal"] * fused


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "pieces"),
    [
        (1, 1, 256, [8, 8, 1]),
        (12, 2, 256, [5, 5, 5, 2]),
        (8, 1, 256, [4, 4, 4, 4, 1]),
        (33, 1, 256, [17]),
        (8, 1, 64, [17]),
    ],
)
def test_a_window_on_metal_is_cut_to_mlxs_fused_form(monkeypatch, heads, kv_heads, dim, pieces):
    """A window of 17 positions is computed beside one of three."""
    layout, cache = Layout(2), RaggedKVCache()
    layout.arrange([317, 293], [317, 293])
    packing = Packing(layout, mx.array([300, 290], dtype=mx.int32), [17, 3])
    for buffer in layout.buffers:
        cache.buffers[buffer] = normal(2 * buffer.slots * kv_heads * buffer.capacity, dim, seed=3)
    queries = normal(20, heads, dim, seed=7)
    expected = cache.attend(packing, queries, dim**-0.5)
    lengths, own = [], mx.fast.scaled_dot_product_attention

    def by_mlx(part, *given, **how):
        lengths.append(part.shape[2])
        return own(part, *given, **how)

    monkeypatch.setattr(gpu, "backend", lambda: "metal")
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", by_mlx)
    assert cache.attend(packing, queries, dim**-0.5).shape == expected.shape
    assert lengths == [17], "of few keys"
    lengths.clear()
    monkeypatch.setattr(attention, "_METAL_KEYS", 300)
    found = cache.attend(packing, queries, dim**-0.5)
    assert lengths == pieces
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-4, atol=1e-5)
