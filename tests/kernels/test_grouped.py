"""Experts of prompts, and expanded weights: the real sources on an emulated GPU."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_mtp.kernels.cuda import dequantize, grouped_gemm
from mlx_mtp.kernels.formats import Format, weight_of
from mlx_mtp.kernels.gpu import MOST_ROWS
from mlx_mtp.models.gemm.routes import Routes, set_routes
from tests.kernels.test_skinny_gemm import BF16, exact, linear, near
from tests.support.quick import full

pytestmark = pytest.mark.usefixtures("matrix_units")

AFFINE4 = Format("affine", 4, 64)


@pytest.mark.parametrize("spread", [0.0, full(1.0), 9.0])
def test_experts_of_a_prompt(monkeypatch, spread):
    """Tokens are routed evenly, to some experts more often, or nearly all to two experts."""
    rows = MOST_ROWS + 2
    launched, real = [], grouped_gemm.swiglu
    monkeypatch.setattr(grouped_gemm, "swiglu", lambda *a: launched.append(len(a[0])) or real(*a))
    block, single = SwitchGLU(256, 512, 7), [[] for _ in range(7)]
    for name, inner in (("gate_proj", 256), ("up_proj", 256), ("down_proj", 512)):
        each = [linear(inner, 768 - inner, AFFINE4, seed) for seed in range(7)]
        block[name] = block[name].to_quantized(64, 4)
        for part in each[0].parameters():
            block[name][part] = mx.stack([layer[part] for layer in each])
        for expert, layer in zip(single, each, strict=True):
            expert.append(weight_of(layer))
    assert all(grouped_gemm.applies(weight_of(block[name])) for name in ("gate_proj", "down_proj"))
    x = mx.random.normal((rows, 256), key=mx.random.key(2)).astype(BF16)
    drawn = mx.random.gumbel((rows, 7), key=mx.random.key(3)) - spread * mx.arange(7)
    indices = mx.argsort(-drawn, axis=-1)[:, :2].astype(mx.int32)
    set_routes(block, Routes(kernel=range(1, 65), expand_from=rows - 1))
    found = block(x, indices)
    first = indices[:, :1]  # not contiguous
    assert mx.array_equal(block(x, first), block(x, mx.contiguous(first)))
    for row, chosen in enumerate(indices.tolist()):
        for place, expert in enumerate(chosen):
            gate, up, down = single[expert]
            g, u = exact(x[row], gate), exact(x[row], up)
            inner = mx.array(g / (1 + np.exp(-g)) * u).astype(BF16)
            near(found[row, place], exact(inner, down), lost=1e-2)  # Weights are rounded.
    fewer = block(x[: rows - 1], indices[: rows - 1])
    assert mx.array_equal(fewer, found[: rows - 1]), "a row depends on the others"
    assert launched == [rows, rows, rows, rows - 1]


_SIZES = [(1, 1), (64, 1), (65, 2), (1000, 7), (513, 64), (3, 64)]


@pytest.mark.parametrize(("pairs", "experts"), _SIZES)
@pytest.mark.parametrize("spread", [1, 5, 0])  # evenly, to the first ones, all to the last one
def test_pairs_are_cut_into_blocks_of_an_expert(pairs, experts, spread):
    drawn = np.random.default_rng(pairs).random(pairs) ** spread * experts
    chosen = np.minimum(drawn, experts - 1).astype(np.int32)
    strided = mx.array(np.stack([chosen, chosen + 1], axis=1))[:, 0]
    order, blocks = map(np.array, grouped_gemm._sort(strided, experts))
    assert [*np.sort(order)] == [*range(pairs)]
    assert all(0 <= count <= 64 for _, _, count in blocks)
    found = [(expert, order[first : first + count]) for expert, first, count in blocks]
    assert [*np.concatenate([own for _, own in found])] == [*order]
    assert all((chosen[own] == expert).all() for expert, own in found)


@pytest.mark.parametrize("bits", [4, 8])
def test_expanded_weights(bits):
    """The width is no multiple of a warp's."""
    weight = weight_of(linear(320, 7, Format("affine", bits, 64), seed=4))
    found = dequantize.expanded(*weight[:3], 64, bits)
    near(found, exact(mx.eye(320, dtype=BF16), weight).T)
