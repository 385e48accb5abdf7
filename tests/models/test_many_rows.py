"""Products of many rows that expand their weights: where that is faster, and right."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mtp.models import dequant_gemm
from mlx_mtp.models.dequant_gemm import ExpandedLinear, use_many_rows
from mlx_mtp.models.skinny_gemm import FewRowsLinear, serves


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        quantized = {"bits": 4, "group_size": 64}
        self.layers = [nn.QuantizedLinear(128, 48, bias=bias, **quantized) for bias in (0, 1)]
        self.few = nn.QuantizedLinear(256, 32, bias=False, bits=8, group_size=64)
        self.few.__class__, self.few.served = FewRowsLinear, range(1, 129)
        self.lm_head = nn.QuantizedLinear(
            64, dequant_gemm._MOST_OUTPUTS + 8, bias=False, **quantized
        )
        self.plain = nn.Linear(128, 48)


@pytest.fixture
def measured(monkeypatch):
    """Expanding 48 outputs is faster from 512 rows on, 32 never; each length that was tried."""
    tried = []

    def timed(call):
        result = call()
        _, rows, outputs = result.shape
        layer = call.__closure__[-1].cell_contents
        expands = layer.least_rows <= rows
        tried.append((outputs, rows, expands))
        return result, 1.0 if not expands else 0.9 if outputs == 48 and rows >= 512 else 1.0

    monkeypatch.setattr(dequant_gemm, "backend", lambda: "cuda")
    monkeypatch.setattr(dequant_gemm, "timed", timed)
    monkeypatch.setattr(dequant_gemm, "SMALL", 0)
    return tried


def test_each_shape_expands_from_where_that_is_faster(measured):
    model = Model()
    x = mx.random.normal((1, 600, 128), key=mx.random.key(0))
    before = [layer(x) for layer in model.layers]
    use_many_rows(model, mx.float32)
    assert [layer.least_rows for layer in model.layers] == [512, 512]
    assert model.few.least_rows == model.lm_head.least_rows == float("inf")
    assert type(model.few) is FewRowsLinear and type(model.plain) is nn.Linear
    assert not serves(model, mx.bfloat16)  # Nor before: 128 inputs are too few.
    # A shape is measured once, and no fewer rows than those that were not faster.
    tried = [rows for outputs, rows, expands in measured if outputs == 48 and expands]
    assert tried == [2048, 1024, 512, 256]
    for layer, true in zip(model.layers, before):
        assert type(layer) is ExpandedLinear
        np.testing.assert_allclose(layer(x), true, rtol=1e-4, atol=1e-4)


def test_small_weights_are_expanded_for_every_prompt_whatever_was_timed(measured, monkeypatch):
    monkeypatch.setattr(dequant_gemm, "SMALL", 4096)
    model = Model()
    use_many_rows(model, mx.float32)
    assert [layer.least_rows for layer in model.layers] == [65, 65]
    assert model.few.least_rows == float("inf")  # has 8,192 bytes


@pytest.mark.parametrize("small", [0, 1 << 20])
@pytest.mark.parametrize("wrong", [lambda full: full * mx.nan, lambda full: 1 / 0])
def test_what_computes_something_else_or_nothing_is_not_used(measured, monkeypatch, wrong, small):
    monkeypatch.setattr(dequant_gemm, "SMALL", small)
    real = mx.dequantize
    monkeypatch.setattr(mx, "dequantize", lambda *given, **more: wrong(real(*given, **more)))
    model = Model()
    use_many_rows(model, mx.float32)
    assert all(layer.least_rows == float("inf") for layer in model.layers)


def test_elsewhere_mlx_own_products_run():
    model = Model()
    use_many_rows(model, mx.float32)
    assert all(type(layer) is nn.QuantizedLinear for layer in model.layers)
