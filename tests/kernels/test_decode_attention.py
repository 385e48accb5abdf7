"""Attention of windows: the real source on an emulated GPU, compared with float32 and with mlx."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.layout import Layout
from mlx_mtp.cache.packing import Packing
from mlx_mtp.kernels import attention
from mlx_mtp.kernels.cuda import attention_plan, decode_attention
from tests.kernels.attention_cases import BF16, check_that_it_fits, normal

F16 = mx.float16
# Query heads, KV heads, dimension, type.
CASES = [
    (8, 2, 128, BF16),
    (4, 2, 64, BF16),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in [(8, 1, 256, BF16), (2, 2, 128, F16), (16, 1, 256, F16), (6, 1, 128, BF16)]
    ),
]


pytestmark = pytest.mark.usefixtures("matrix_units")


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "dtype"), CASES)
def test_it_is_exact_and_a_position_does_not_depend_on_others(heads, kv_heads, dim, dtype, caplog):
    """The windows have several lengths at the ends of pieces; rows are in one to five buffers."""
    check_that_it_fits(decode_attention.WINDOW_ATTENTION, heads, kv_heads, dim, dtype, caplog)


def test_ragged_rows_of_more_buffers_than_a_launch_has(monkeypatch):
    """The cache's result equals mlx's; one row has no window, and one is far longer."""
    monkeypatch.setattr(decode_attention.WINDOW_ATTENTION, "_is_right", lambda *_: True)
    monkeypatch.setattr(attention_plan, "BUFFERS", (1, 2))
    lengths = [2, 0, 1, 17, 1, 1, 3]
    starts = [254, 3, 700, 239, 0, 1100, 511]
    layout = Layout(len(starts))
    ends = [start + length for start, length in zip(starts, lengths)]
    layout.arrange(ends, [max(end, 1500 * (row == 4)) for row, end in enumerate(ends)])
    assert len(layout.buffers) > 2
    cache, other = RaggedKVCache(), RaggedKVCache()
    for number, buffer in enumerate(layout.buffers):
        cache.buffers[buffer] = normal(2 * buffer.slots * buffer.capacity, 128, seed=number)
    other.buffers = dict(cache.buffers)
    packing = Packing(layout, mx.array(starts, dtype=mx.int32), lengths)
    queries = normal(packing.num_tokens, 4, 128, seed=7)
    entries = normal(packing.num_tokens, 2, 1, 128, seed=8)
    for _ in range(2):  # The second time by the call that is kept.
        at_once = other.write_and_attend(packing, entries, queries, 128**-0.5)
    assert [*packing.calls.values()] != [None]
    cache.write(packing, entries)
    found = cache.attend(packing, queries, 128**-0.5)
    assert mx.array_equal(at_once, found)
    assert cache.buffers.keys() == other.buffers.keys()
    assert all(mx.array_equal(array, other.buffers[b]) for b, array in cache.buffers.items())
    monkeypatch.setattr(attention, "fits", lambda *_: False)
    true = cache.attend(packing, queries, 128**-0.5)
    assert found.shape == true.shape and found.dtype == true.dtype
    found, true = (np.array(a.astype(mx.float32)) for a in (found, true))
    np.testing.assert_allclose(found, true, rtol=2e-2, atol=2e-2)
