"""Products of layers: the operation for each number of rows, and where weights are expanded."""

import math
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_mtp.kernels import gpu
from mlx_mtp.models.gemm import measure, routes
from mlx_mtp.models.gemm.exact import make_batch_invariant
from mlx_mtp.models.gemm.measure import choose_routes, kernel_takes_all_weights
from mlx_mtp.models.gemm.routes import BY_MLX, Routes, digest, routes_of, set_routes

EVERY = range(1, sys.maxsize)


@pytest.mark.parametrize(
    ("given", "of_step", "rows", "operation"),
    [
        (Routes(), True, 1, "mlx"),
        (Routes(kernel=range(2, 17)), True, 1, "mlx"),
        (Routes(kernel=range(2, 17)), True, 16, "kernel"),
        (Routes(kernel=EVERY), False, 64, "kernel"),
        (Routes(kernel=EVERY), False, 65, "mlx"),
        (Routes(kernel=EVERY), None, 128, "kernel"),
        (Routes(kernel=EVERY), None, 129, "mlx"),
        (Routes(kernel=EVERY), True, 1000, "kernel"),
        (Routes(kernel=EVERY), True, 0, "mlx"),
        (Routes(kernel=EVERY, expand_from=200), True, 300, "kernel"),
        (Routes(kernel=EVERY, expand_from=200, prompt=400), False, 199, "kernel"),
        (Routes(kernel=EVERY, expand_from=200, prompt=400), False, 200, "expand"),
        (Routes(kernel=EVERY, prompt=400), False, 401, "mlx"),
        (Routes(expand_from=65), True, 100, "expand"),
        (Routes(expand_from=65, in_blocks=True), True, 100, "blocks"),
        (Routes(expand_from=65, in_blocks=True), False, 100, "expand"),
        (Routes(kernel=range(1, 9), in_blocks=True), True, 8, "kernel"),
        (Routes(kernel=range(1, 9), in_blocks=True), True, 9, "blocks"),
    ],
)
def test_the_operation_for_a_number_of_rows(given, of_step, rows, operation):
    if of_step is None:
        assert given.operation(rows) == operation
    else:
        with gpu.decode_pass(of_step):
            assert given.operation(rows) == operation


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(64, 96, bias=False)
        self.quantized = nn.QuantizedLinear(64, 96)
        self.expanded = nn.QuantizedLinear(64, 96)
        self.experts = SwitchGLU(64, 32, 4)
        self.tied = nn.Embedding(96, 64)


@pytest.mark.parametrize("rows", [1, 3, 64, 65, 130])
def test_a_step_sees_blocks_of_one_size_and_a_prompt_what_it_has(monkeypatch, rows):
    model, seen = Products(), []
    x = mx.random.normal((1, rows, 64), key=mx.random.key(0))
    chosen = mx.arange(2 * rows, dtype=mx.uint32).reshape(1, rows, 2) % 4
    calls = {name: (x, chosen) if name == "experts" else (x,) for name in model}
    true = {name: routes.product(model[name], *given) for name, given in calls.items()}
    set_routes(model.expanded, Routes(expand_from=2048))
    set_routes(model.plain, Routes(kernel=range(1, 9)))
    monkeypatch.setattr(gpu, "backend", lambda: "cuda")
    blocks = routes._in_blocks
    monkeypatch.setattr(
        routes,
        "_in_blocks",
        lambda call, *inputs: blocks(lambda *a: seen.append(len(a[0])) or call(*a), *inputs),
    )
    make_batch_invariant(model, mx.float32)
    assert routes_of(model.expanded).expand_from == 65, "not as measured"
    assert not routes_of(model.plain).kernel, "it serves fewer rows than a step may have"
    monkeypatch.setattr(routes, "expanded", lambda w, *parts: mx.dequantize(w, *parts))
    for step in (True, False):
        for name, given in calls.items():
            seen.clear()
            with gpu.decode_pass(step):
                found = routes.product(model[name], *given)
            assert found.shape == true[name].shape
            assert mx.allclose(found, true[name], atol=1e-5).item()
            few = step or rows <= gpu.MOST_PROMPT_ROWS
            assert seen == ([64] * -(-rows // 64) if few else [])


def test_a_digest_tells_choices_apart(monkeypatch):
    """A digest depends on layers' kernels, on where they expand weights, and on failing kernels."""
    model = Products()
    found = [digest(model)]
    for name, given in (("quantized", Routes(range(1, 129))), ("expanded", Routes(expand_from=9))):
        set_routes(model[name], given)
        found.append(digest(model))
    monkeypatch.setattr(gpu, "backend", lambda: "cuda")
    monkeypatch.setattr(gpu, "refused", gpu.refused.copy())
    assert not gpu.Operation("", "of this test", lambda *_: 1.0, lambda *_: True).works(
        0, mx.float32
    )
    found.append(digest(model))
    assert len({*found}) == 4
    assert digest(model) == found[-1]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        quantized = {"bits": 4, "group_size": 64}
        self.layers = [nn.QuantizedLinear(128, 48, bias=bias, **quantized) for bias in (0, 1)]
        self.other = nn.QuantizedLinear(192, 32, bias=False, bits=8, group_size=64)
        self.lm_head = nn.QuantizedLinear(64, measure._MOST_OUTPUTS + 8, bias=False, **quantized)
        self.plain = nn.Linear(128, 48)


def least_rows(*layers):
    return [routes_of(layer).expand_from for layer in layers]


@pytest.fixture
def measured(monkeypatch):
    """Expanding is faster only for 48 outputs and from 512 rows on; returns the tried shapes."""
    tried = []

    def timed(call):
        result = call()
        _, rows, outputs = result.shape
        cells = [cell.cell_contents for cell in call.__closure__]
        (layer,) = (each for each in cells if isinstance(each, nn.Module))
        expands = routes_of(layer).expand_from <= rows
        tried.append((outputs, rows, expands))
        return result, 1.0 if not expands else 0.9 if outputs == 48 and rows >= 512 else 1.0

    monkeypatch.setattr(gpu, "backend", lambda: "cuda")
    monkeypatch.setattr(routes, "expanded", lambda w, s, b, g, n: mx.dequantize(w, s, b, g, n))
    monkeypatch.setattr(measure, "timed", timed)
    monkeypatch.setattr(measure, "SMALL", 0)
    return tried


def test_each_shape_expands_from_where_that_is_faster(measured):
    model = Model()
    x = mx.random.normal((1, 600, 128), key=mx.random.key(0))
    before = [layer(x) for layer in model.layers]
    assert not choose_routes(model, mx.float32)
    assert least_rows(*model.layers) == [512, 512]
    assert least_rows(model.other, model.lm_head) == [math.inf, math.inf]
    assert type(model.other) is nn.QuantizedLinear and type(model.plain) is nn.Linear
    assert not kernel_takes_all_weights(model, mx.bfloat16)  # 128 inputs are too few.
    # A shape is measured once, and down to the first number of rows that was not faster.
    tried = [rows for outputs, rows, expands in measured if outputs == 48 and expands]
    assert tried == [2048, 1024, 512, 256]
    for layer, true in zip(model.layers, before):
        np.testing.assert_allclose(layer(x), true, rtol=1e-4, atol=1e-4)


def test_small_weights_are_expanded_for_every_prompt_whatever_was_timed(measured, monkeypatch):
    monkeypatch.setattr(measure, "SMALL", 4096)
    model = Model()
    choose_routes(model, mx.float32)
    assert least_rows(*model.layers, model.other) == [65, 65, math.inf]  # 3,072 and 6,144 bytes


@pytest.mark.parametrize("small", [0, 1 << 20])
@pytest.mark.parametrize("wrong", [lambda full: full * mx.nan, lambda full: 1 / 0])
def test_what_computes_something_else_or_nothing_is_not_used(measured, monkeypatch, wrong, small):
    monkeypatch.setattr(measure, "SMALL", small)
    real = mx.dequantize
    monkeypatch.setattr(mx, "dequantize", lambda *given, **more: wrong(real(*given, **more)))
    model = Model()
    choose_routes(model, mx.float32)
    assert least_rows(*model.layers) == [math.inf] * 2


def test_elsewhere_mlx_own_products_run():
    model = Model()
    choose_routes(model, mx.float32)
    assert all(type(layer) is nn.QuantizedLinear for layer in model.layers)
    assert routes_of(model.other) == BY_MLX
