"""Products of two to eight rows, emulated: exact, each row by itself, and used where they serve."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mtp.kernels import shared_reads
from mlx_mtp.models import few_rows
from tests.kernels.test_few_rows import BF16, exact, linear, near


@pytest.mark.parametrize(
    ("bits", "group_size", "dtype"), [(4, 64, BF16), (8, 32, mx.float32), (4, 128, BF16)]
)
def test_rows_are_exact_and_do_not_depend_on_others(emulated, bits, group_size, dtype):
    inputs, outputs = 384, 10  # some lanes have less to do, and a warp has features too many
    weight = mx.random.normal((outputs, inputs), key=mx.random.key(bits)) * inputs**-0.5
    quantized = mx.quantize(weight.astype(dtype), group_size, bits)
    x = mx.random.normal((7, inputs), key=mx.random.key(1)).astype(dtype)
    found = shared_reads.product(x, quantized)
    parts = [np.array(a.astype(mx.float32), dtype=np.float64) for a in quantized[1:]]
    codes = np.array(quantized[0]).view(np.uint8)
    codes = codes if bits == 8 else np.stack([codes & 15, codes >> 4], -1).reshape(outputs, -1)
    scales, biases = (np.repeat(part, group_size, axis=1) for part in parts)
    near(found, np.array(x.astype(mx.float32), dtype=np.float64) @ (codes * scales + biases).T)
    for rows in (slice(0, 2), slice(3, 7), slice(6, 7)):
        assert mx.array_equal(shared_reads.product(x[rows], quantized), found[rows])


@pytest.mark.parametrize("emulated", ["metal"], indirect=True)
def test_it_is_used_where_it_agrees_and_is_faster(emulated, monkeypatch, caplog):
    def kind(faster):
        monkeypatch.setattr(few_rows, "_is_faster", lambda layers, dtype: faster)
        layer = linear(256, 32, 4, seed=0)
        few_rows.use_few_rows(layer, BF16)
        return layer

    layer = kind(faster=True)
    assert type(layer) is few_rows.SharedReadsLinear
    for rows in (1, 2, 8, 9):
        x = mx.random.normal((1, rows, 256), key=mx.random.key(rows)).astype(BF16)
        weights = layer.weight, layer.scales, layer.biases
        if ours := 2 <= rows <= 8:
            near(layer(x)[0], exact(x[0], *weights, 4))
        plain = nn.QuantizedLinear.__call__(layer, x)
        assert mx.array_equal(layer(x), plain).item() != ours
    assert type(kind(faster=False)) is nn.QuantizedLinear
    assert not caplog.text
    wrong = shared_reads._BODY.replace("fma(bias", "fma(2 * bias")
    monkeypatch.setattr(shared_reads._KERNEL, "body", wrong)
    monkeypatch.setattr(shared_reads._KERNEL, "_built", {})
    assert type(kind(faster=True)) is nn.QuantizedLinear
    assert "it is off by" in caplog.text
