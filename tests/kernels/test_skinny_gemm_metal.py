"""Metal's products of few rows, emulated: right, independent of other rows, used where worth it."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_mtp.kernels import skinny_gemm
from mlx_mtp.kernels.formats import Format, Weight, weight_of
from mlx_mtp.kernels.metal import skinny_gemm as metal_gemm
from mlx_mtp.kernels.skinny_gemm import SkinnyGemm
from mlx_mtp.models.gemm import measure, routes
from mlx_mtp.models.gemm.routes import BY_MLX, Routes, routes_of, with_routes
from mlx_mtp.selftest import products
from tests.kernels import gemms
from tests.kernels.conftest import forget_kernels
from tests.kernels.test_skinny_gemm import (
    AFFINE4,
    AFFINE8,
    BF16,
    MX4,
    MX8,
    NV4,
    exact,
    linear,
    near,
)
from tests.support.quick import full

ODD = [Format("affine", *each) for each in [(2, 64), (3, 32), (5, 64), (6, 64), (4, 128)]] + [MX4]
BANDS = [(slice(0, 4), slice(1, 3)), (slice(0, 13), slice(4, 9))]


@pytest.fixture(autouse=True)
def metal_body(monkeypatch):
    """Uses Metal's kernel on CUDA, too."""
    for module in (routes, measure, gemms):
        monkeypatch.setattr(module, "skinny_kernel", lambda: metal_gemm)


on_metal = pytest.mark.parametrize("emulated", ["metal"], indirect=True)
on_both = pytest.mark.parametrize(
    "emulated", ["metal", pytest.param("cuda", marks=pytest.mark.full)], indirect=True
)


@on_both
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (AFFINE4, BF16),
        (NV4, BF16),
        (Format("affine", 8, 32), mx.float32),
        full(Format("affine", 6, 32), BF16),
        full(MX8, BF16),
        *(full(form, mx.float16) for form in ODD),
    ],
)
def test_rows_are_exact_and_do_not_depend_on_others(emulated, form, dtype):
    # Some lanes have less to do, and the last threadgroup covers more features than there are.
    weight, other = (
        weight_of(linear(448 - 448 % form.group_size, 35, form, seed, dtype)) for seed in (1, 2)
    )
    x = mx.random.normal((13, weight.inputs), key=mx.random.key(1)).astype(dtype)
    gate, up = exact(x, weight), exact(x, other)
    gated = gate / (1 + np.exp(-gate)) * up
    for most, some in BANDS:
        found, found_other = gemms.products(x[most], [weight, other])
        near(found, gate[most])
        near(found_other, up[most])
        both = gemms.gate_and_up(x[most], weight, other)
        near(both, gated[most])
        assert mx.array_equal(gemms.products(x[some], [weight])[0], found[some])
        assert mx.array_equal(gemms.gate_and_up(x[some], weight, other), both[some])


@on_metal
@pytest.mark.parametrize("rows", [9, full(2), full(3), full(64)])
def test_sums_of_lanes_have_one_order_at_all_numbers_of_rows(emulated, rows):
    weight = weight_of(linear(448, 10, AFFINE4, seed=1))
    x = mx.random.normal((rows, 448), key=mx.random.key(1)).astype(BF16)
    found = metal_gemm.run_kernel(SkinnyGemm(x, weight, one_order=True))
    near(found, exact(x, weight))
    for row in (0, rows - 1):
        alone = metal_gemm.run_kernel(SkinnyGemm(x[row : row + 1], weight, one_order=True))
        assert mx.array_equal(alone[0], found[row])


@on_both
def test_many_features_have_wider_warps(emulated, monkeypatch):
    monkeypatch.setattr(metal_gemm, "_WIDE", 64)
    weight = weight_of(linear(128, 70, AFFINE4, seed=0))
    x = mx.random.normal((9, 128), key=mx.random.key(1)).astype(BF16)
    near(gemms.products(x, [weight])[0], exact(x, weight))


@on_both
def test_pairs_are_computed_by_their_experts(emulated):
    """One expert has weights of its own, one has no pair, and one has several blocks."""
    layers = [
        [linear(128, 10, AFFINE4, seed) for seed in range(start, 4 + start)] for start in (0, 9)
    ]
    routed = [
        Weight(
            *(mx.stack(part) for part in zip(*(weight_of(one)[:3] for one in each[:3]))), AFFINE4
        )
        for each in layers
    ]
    shared = [weight_of(each[3]) for each in layers]
    chosen = mx.array([0, 2, 2, 2, 2, 2, 2, 3, 3, 3], dtype=mx.int32)
    order = mx.array([1, 0, 2, 4, 6, 8, 3, 5, 7, 9], dtype=mx.int32)
    x = mx.random.normal((5, 128), key=mx.random.key(2)).astype(BF16)
    for parts in (1, 2):
        found = gemms.experts(x, routed[:parts], shared[:parts], chosen, order)
        for place, expert in zip(order.tolist(), chosen.tolist(), strict=True):
            gate, *ups = (exact(x[place // 2][None], weight_of(each[expert])) for each in layers)
            true = gate / (1 + np.exp(-gate)) * ups[0] if parts == 2 else gate
            near(found[place], true[0])


@on_metal
def test_each_band_is_used_where_it_agrees_and_is_worth_it(emulated, monkeypatch, caplog):
    def timer(launch):
        mx.eval(launch())
        return 1.0

    def measured(layer):
        model = SimpleNamespace(model=layer, output_layer=None, dtype=BF16)
        (found,) = products.measure_products(model, float("inf"), timer=timer)
        return found

    def layer(*worth):
        monkeypatch.setattr(measure, "_is_worth_it", lambda *given: given[-1] in worth)
        layer = linear(256, 32, AFFINE4, seed=0)
        measure.choose_routes(layer, BF16)
        return layer

    every = 2, 4, 5, 8, 12, 16
    for worth, ours in [
        (every, {*range(2, 17)}),
        ((2, 4), {2, 3, 4}),
        ((8, 16), {6, 7, 8, *range(13, 17)}),  # Rows between them stay refused.
        ((5,), {5}),
    ]:
        used = layer(*worth)
        assert {rows for rows in range(99) if routes_of(used).serves(rows)} == ours
        for rows in (1, 2, 4, 5, 9, 16, 17):
            x = mx.random.normal((1, rows, 256), key=mx.random.key(rows)).astype(BF16)
            if rows in ours:
                near(used(x)[0], exact(x[0], weight_of(used)))
            plain = with_routes(used, BY_MLX)(x)
            assert mx.array_equal(used(x), plain).item() != (rows in ours)
    assert "WARNING" not in caplog.text
    unused = layer()
    assert type(unused) is nn.QuantizedLinear
    assert measured(unused).problem is None
    for used in (unused, layer(4, 12)):
        assert len(measured(used).unused) == len(products.ROWS)
    assert not measured(layer(*every)).unused
    for name, right, wrong, left in (
        ("_LANES", "fma(bias, total", "fma(2 * bias, total", range(5, 17)),
        ("_MATRICES", "values[n][8 + i]", "values[n][i]", range(2, 5)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(metal_gemm, name, getattr(metal_gemm, name).replace(right, wrong))
            forget_kernels()
            assert routes_of(found := layer(*every)).kernel == left
            assert "it is off by" in measured(found).problem
        forget_kernels()
        assert "it is off by" in caplog.text
        caplog.clear()


@on_metal
@pytest.mark.parametrize(("worth", "rows"), [((1, 2, 4, 5, 6, 8), 6), ((1, 2, 4), 4)])
def test_a_mixture_has_the_same_launches_as_on_cuda(emulated, worth, rows, monkeypatch, caplog):
    monkeypatch.setattr(metal_gemm, "_MOST_TOKENS", 6)  # more would take too long here
    monkeypatch.setattr(measure, "_is_worth_it", lambda *given: given[-1] in worth)
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64}
    how = {"num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": True}
    block = Qwen3NextSparseMoeBlock(
        SimpleNamespace(**sizes, **how, shared_expert_intermediate_size=64)
    )
    block.set_dtype(BF16)
    nn.quantize(block, 64, 4)
    assert measure.choose_routes(block, BF16)
    assert block.joins_shared
    assert routes_of(block.switch_mlp) == Routes(range(1, 1 + rows))
    assert routes_of(block.shared_expert) == Routes(range(2, 1 + worth[-1]))
    x = mx.random.normal((rows, 128), key=mx.random.key(0)).astype(BF16)
    chosen = mx.array([[0, 1], [1, 2]] * (rows // 2))
    for layer, *rest in ((block.switch_mlp, chosen), (block.shared_expert,)):
        found = layer(x, *rest).astype(mx.float32)
        true = measure.in_float32(layer)(x.astype(mx.float32), *rest)
        assert mx.abs(found - true).max() < 0.02 * mx.abs(true).max()
    assert "WARNING" not in caplog.text


@on_metal
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(expert < E ? expert : PARTS * E) * N", "0"),
        ("order[first + (r)] / PAIRS", "(first + (r)) / PAIRS"),
        ("TARGET(r) order[first + (r)]", "TARGET(r) first + (r)"),
        ("&&\n           experts[first + count] == expert", ""),
    ],
)
def test_wrong_experts_are_not_used(emulated, right, wrong, spoil, monkeypatch, caplog):
    """Faults are found for few and many tokens, and for a block that continues into an expert."""
    monkeypatch.setattr(measure, "_is_worth_it", lambda *_: True)
    owner, name = (metal_gemm, "_PAIRS") if right in metal_gemm._PAIRS else (skinny_gemm, "_EXPERT")
    spoil(owner, name, right, wrong)
    block = SwitchGLU(128, 64, 9)
    block.set_dtype(BF16)
    nn.quantize(block, 64, 4)
    measure.choose_routes(block, BF16)
    # A block of one pair can't continue into another expert.
    assert not any(routes_of(block).serves(rows) for rows in (1, 9, 16, 64)[right[0] == "&" :])
    assert "not used" in caplog.text


@on_metal
@pytest.mark.parametrize(("rows", "fails"), [(None, False), (None, True), (16, False), (64, True)])
def test_experts_that_are_wrong_at_some_number_of_rows_are_not_used_there(
    emulated, rows, fails, monkeypatch, caplog
):
    """`rows` is the number that is timed, or the largest; if None, only the timing can fail."""
    run, times = metal_gemm.run_kernel, iter(range(99))

    def experts(gemm):
        if rows is None or gemm.rows != 2 * rows:
            return run(gemm)
        if fails:
            raise RuntimeError("no memory")
        return 1.1 * run(gemm)

    def timed(call, _):
        if fails and rows is None:
            raise RuntimeError("no memory")
        return None, next(times)

    monkeypatch.setattr(metal_gemm, "run_kernel", experts)
    monkeypatch.setattr(measure, "timed", timed)
    block = SwitchGLU(64, 64, 3)
    block.set_dtype(BF16)
    nn.quantize(block, 64, 4)
    measure.choose_routes(block, BF16)
    sound = set() if fails else {*range(1, 65)}
    wrong = {16: range(9, 17), 64: range(17, 65)}
    used = sound if rows is None else {*range(1, 65)} - {*wrong[rows]}
    assert {n for n in range(99) if routes_of(block).serves(n)} == used
    assert (type(block) is SwitchGLU) == (not used)
    fault = "no memory" if fails else f"at {rows} rows"
    assert (fault in caplog.text) == (len(used) < 64)


@on_both
def test_what_does_not_fit(emulated):
    fits = {
        form: metal_gemm.applies(weight_of(linear(128, 8, form, 0)), BF16)
        for form in (AFFINE8, MX8)
    }
    assert all(fits.values()) == (emulated == "metal")
    assert not metal_gemm.applies(weight_of(linear(96, 8, Format("affine", 4, 32), 0)), BF16)
