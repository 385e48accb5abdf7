"""Operations between products: the real sources on an emulated GPU equal mlx's operations."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock

from mlx_mtp.distributed import World
from mlx_mtp.kernels import gpu, norms, residual, topk
from mlx_mtp.kernels.cases import layer_cases
from mlx_mtp.kernels.row_check import of_rows
from mlx_mtp.kernels.topk import Router
from mlx_mtp.kernels.view import column_view, to_array
from mlx_mtp.models import moe
from mlx_mtp.models.loader import load_model
from mlx_mtp.selftest.kernels import check_cases
from tests.support.tiny_models import Layout, write_checkpoint

ROTATED = norms.NormShape(128, 1e-6, 3, 2, 64, 1e6, 0.5)
SHAPES = [
    (residual.SUM_NORM, norms.NormShape(96, 1e-6)),
    (residual.ADD_NORM, norms.NormShape(1056, 1e-6)),  # more than its warps compute at once
    (residual.ADD_MIX_NORM, norms.NormShape(96, 1e-5, chosen=3)),
    (residual.MIX_NORM, norms.NormShape(96, 1e-5, chosen=3)),
    (norms.GATED_NORM, norms.NormShape(64, 1e-6, 6, ratio=3)),
    (norms.GATE, norms.NormShape(96, 1e-6, 5)),
    (norms.ROTATE, ROTATED),
]


@pytest.mark.parametrize(("operation", "shape"), SHAPES, ids=lambda each: getattr(each, "name", ""))
def test_norms(emulated, operation, shape, caplog):
    """Each operation is right in both types, and a row's result does not depend on other rows."""
    assert operation.works(shape, mx.float32) and operation.works(shape, mx.bfloat16), caplog.text
    draw = np.random.default_rng(1)
    inputs = [
        mx.array(draw.standard_normal(size, dtype=np.float32) * (7 if name == "positions" else 1))
        for name, size in zip(operation.inputs, operation.sizes(shape, 3)[0], strict=True)
    ]
    if operation is residual.ADD_MIX_NORM:
        inputs[3] = inputs[3].view(mx.int32)

    alone = operation.sizes(shape, 1)
    together = operation.by_kernel(shape, *inputs)
    for row in range(3):
        only = slice(row, row + 1)
        found = operation.by_kernel(shape, *of_rows(inputs, alone[0], only))
        for a, b in zip(found, of_rows(together, alone[1], only), strict=True):
            assert mx.array_equal(a, b)


def test_a_sum_in_float32_is_rounded_once(emulated):
    """A prompt's float32 residual stream includes the shared expert, and is rounded once."""
    shape = norms.NormShape(64, 1e-6, chosen=2)
    x, weights = (mx.random.normal(size, key=mx.random.key(0)) for size in ((3, 64), (3, 2)))
    experts, weight = (mx.random.normal((n, 64), key=mx.random.key(n)) for n in (6, 1))
    inputs = 100 * x, experts.astype(mx.bfloat16), weights, weight[0].astype(mx.bfloat16)
    exact = inputs[0] + residual.add_up(inputs[1].astype(mx.float32), weights)
    for compute in (residual.MIX_NORM.by_kernel, residual.MIX_NORM.portable):
        found, normed = compute(shape, *inputs)
        assert found.dtype == normed.dtype == mx.bfloat16
        error = mx.abs(found.astype(mx.float32) - exact)
        assert (error <= mx.abs(exact) / 256 + 0.02 * (compute is residual.MIX_NORM.portable)).all()
        assert mx.abs(error / exact).mean() < 1.5e-3, "two roundings have 1.8e-3"


@pytest.mark.parametrize("rows", [3, 70])
def test_the_sum_after_attention_is_rounded(emulated, rows):
    """It is added twice, with the same bits each time: those of an array of 16 bits."""
    draw, shape = np.random.default_rng(rows), norms.NormShape(96, 1e-6, chosen=3)
    sizes = (rows, 96), (rows, 96), (rows, 96), (3 * rows, 96), (96,)
    x, attended, added, experts, weight = (
        mx.array(draw.standard_normal(size, dtype=np.float32)).astype(mx.bfloat16) for size in sizes
    )
    pairs = mx.array(draw.random((4, 3 * rows), dtype=np.float32)).view(mx.int32)
    weights, stream = topk.weights_of(pairs).reshape(rows, 3), x + attended
    (normed,) = residual.SUM_NORM.by_kernel(shape, x, attended, weight)
    zeros = mx.zeros_like(x)
    for found, expected in (
        (
            residual.ADD_MIX_NORM.by_kernel(shape, x, attended, experts, pairs, weight),
            residual.MIX_NORM.by_kernel(shape, stream, experts, weights, weight),
        ),
        (
            residual.ADD_NORM.by_kernel(shape, x, attended, added, weight),
            residual.ADD_NORM.by_kernel(shape, stream, zeros, added, weight),
        ),
        ([stream, normed], residual.ADD_NORM.by_kernel(shape, stream, zeros, zeros, weight)),
    ):
        for ours, theirs in zip(found, expected, strict=True):
            assert mx.array_equal(ours, theirs)
    share = mx.full((rows, 1), 0.5)
    found = moe._add_share(x, attended, share, added)
    assert mx.array_equal(found, stream.astype(mx.float32) + share * added)


def test_only_queries_or_entries(emulated):
    wide = mx.random.normal((3, 2000), key=mx.random.key(0))
    weights = mx.ones(128), mx.ones(128) * 2
    # Of an image's tokens they are one axis of three.
    positions = mx.array([[9, 0, 9], [9, 5, 9], [9, 70, 9]], dtype=mx.int32)[:, 1]
    places = (64, 256, 3), (192, 256, 2), (1000, 150, 2)  # of heads in a token's numbers
    q, k, v = (column_view(wide, (3,), first, step, (n, 128)) for first, step, n in places)
    assert mx.array_equal(to_array(v)[2, 1], wide[2, 1150:1278])
    true = norms._rotate(ROTATED, *map(to_array, (q, k, v)), *weights, positions)
    both = norms.rotate(ROTATED, q, [k, v], *weights, positions)
    for found, expected in zip(both, true, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert mx.array_equal(both[1][:, 1], to_array(v))
    assert mx.array_equal(norms.rotate(ROTATED, q, [], *weights, positions)[0], both[0])
    assert mx.array_equal(norms.rotate(ROTATED, None, [k, v], *weights, positions)[1], both[1])


@pytest.mark.parametrize("normalize", [True, False])
def test_router(emulated, normalize, monkeypatch):
    """Some logits are equal, and there are more pairs than a threadgroup's memory can hold."""
    monkeypatch.setattr(topk, "_NEAR_PAIRS", 512)
    kind = Router(64, 5, normalize)
    assert topk.ROUTER.works(kind, mx.float32) and topk.ROUTER.works(kind, mx.bfloat16)
    draw = np.random.default_rng(2)
    most = gpu.MOST_ROWS + 6
    logits = mx.array(draw.integers(-40, 40, (most, 64)).astype(np.float32) / 4)
    gate = mx.contiguous(logits[:, :1])
    for rows in (1, 3, most):
        inputs = logits[:rows], gate[:rows]
        found, true = topk.run_kernel(*inputs, kind), topk.portable(*inputs, kind)
        assert mx.array_equal(found.pairs[:3], true.pairs[:3])
        np.testing.assert_allclose(found.weights, true.weights, atol=1e-6)
    assert mx.array_equal(found.weights[:3], topk.run_kernel(logits[:3], gate[:3], kind).weights)
    alone = topk.choose_experts(logits, gate, kind)
    assert mx.array_equal(alone.pairs, found.pairs[2:]), "of a prompt, whose pairs are not sorted"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mixture(emulated, monkeypatch, ranks):
    """The block of router, experts and sums equals mlx-lm's."""
    monkeypatch.setattr(moe, "world", lambda: World(size=ranks))
    monkeypatch.setattr(moe, "all_reduce", lambda part: ranks * part)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    how = {"num_experts": 32, "num_experts_per_tok": 3, "norm_topk_prob": True}
    block = Qwen3NextSparseMoeBlock(SimpleNamespace(**sizes, **how))
    inputs = [mx.random.normal((5, 64), key=mx.random.key(i)) for i in range(3)]
    x, attended, normed = inputs
    weight = mx.random.normal((64,), key=mx.random.key(3))
    found = moe.add_mlp(*inputs, block, weight, 1e-6)
    true = x + attended + ranks * block(normed)
    np.testing.assert_allclose(found[0], true, atol=1e-5)
    np.testing.assert_allclose(found[1], mx.fast.rms_norm(true, weight, 1e-6), atol=1e-5)
    monkeypatch.setattr(topk, "MOST_PAIRS", 12)
    halves = moe.add_mlp(*inputs, block, weight, 1e-6)
    np.testing.assert_allclose(halves, found, atol=1e-6)
    monkeypatch.setattr(moe, "is_decode_sized", lambda _: False)
    of_prompt = moe.add_mlp(*inputs, block, weight, 1e-6)
    np.testing.assert_allclose(of_prompt, found, atol=1e-5)
    none = moe.add_mlp(*(each[:0] for each in inputs), block, weight, 1e-6)
    assert [each.shape for each in none] == [(0, 64)] * 2
    for operation in (topk.ROUTER, residual.ADD_MIX_NORM if ranks == 1 else residual.ADD_NORM):
        assert operation._works and all(operation._works.values()), "by the kernel"


def test_the_self_test_compares_them(emulated, tmp_path):
    write_checkpoint(tmp_path, Layout("qwen3_next", seed=1))
    model = load_model(tmp_path, enable_mtp=True)
    checks = check_cases("tiny", layer_cases(model.causal_lm.args, model.dtype))
    assert all(check.ok for check in checks), checks
    ours = {check.name: check.applies for check in checks}
    names = ["add norm", "gate", "gated norm", "norm rotate", "router", "sum norm"]
    names += ["add mix norm", "mix norm"]  # of a step and of a prompt
    assert sorted(ours) == sorted(f"{name} kernel / mlx" for name in names)
    assert sorted(ours.values()) == [False] * 2 + [True] * 6, "6 experts, 8 dimensions"
