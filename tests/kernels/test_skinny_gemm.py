"""Products of few rows: the real source on an emulated GPU equals mlx's own products."""

import time
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.qwen3_next import Qwen3NextMLP, Qwen3NextSparseMoeBlock
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_mtp.kernels import gpu, skinny_gemm
from mlx_mtp.kernels.cuda import skinny_gemm as cuda_gemm
from mlx_mtp.kernels.formats import Format, Weight, weight_of
from mlx_mtp.kernels.view import to_array
from mlx_mtp.models.gemm import measure
from mlx_mtp.models.gemm.routes import BY_MLX, Routes, project, routes_of, set_routes, with_routes
from mlx_mtp.models.gemm.stacks import stack_weights
from tests.kernels import gemms
from tests.kernels.conftest import forget_kernels
from tests.support.quick import full

BF16, F16 = mx.bfloat16, mx.float16
REAL = measure._is_worth_it


pytestmark = pytest.mark.usefixtures("matrix_units")


@pytest.fixture(autouse=True)
def always_faster(monkeypatch):
    monkeypatch.setattr(measure, "_is_worth_it", lambda *_: True)
    monkeypatch.setattr(measure, "_choose_expansion", lambda *_: None)  # too slow here


AFFINE4, AFFINE8 = Format("affine", 4, 64), Format("affine", 8, 64)
PLAIN = Format("plain", 16, 64)
MX4, MX8, NV4 = Format("mxfp4", 4, 32), Format("mxfp8", 8, 32), Format("nvfp4", 4, 16)
RARE = [(2, 64), (3, 32), (3, 64), (4, 32), (4, 128), (5, 64), (6, 32), (6, 64), (8, 32)]
FORMATS = [AFFINE4, AFFINE8, MX8, NV4, PLAIN, full(MX4)]
FORMATS += [full(Format("affine", *each)) for each in RARE]


def linear(inputs, outputs, form, seed, dtype=BF16):
    weight = mx.random.normal((outputs, inputs), key=mx.random.key(seed)) * inputs**-0.5
    layer = nn.Linear(inputs, outputs, bias=False)
    layer.weight = weight.astype(dtype)
    how = {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}
    return layer if form.bits == 16 else nn.QuantizedLinear.from_linear(layer, **how)


def exact(x, weight):
    """Returns the product in float64."""
    full, (mode, bits, group_size) = weight.codes, weight.form
    if bits < 16:
        parts = [a.astype(mx.float32) if mode == "affine" else a for a in weight[1:3]]
        biases = parts[1] if mode == "affine" else None
        full = mx.dequantize(full, parts[0], biases, group_size, bits, mode)
    full, x = (np.array(a.astype(mx.float32), dtype=np.float64) for a in (full, x))
    return x @ full.swapaxes(-1, -2)


def near(ours, true, lost=2e-4):
    """Check up to half a unit in the last place of bfloat16, and the loss of sums in float32."""
    found = np.array(ours.astype(mx.float32))
    np.testing.assert_allclose(found, true, rtol=2**-8, atol=lost * np.abs(true).max())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [BF16, pytest.param(F16, marks=pytest.mark.full)])
def test_a_row_has_the_same_bits_whatever_is_beside_it(form, dtype):
    inputs = 1280 if form == AFFINE4 else 512
    weight = weight_of(linear(inputs, 32, form, seed=inputs + form.bits, dtype=dtype))
    if not cuda_gemm.applies(weight, dtype):
        assert dtype == F16 and form in (MX4, MX8, NV4)
        return
    x = mx.random.normal((19, inputs), key=mx.random.key(1)).astype(dtype)
    other = weight_of(linear(inputs, 17, form, seed=9, dtype=dtype))  # One more than a block has.
    both = [weight, other, weight]
    most = gemms.products(x, both)
    for found, each in zip(most, both, strict=True):
        near(found, exact(x, each))
    gated = gemms.gate_and_up(x, weight, weight)
    up = exact(x, weight)
    near(gated, up / (1 + np.exp(-up)) * up)
    for rows in (slice(0, 1), slice(3, 11), slice(18, 19), slice(2, 18)):
        assert mx.array_equal(gemms.products(x[rows], both)[0], most[0][rows])
        assert mx.array_equal(gemms.gate_and_up(x[rows], weight, weight), gated[rows])


@pytest.mark.parametrize("form", [MX4, MX8])
def test_scales_far_from_one(form):
    """Products are exact for all numbers, subnormal ones too, and for scales far from one."""
    layer = linear(256, 16, form, seed=0)
    codes = mx.arange(256 * 16 * form.bits // 8, dtype=mx.uint32).astype(mx.uint8)
    if form.bits == 8:
        codes = mx.where(codes % 128 == 127, 0, codes)  # not a number
    layer.weight = codes.view(mx.uint32).reshape(16, -1)
    for scale in (100, 127, 150):
        layer.scales = mx.full(layer.scales.shape, scale, dtype=mx.uint8)
        weight, x = weight_of(layer), mx.eye(256)[:64].astype(BF16)
        (found,) = gemms.products(x, [weight])
        np.testing.assert_array_equal(np.array(found.astype(mx.float32)), exact(x, weight))


@pytest.mark.parametrize(
    ("form", "many"), [(AFFINE4, 256), (AFFINE4, 3), full(AFFINE8, 256), (NV4, 256), (PLAIN, 256)]
)
def test_experts(form, many, monkeypatch):
    """Experts have no pair, one, or more than a block takes; a pair has the same bits alone."""
    monkeypatch.setattr(cuda_gemm, "_MANY_PAIRS", many)  # with more, blocks of several experts
    block = SwitchGLU(256, 512, 5)
    for name, inner in (("gate_proj", 256), ("up_proj", 256), ("down_proj", 512)):
        each = [linear(inner, 768 - inner, form, seed) for seed in range(5)]
        if form.bits < 16:
            block[name] = block[name].to_quantized(form.group_size, form.bits, form.mode)
        for part in each[0].parameters():
            block[name][part] = mx.stack([layer[part] for layer in each])
    x = mx.random.normal((11, 256), key=mx.random.key(2)).astype(BF16)
    indices = mx.array([[3, 1]] * 9 + [[1, 4], [0, 3]])
    stack_weights(block)
    set_routes(block, Routes(kernel=range(1, 20)))
    found = block(x, indices)
    whole = [weight_of(block[name]) for name in ("gate_proj", "up_proj", "down_proj")]
    for row, chosen in enumerate(indices.tolist()):
        for place, expert in enumerate(chosen):
            gate, up, down = (
                Weight(*(part[expert] for part in weight[:3]), weight.form) for weight in whole
            )
            g, u = exact(x[row], gate), exact(x[row], up)
            inner = mx.array(g / (1 + np.exp(-g)) * u).astype(BF16)
            # The values between the products can be rounded to a neighbouring number.
            near(found[row, place], exact(inner, down), lost=2e-3)
    assert mx.array_equal(block(x[7:8], indices[7:8]), found[7:8])


@pytest.mark.parametrize(("shared", "joins"), [(512, True), (256, False)])
def test_a_shared_expert_is_one_of_the_experts(shared, joins, monkeypatch, caplog):
    monkeypatch.setattr(measure, "_COMPARED", (13,))  # more take too long here
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512}
    how = {"num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": True}
    args = SimpleNamespace(**sizes, **how, shared_expert_intermediate_size=shared)
    block = Qwen3NextSparseMoeBlock(args)
    block.set_dtype(BF16)
    nn.quantize(block, 64, 4)
    assert measure.choose_routes(block, BF16)
    assert 1 in routes_of(block.gate).kernel, "also of a feature count that is not 16's"
    assert block.joins_shared == joins
    assert "WARNING" not in caplog.text

    wrong = skinny_gemm._EXPERT.replace("expert < E ? expert : PARTS * E", "expert % E")
    monkeypatch.setattr(skinny_gemm, "_EXPERT", wrong)
    forget_kernels()
    if joins:
        assert not measure._joins(block, BF16)
        assert "other results" in caplog.text


def test_what_fits_is_used_and_what_does_not_is_left(monkeypatch, caplog):
    class Model(nn.Module):
        stacked = "first", "second"

        def __init__(self):
            super().__init__()
            self.ours = [
                linear(256, 32, AFFINE4, 0),
                linear(256, 1, AFFINE4, 1),
                linear(512, 16, AFFINE8, 2),
                linear(256, 32, MX4, 3),
                linear(256, 32, PLAIN, 4),
            ]
            self.others = [
                linear(128, 16, AFFINE4, 3),
                nn.QuantizedLinear(256, 32, bias=True),
                linear(256, 32, AFFINE4, 4, F16),
                linear(256, 32, PLAIN, 5, mx.float32),
            ]
            self.first, self.second = linear(256, 32, AFFINE4, 6), linear(256, 1, AFFINE4, 7)
            self.mlp = Qwen3NextMLP(256, 256)
            for name in ("gate_proj", "up_proj", "down_proj"):
                self.mlp[name] = linear(256, 256, AFFINE4, 5)

    model = Model()
    assert measure.choose_routes(model, BF16)
    assert all(1 in routes_of(layer).kernel for layer in [*model.ours, model.mlp])
    assert "WARNING" not in caplog.text
    assert [type(layer) for layer in model.others] == [nn.QuantizedLinear] * 3 + [nn.Linear]
    for layer in model.ours:
        weight = weight_of(layer)
        ones = mx.ones((1, weight.inputs), dtype=BF16)
        near(layer(ones[None])[0], exact(ones, weight))
        many = mx.ones((gpu.MOST_ROWS + 1, weight.inputs), dtype=BF16)
        assert mx.array_equal(layer(many), with_routes(layer, BY_MLX)(many))
    together = project(ones, model.first, model.second)
    assert len(together.arrays) == 1, "they are stacked"
    for found, layer in zip(together.views(), (model.first, model.second)):
        assert mx.array_equal(to_array(found), layer(ones))

    monkeypatch.setattr(cuda_gemm, "_BODY", cuda_gemm._BODY.replace("-17 * BASE : -BASE", "0 : 0"))
    forget_kernels()
    model = Model()
    assert measure.choose_routes(model, BF16), "those that are not affine"
    assert [type(layer) for layer in model.ours[:3]] == [nn.QuantizedLinear] * 3
    assert "not used" in caplog.text


@pytest.mark.parametrize(("where", "most"), [("cuda", cuda_gemm.WORTH), ("metal", 1)])
def test_what_is_slower_is_not_used(where, most, monkeypatch, caplog):
    """CUDA's kernel can be somewhat slower, as its rows are independent; Metal's can't be.

    On CUDA our kernel always computes small weights, because they share a launch with others.
    """
    monkeypatch.setattr(measure, "SMALL", 0)
    clock, factor = [0.0], 1.0
    monkeypatch.setattr(gpu, "backend", lambda: where)

    def product(module, x):
        clock[0] += most * factor if routes_of(module).kernel else 1.0
        return x

    monkeypatch.setattr(measure, "product", product)
    monkeypatch.setattr(measure, "_problem", lambda *_: None)
    monkeypatch.setattr(measure, "_is_worth_it", REAL)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    for factor in (0.99, 1.01):
        layer = linear(256, 32, AFFINE4, 0)
        assert measure.choose_routes(layer, BF16) == (factor < 1)
        assert (type(layer) is nn.QuantizedLinear) == (factor > 1)
        monkeypatch.setattr(measure, "SMALL", 1 << 20)
        small = linear(256, 32, AFFINE4, 0)
        assert measure.choose_routes(small, BF16) == (factor < 1 or where == "cuda")
        monkeypatch.setattr(measure, "SMALL", 0)
    assert "WARNING" not in caplog.text


@pytest.mark.parametrize("form", [AFFINE4, PLAIN])
@pytest.mark.parametrize("is_large", [False, True])
def test_an_embedding_that_is_lm_head(form, is_large, monkeypatch):
    if is_large:
        monkeypatch.setattr(cuda_gemm, "_MANY_FEATURES", 40)
    inputs = 256 * (cuda_gemm._THEIR_WARPS + 1)  # with so few warps, one has two chunks
    model = nn.Module()
    model.embed_tokens = nn.Embedding(40, inputs)
    model.embed_tokens.set_dtype(BF16)
    if form.bits < 16:
        model.embed_tokens = model.embed_tokens.to_quantized(64, form.bits)
    theirs, x = type(model.embed_tokens), mx.random.normal((9, inputs)).astype(BF16)
    assert measure.choose_routes(model, BF16)
    own = model.embed_tokens
    assert 1 in routes_of(own).kernel
    near(own.as_linear(x), exact(x, weight_of(own)))
    # Nine rows of BF16 are a product of mlx, whose bits may differ.
    assert mx.array_equal(own.as_linear(x[:1]), own.as_linear(x[:8])[:1])
    assert mx.array_equal(own(mx.array([3])), theirs.__call__(own, mx.array([3])))

    model.embed_tokens.__class__ = theirs
    model.lm_head = linear(inputs, 40, form, 0)
    assert measure.choose_routes(model, BF16)
    assert type(model.embed_tokens) is theirs, "it is only looked up"
