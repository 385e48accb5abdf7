"""What a row's bits depend on in mlx's Metal kernels and in ours: the table in docs/exact.md.

Rows of random shapes are compared alone and beside others, in the emulator.
"""

import itertools
import os
import random
import re
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.kernels.formats import Format, weight_of
from mlx_mtp.kernels.metal import skinny_gemm
from mlx_mtp.kernels.skinny_gemm import SkinnyGemm
from tests.kernels import mlx_metal
from tests.kernels.emulator import WHY_NOT
from tests.kernels.test_skinny_gemm import exact, linear, near

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]

BF16 = mx.bfloat16
AFFINE = [Format("affine", *each) for each in itertools.product((4, 5, 6, 8), (32, 64, 128))]
OURS = [Format("affine", *each) for each in itertools.product((2, 3), (32, 64, 128))]
FP = [Format("mxfp4", 4, 32), Format("nvfp4", 4, 16), Format("mxfp8", 8, 32)]
_CASES = {"cases": 0}  # number of rows that have been compared


@pytest.fixture(scope="module")
def headers(tmp_path_factory):
    try:
        return mlx_metal.fetch(tmp_path_factory.mktemp("wheel"))
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


def product_of(
    headers, folder, form: Format, name: str, rows: int, dtype=BF16
) -> Callable[..., mx.array]:
    """Returns mlx's product by one of its functions; `rows` are those of a tile of `qmv_wide`."""
    own = "float" if dtype == mx.float32 else "bfloat16_t"
    is_affine = form.mode == "affine"
    text = (headers / ("quantized.h" if is_affine else "fp_quantized.h")).read_text()
    header = mlx_metal.part(
        text,
        "MLX_MTL_CONST int SIMD_SIZE",
        "METAL_FUNC void qvm_impl(" if is_affine else "METAL_FUNC void fp_qvm_impl(",
    )
    if not is_affine:
        header = "".join((headers / f"{n}.h").read_text() for n in ("fp8", "fp4")) + header
    wide = f", {rows}, {8 if is_affine else 16}" if name == "qmv_wide" else ""
    arrays = ["(const uint32_t*)inputs[0]"]
    kind = own if is_affine else "uint8_t"
    arrays += [f"(const {kind}*)inputs[{i}]" for i in ((1, 2) if is_affine else (1,))]
    arrays += [] if is_affine or wide else ["nullptr"]  # no global scale
    last = 3 if is_affine else 2
    arrays += [f"(const {own}*)inputs[{last}]", f"({own}*)outputs[0]"]
    numbers = ["number[4]", "number[5]"] + (["number[6]"] if wide else [])
    places = ["tid", "simd_gid", "simd_lid"]
    function = f"{'' if is_affine else 'fp_'}{name}_impl"
    call = f"{function}<{own}, {form.group_size}, {form.bits}{wide}>"
    call += f"({', '.join([*arrays, *numbers, *places])})"
    names = [f"in{i}" for i in range(last + 2)]
    kernel = mlx_metal.MlxKernel(
        folder,
        name=f"mlx_{function}",
        input_names=names,
        output_names=["y"],
        source=call,
        header=mlx_metal.as_cpp(header),
    )

    def run(x: mx.array, weight) -> mx.array:
        count, inner, outputs = len(x), weight.inputs, weight.codes.shape[0]
        per = 8 if not wide else 8 if is_affine else 4  # features of a threadgroup
        groups = (-(-count // rows) if wide else count, -(-outputs // per), 1)
        given = mx.array([1, *groups, inner, outputs, count], dtype=mx.int32)
        weights = [weight.codes, weight.scales, *([weight.biases] if is_affine else [])]
        return kernel(
            inputs=[*weights, x, given],
            template=[],
            grid=(32 * groups[0], 2 * groups[1], 1),
            threadgroup=(32, 2, 1),
            output_shapes=[(count, outputs)],
            output_dtypes=[dtype],
        )[0]

    return run


def compare(run: Callable[[mx.array], mx.array], x: mx.array, chance: random.Random) -> bool:
    """Returns True if rows have the same bits alone and among others, at random places."""
    alone = [run(row[None])[0] for row in x]
    same = True
    for _ in range(3):
        order = chance.choices(range(len(x)), k=chance.randint(1, len(x)))
        for row, found in zip(order, run(x[mx.array(order)])):
            same &= mx.array_equal(found, alone[row]).item()
            _CASES["cases"] += 1
    return same


def inputs_of(form: Format, chance: random.Random, aligned: bool, dtype=BF16):
    inner = 512 * chance.randint(1, 2) if aligned else 128 * chance.randint(3, 7)
    layer = linear(inner, 8 * chance.randint(1, 3), form, chance.randrange(99), dtype)
    x = mx.random.normal((chance.randint(2, 12), inner), key=mx.random.key(chance.randrange(99)))
    return x.astype(dtype), weight_of(layer)


@pytest.mark.parametrize("form", [*AFFINE, *FP], ids=str)
def test_products(headers, folder, form):
    """A row is independent of others in mlx's qmv and in qmv_wide, but these two differ."""
    chance, outputs = random.Random(str(form)), {}
    for name, rows in [("qmv_fast", 1), ("qmv", 1), *(("qmv_wide", n) for n in range(2, 6))]:
        run = product_of(headers, folder, form, name, rows)
        for turn in range(6):
            x, weight = inputs_of(form, random.Random(turn), aligned=name == "qmv_fast")
            assert compare(lambda x: run(x, weight), x, chance), (name, rows)  # noqa: B023
        # In float32, as rounding to 16 bits hides most differences.
        run = product_of(headers, folder, form, name, rows, mx.float32)
        x, weight = inputs_of(form, random.Random(7), aligned=True, dtype=mx.float32)
        outputs[name, rows] = run(x, weight)
        np.testing.assert_allclose(outputs[name, rows], exact(x, weight), rtol=1e-4, atol=1e-4)
    # The tiles agree with one another, and not with a single row's kernel.
    wide = [each for (name, _), each in outputs.items() if name == "qmv_wide"]
    assert all(mx.array_equal(wide[0], each).item() for each in wide)
    assert not mx.array_equal(wide[0], outputs["qmv_fast", 1]).item()


@pytest.mark.parametrize("emulated", ["metal"], indirect=True)
@pytest.mark.parametrize("form", [*OURS, *AFFINE, *FP], ids=str)
def test_our_products(emulated, form):
    """Our products are right, and have one order of sums at all numbers of rows from 1 to 64."""
    chance = random.Random(str(form))
    for turn in range(4):
        few, weight = inputs_of(form, random.Random(turn), aligned=False)
        x = mx.random.normal((64, weight.inputs), key=mx.random.key(turn)).astype(few.dtype)

        def run(x):
            return skinny_gemm.run_kernel(SkinnyGemm(x, weight, one_order=True))  # noqa: B023

        near(run(x), exact(x, weight))
        assert compare(run, x, chance)


@pytest.fixture(scope="module")
def attention(headers, folder):
    """A function that runs mlx's attention of windows, in one pass or in two with blocks."""
    text = mlx_metal.as_cpp((headers / "sdpa_vector.h").read_text())
    one = (
        "has_mask = false, query_transposed = false, do_causal = true, bool_mask = float_mask = "
        "has_sinks = false; const float scale = 0.125f; const size_t head = number[6] * 64;"
        "const size_t row = 64;"
        "static const int zero = 0; const int gqa = number[4], N = number[5];"
        "typedef const bfloat16_t* In; blocks = number[7];"
    )
    kv = "(In)inputs[0], (In)inputs[1], (In)inputs[2]"
    rest = "N, head, row, head, row, scale, nullptr, nullptr, zero, zero, zero, nullptr"
    calls = {
        "sdpa_vector": f"{one} sdpa_vector<bfloat16_t, 64>({kv}, (bfloat16_t*)outputs[0], gqa, "
        f"{rest}, zero, tid, tpg, simd_gid, simd_lid)",
        "sdpa_vector_2pass_1": f"{one} sdpa_vector_2pass_1<bfloat16_t, 64>({kv}, "
        f"(bfloat16_t*)outputs[0], (float*)outputs[1], (float*)outputs[2], {rest}, "
        "tptg, tidtg, tid, tpg, simd_lid)",
        "sdpa_vector_2pass_2": "const int blocks = number[4]; sdpa_vector_2pass_2<bfloat16_t, 64>("
        "(const bfloat16_t*)inputs[0], (const float*)inputs[1], (const float*)inputs[2], "
        "(bfloat16_t*)outputs[0], blocks, tid, tpg, simd_gid, simd_lid)",
    }
    made = {
        name: mlx_metal.MlxKernel(
            folder,
            name=f"mlx_{name}",
            input_names=["a", "b", "c", "numbers"],
            output_names=["y", "sums", "most"][: 3 if name.endswith("1") else 1],
            source=call,
            header=text,
        )
        for name, call in calls.items()
    }

    def launch(name, inputs, groups, warps, wide, numbers, outputs):
        x, y, z = groups
        return made[name](
            inputs=[*inputs, mx.array([wide, *groups, *numbers], dtype=mx.int32)],
            template=[],
            grid=(32 * x, warps * y, z),
            threadgroup=(32, warps, 1),
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )

    def run(queries, keys, values, blocks=0):
        """Causal: queries [H, T, 64] belong to the last of N keys in [KV, capacity, 64]."""
        heads, length, _ = queries.shape
        kv_heads, capacity, _ = keys.shape
        group, count = heads // kv_heads, run.keys
        numbers = [group, count, capacity, blocks]
        shape = (heads, length, 64)
        if not blocks:
            inputs = [queries, keys, values]
            return launch(
                "sdpa_vector", inputs, (heads, length, 1), 32, 32, numbers, [(shape, BF16)]
            )[0]
        outputs = [
            ((heads, length, blocks, 64), BF16),
            *[((heads, length, blocks), mx.float32)] * 2,
        ]
        parts = launch(
            "sdpa_vector_2pass_1",
            [queries, keys, values],
            (kv_heads, 1, blocks),
            group * length,
            group,
            numbers,
            outputs,
        )
        return launch(
            "sdpa_vector_2pass_2", parts, (heads, length, 1), 32, 32, [blocks], [(shape, BF16)]
        )[0]

    return run


def test_attention_of_windows(attention):
    """A query's bits depend on the function and its number of blocks, and not on other queries."""
    chance, differ = random.Random(3), 0
    for turn in range(30):
        heads, kv_heads, length = chance.choice([(2, 1, 3), (4, 2, 2), (2, 2, 4), (1, 1, 5)])
        count = chance.randint(length, 150)
        draw = [
            mx.random.normal(shape, key=mx.random.key(3 * turn + i)).astype(BF16)
            for i, shape in enumerate([(heads, length, 64), *[(kv_heads, count, 64)] * 2])
        ]
        queries, keys, values = draw
        found = {}
        for blocks in (0, 32, 64):
            attention.keys = count
            window = attention(queries, keys, values, blocks)
            for t in range(length):
                attention.keys = count - length + 1 + t
                alone = attention(queries[:, t : t + 1], keys, values, blocks)
                assert mx.array_equal(alone[:, 0], window[:, t]).item(), (blocks, t)
                _CASES["cases"] += heads
            found[blocks] = window
        differ += not mx.array_equal(found[0], found[32]).item()
        differ += not mx.array_equal(found[32], found[64]).item()
    assert differ > 30, "the number of blocks, which follows from the pass, decides bits"


# mlx's functions of rows [R, W], and their calls; T is the rows' type.
_PLACE = (
    "const uint lid = 32 * simd_gid + simd_lid, size = 32 * blockDim.y;"
    "int width = number[4]; const int rows = number[5]; const int64_t stride = width;"
    "const T* x = (const T*)inputs[0]; T* y = (T*)outputs[0];"
    "const uint3 group = {0, tid.x, 0}, groups = {1, tpg.x, 1};"
    "const uint3 lane = {lid, 0, 0}, lanes = {size, 1, 1};"
)
_OF_ROWS = {
    "softmax_single_row": "<T, float, 4>(x, y, width, tid.x, lid, ONE)",
    "softmax_looped": "<T, float, 4>(x, y, width, tid.x, lid, size, ONE)",
    "logsumexp": "<T, float, 4>(x, y, width, tid.x, lid, ONE)",
    "logsumexp_looped": "<T, float, 4>(x, y, width, tid.x, lid, size, ONE)",
    "contiguous_scan": "<T, T, Sum, 4, true, false>(x, y, width, group, groups, lane, lanes, ONE)",
    "row_reduce_simple": "<T, T, OP>(x, y, width, rows, group, groups, lane, lanes, SEVERAL)",
    "row_reduce_looped": "<T, T, OP, int, 1>(x, y, stride, 1, &rows, &stride, 1, &rows, &stride, "
    "0, group, groups, lane, lanes, SEVERAL)",
    "all_reduce": "<T, T, OP>(x, y, width, width, group, lane, lanes, LAST)",
}
_LANES = {
    "ONE": "simd_lid, simd_gid",
    "SEVERAL": "simd_lid, blockDim.y, simd_gid",
    "LAST": "blockDim.y, simd_lid, simd_gid",
}


@pytest.fixture(scope="module")
def of_rows(headers, folder):
    """`run(name, x, threads, operator)` runs one of `_OF_ROWS`, with `threads` per threadgroup."""
    names = ("softmax", "logsumexp", "reduction/reduce_row", "reduction/reduce_all")
    texts = [(headers / f"{name}.h").read_text() for name in names]
    scan, utils = ((headers / f"{name}.h").read_text() for name in ("scan", "utils"))
    texts.append(
        mlx_metal.part(scan, "template <typename T, typename U, int N_READS", "strided_scan(")
    )
    for first, last in (
        ("template <int DIM", "// Calculation"),
        ("template <typename IdxT = int64_t>\nMETAL_FUNC", "// Non templated"),
    ):
        texts.insert(0, utils[utils.index(first) : utils.index(last)])
    constants = re.findall("MTL_CONST (constexpr int .*;)", (headers / "defines.h").read_text())
    header, made = mlx_metal.as_cpp("\n".join([*constants, *texts])), {}

    def run(name: str, x: mx.array, threads: int, operator: str = "") -> mx.array:
        rows, width = x.shape
        by_four = name == "row_reduce_simple"
        kind = name, operator, x.dtype
        if kind not in made:
            own = "float" if x.dtype == mx.float32 else "bfloat16_t"
            call = _PLACE + name + _OF_ROWS[name]
            for word, meaning in {**_LANES, "OP": operator, "T": own}.items():
                call = re.sub(rf"\b{word}\b", meaning, call)
            made[kind] = mlx_metal.MlxKernel(
                folder,
                name=f"mlx_{name}",
                input_names=["x", "numbers"],
                output_names=["y"],
                source=call,
                header=header,
            )
        groups = -(-rows // 4) if by_four else rows
        return made[kind](
            inputs=[x, mx.array([1, groups, 1, 1, width, rows], dtype=mx.int32)],
            template=[],
            grid=(32 * groups, threads // 32, 1),
            threadgroup=(32, threads // 32, 1),
            output_shapes=[(rows,) if operator or "logsumexp" in name else (rows, width)],
            output_dtypes=[x.dtype],
        )[0]

    return run


def drawn(chance: random.Random, rows: int, width: int, dtype: mx.Dtype) -> mx.array:
    x = 3 * mx.random.normal((rows, width), key=mx.random.key(chance.randrange(1 << 30)))
    return x.astype(dtype)


def threads_for(width: int, reads: int = 4) -> int:
    """Returns the number of threads that mlx launches for a row, at most 1,024."""
    return min(1024, 32 * -(-width // (32 * reads)))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(
            ("softmax_single_row", "softmax_looped", "logsumexp", "logsumexp_looped"),
            (mx.float32, BF16),
        ),
        ("contiguous_scan", mx.float32),
    ],
    ids=str,
)
def test_operations_of_rows(of_rows, name, dtype):
    """Softmax, log-sum-exp and running sums of a row are independent of other rows."""
    chance = random.Random(f"{name}{dtype}")
    by_name = {"s": mx.softmax, "l": mx.logsumexp, "c": mx.cumsum}
    near = 1e-4 if dtype == mx.float32 else 0.05
    for _ in range(8):
        width = chance.randint(4097, 9000) if "looped" in name else chance.randint(1, 4096)
        x = drawn(chance, chance.randint(2, 12), width, dtype)

        def run(x):
            return of_rows(name, x, threads_for(x.shape[1]))

        expected = by_name[name[0]](x.astype(mx.float32), axis=-1)
        found = run(x).astype(mx.float32)
        np.testing.assert_allclose(found, expected, rtol=near, atol=near * width**0.5)
        assert compare(run, x, chance)


@pytest.mark.parametrize("operator", ["Sum", "Max"])
def test_reductions(of_rows, operator):
    """A row is independent of others in each function; sums can differ between the functions.

    mlx uses `all_reduce` for one row, `row_reduce_looped` below 32 rows and `row_reduce_simple`
    from 32 rows on. Up to 1,024 columns, `all_reduce` has another number of threads, so that a sum
    depends on the number of rows. Maxima do not.
    """
    chance, differ = random.Random(operator), 0
    for _ in range(20):
        width = chance.randint(*chance.choice([(65, 1024), (1025, 4096)]))
        threads = 32 if width <= 512 else 128 if width <= 1024 else threads_for(width)
        x = drawn(chance, chance.randint(4, 12), width, mx.float32)

        def run(x, name="row_reduce_looped"):
            return of_rows(name, x, threads, operator)  # noqa: B023

        looped = run(x)
        reference = {"Sum": mx.sum, "Max": mx.max}[operator](x, axis=-1)
        np.testing.assert_allclose(looped, reference, rtol=1e-4, atol=1e-3)
        assert compare(run, x, chance)
        # A row's place among the four of a threadgroup does not matter.
        simple = run(x, "row_reduce_simple")
        for row, found in zip(x, simple):
            same = run(mx.broadcast_to(row, (4, width)), "row_reduce_simple")
            assert same.tolist() == [found.item()] * 4
            _CASES["cases"] += 1
        alone = [of_rows("all_reduce", row[None], threads_for(width), operator)[0] for row in x]
        differ += not mx.array_equal(mx.stack(alone), looped).item()
    assert differ > 3 if operator == "Sum" else not differ


def test_enough_has_been_compared(request):
    """A process that runs all the tests above compares at least 10,000 rows."""
    if request.session.testscollected > 30 and "PYTEST_XDIST_WORKER" not in os.environ:
        assert _CASES["cases"] >= 10_000, _CASES
