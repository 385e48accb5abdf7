"""The products of few rows: the real source on an emulated GPU, against mlx's own products."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.qwen3_next import Qwen3NextMLP, Qwen3NextSparseMoeBlock
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_mtp.kernels import few_rows, gpu
from mlx_mtp.models import few_rows as layers
from tests.kernels.emulator import MATRIX_UNITS, WHY_NOT, EmulatedKernel

BF16 = mx.bfloat16


@pytest.fixture(autouse=True)
def emulated(monkeypatch, tmp_path):
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    monkeypatch.setattr(few_rows, "backend", lambda: "cuda")
    monkeypatch.setattr(few_rows, "CUDA", MATRIX_UNITS)
    monkeypatch.setattr(
        mx.fast, "cuda_kernel", lambda **asked: EmulatedKernel(tmp_path, **asked), raising=False
    )
    monkeypatch.setattr(mx, "compile", lambda function: function)
    cached = (few_rows._kernel, gpu.launcher)
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


def linear(inputs, outputs, bits, seed):
    weight = mx.random.normal((outputs, inputs), key=mx.random.key(seed)) * inputs**-0.5
    layer = nn.QuantizedLinear(inputs, outputs, bias=False, group_size=64, bits=bits)
    layer.weight, layer.scales, layer.biases = mx.quantize(weight.astype(BF16), 64, bits)
    return layer


def exact(x, weight, scales, biases, bits):
    """In float64."""
    scales, biases = (a.astype(mx.float32) for a in (scales, biases))
    full = np.array(mx.dequantize(weight, scales, biases, 64, bits), dtype=np.float64)
    return np.array(x.astype(mx.float32), dtype=np.float64) @ full.swapaxes(-1, -2)


def near(ours, true, lost=2e-4):
    """Half a unit in the last place of bfloat16, and what sums in float32 lose."""
    found = np.array(ours.astype(mx.float32))
    np.testing.assert_allclose(found, true, rtol=2**-8, atol=lost * np.abs(true).max())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [256, 1280])
def test_a_row_has_the_same_bits_whatever_is_beside_it(bits, inputs):
    layer = linear(inputs, 32, bits, seed=inputs + bits)
    weights = layer.weight, layer.scales, layer.biases
    x = mx.random.normal((19, inputs), key=mx.random.key(1)).astype(BF16)
    other = linear(inputs, 17, bits, seed=9)  # One more than a block has.
    both = [weights, (other.weight, other.scales, other.biases), weights]
    most = few_rows.products(x, both)
    for found, each in zip(most, both, strict=True):
        near(found, exact(x, *each, bits))
    gated = few_rows.gate_and_up(x, weights, weights)
    up = exact(x, *weights, bits)
    near(gated, up / (1 + np.exp(-up)) * up)
    for rows in (slice(0, 1), slice(3, 11), slice(18, 19), slice(2, 18)):
        assert mx.array_equal(few_rows.products(x[rows], both[:1])[0], most[0][rows])
        assert mx.array_equal(few_rows.gate_and_up(x[rows], weights, weights), gated[rows])


@pytest.mark.parametrize("bits", [4, 8])
def test_experts(bits):
    """Experts of no pair, of one, and of more pairs than a block takes; and each pair alone."""
    block = SwitchGLU(256, 512, 5)
    for name, inner in (("gate_proj", 256), ("up_proj", 256), ("down_proj", 512)):
        outputs = 768 - inner
        each = [linear(inner, outputs, bits, seed) for seed in range(5)]
        block[name] = block[name].to_quantized(64, bits)
        for part in ("weight", "scales", "biases"):
            block[name][part] = mx.stack([layer[part] for layer in each])
    x = mx.random.normal((11, 256), key=mx.random.key(2)).astype(BF16)
    indices = mx.array([[3, 1]] * 9 + [[1, 4], [0, 3]])
    block.__class__ = layers.FewRowsExperts
    found = block(x, indices)
    for row, chosen in enumerate(indices.tolist()):
        for place, expert in enumerate(chosen):
            gate, up, down = (
                [block[name][part][expert] for part in ("weight", "scales", "biases")]
                for name in ("gate_proj", "up_proj", "down_proj")
            )
            g, u = exact(x[row], *gate, bits), exact(x[row], *up, bits)
            inner = mx.array(g / (1 + np.exp(-g)) * u).astype(BF16)
            # What is between the products may be rounded to the next number.
            near(found[row, place], exact(inner, *down, bits), lost=2e-3)
    assert mx.array_equal(block(x[7:8], indices[7:8]), found[7:8])


@pytest.mark.parametrize(("shared", "joins"), [(512, True), (256, False)])
def test_a_shared_expert_is_one_of_the_experts(shared, joins, monkeypatch, caplog):
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512}
    how = {"num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": True}
    args = SimpleNamespace(**sizes, **how, shared_expert_intermediate_size=shared)
    block = Qwen3NextSparseMoeBlock(args)
    block.set_dtype(BF16)
    nn.quantize(block, 64, 4)
    assert layers.use_few_rows(block, BF16)
    assert type(block.gate) is layers.FewRowsLinear, "also of a feature count that is not 16's"
    assert (type(block) is layers.FewRowsMixture) == joins
    assert "WARNING" not in caplog.text

    monkeypatch.setattr(few_rows, "_SHARED", few_rows._SHARED.replace("b_at = bI", "b_at = sI"))
    few_rows._kernel.cache_clear()
    block.__class__ = Qwen3NextSparseMoeBlock
    if joins:
        assert not layers._joins(block, BF16)
        assert "other results" in caplog.text


def test_what_fits_is_used_and_what_does_not_is_left(monkeypatch, caplog):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.ours = [linear(256, 32, 4, 0), linear(256, 1, 4, 1), linear(512, 16, 8, 2)]
            self.narrow = linear(128, 16, 4, 3)
            self.coarse = nn.QuantizedLinear(256, 32, bias=False, group_size=128)
            self.biased = nn.QuantizedLinear(256, 32, bias=True)
            self.mlp = Qwen3NextMLP(256, 256)
            for name in ("gate_proj", "up_proj", "down_proj"):
                self.mlp[name] = linear(256, 256, 4, 5)

    model = Model()
    assert layers.use_few_rows(model, BF16)
    assert [type(layer) for layer in model.ours] == [layers.FewRowsLinear] * 3
    assert type(model.mlp) is layers.FewRowsMLP
    assert "WARNING" not in caplog.text
    others = (model.narrow, model.coarse, model.biased)
    assert all(type(layer) is nn.QuantizedLinear for layer in others)
    for layer in model.ours[:2]:
        ones = mx.ones((1, 256), dtype=BF16)
        near(layer(ones[None])[0], exact(ones, layer.weight, layer.scales, layer.biases, 4))
        many = mx.ones((gpu.MOST_ROWS + 1, 256), dtype=BF16)
        assert mx.array_equal(layer(many), nn.QuantizedLinear.__call__(layer, many))
    assert not layers.use_few_rows(Model(), mx.float16), "of another type"

    monkeypatch.setattr(few_rows, "_BODY", few_rows._BODY.replace("-128.0f", "-127.0f"))
    few_rows._kernel.cache_clear()
    model = Model()
    assert not layers.use_few_rows(model, BF16)
    assert all(type(layer) is nn.QuantizedLinear for layer in model.ours)
    assert "not used" in caplog.text
