"""Checks that both kernels for the attention of windows share."""

import mlx.core as mx

from mlx_mtp.kernels import attention, gpu

BF16 = mx.bfloat16


def normal(*shape, seed=0, dtype=BF16):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def check_that_it_fits(operation, heads, kv_heads, dim, dtype, log):
    """Check that an operation is used, but not for longer windows, other scales or other types."""
    queries, kv = normal(1, heads, dim, dtype=dtype), normal(2 * kv_heads, dim, dtype=dtype)
    longest, scale = gpu.LONGEST_WINDOW, dim**-0.5
    assert attention.fits(operation, queries, kv, kv_heads, longest, scale), log.text
    assert not attention.fits(operation, queries, kv, kv_heads, longest + 1, scale)
    assert not attention.fits(operation, queries, kv, kv_heads, 1, 1.0)
    assert not attention.fits(operation, queries.astype(mx.float32), kv, kv_heads, 1, scale)
