"""Every operation: its kernels agree with the reference, and a wrong body is found and not used."""

import mlx.core as mx
import pytest

from mlx_mtp.kernels import (
    cases,
    gated_delta,
    gated_delta_step,
    gpu,
    norms,
    residual,
    short_conv,
    topk,
)
from mlx_mtp.kernels.cases import KernelCase
from mlx_mtp.kernels.cuda import (
    decode_attention,
    flash_attention,
    gated_delta_chunks,
    gated_delta_prepare,
    mma,
)
from mlx_mtp.kernels.gdn_types import GDNShape
from mlx_mtp.kernels.metal import window_attention
from mlx_mtp.selftest.kernels import check_cases
from tests.kernels.conftest import OBJECTS
from tests.support.quick import full

F32, BF16 = mx.float32, mx.bfloat16
GATED_DELTA = KernelCase(gated_delta.GATED_DELTA, GDNShape(2, 32, 4, 32), F32)
SHORT_CONV = GATED_DELTA._replace(operation=short_conv.SHORT_CONV)
STEP = GATED_DELTA._replace(operation=gated_delta_step.GATED_DELTA_STEP)
CHUNKS = KernelCase(gated_delta_chunks.GATED_DELTA_CHUNKS, GDNShape(2, 64, 4, 32), BF16)
ROUTER = KernelCase(topk.ROUTER, topk.Router(64, 5, True), F32)
SUM_NORM = KernelCase(residual.SUM_NORM, norms.NormShape(96, 1e-6), BF16)
ADD_NORM = KernelCase(residual.ADD_NORM, norms.NormShape(288, 1e-6), F32)
ADD_MIX_NORM = KernelCase(residual.ADD_MIX_NORM, norms.NormShape(96, 1e-5, chosen=3), BF16)
MIX_NORM = KernelCase(residual.MIX_NORM, norms.NormShape(96, 1e-5, chosen=3), BF16)
GATED_NORM = KernelCase(norms.GATED_NORM, norms.NormShape(64, 1e-6, 6, ratio=3), BF16)
GATE = KernelCase(norms.GATE, norms.NormShape(96, 1e-6, 3), BF16)
ROTATE = KernelCase(norms.ROTATE, norms.NormShape(128, 1e-6, 3, 2, 64, 1e6, 0.5), F32)
WINDOWS = KernelCase(decode_attention.WINDOW_ATTENTION, (4, 1, 128), BF16)
FLASH = KernelCase(flash_attention.FLASH_ATTENTION, (2, 1, flash_attention.DIM), BF16)
BLOCKS = KernelCase(window_attention.BLOCK_ATTENTION, (4, 1, 128), BF16)
SMALL = [
    GATED_DELTA,
    SHORT_CONV,
    STEP,
    CHUNKS,
    ROUTER,
    SUM_NORM,
    ADD_NORM,
    ADD_MIX_NORM,
    MIX_NORM,
    GATED_NORM,
    GATE,
    ROTATE,
]

# Case, owner of a part of the source, a right text in it, and a wrong one.
QUICK = [
    # The state is not decayed.
    (GATED_DELTA, gated_delta, "(key[i], d, s[r][i] * decay)", "(key[i], d, s[r][i])"),
    (SHORT_CONV, short_conv.KERNEL, "+ num_kept[b]) * C", ") * C"),
    (STEP, gated_delta_step, "hv % (Hv / Hk) * Z_BY2", "0"),
    # Missing barriers are found, too.
    (STEP, gated_delta_step, "    BARRIER;\n    for (int t = warp", "    for (int t = warp"),
    (CHUNKS, gated_delta_chunks, "exp(last - sums[row])", "1.0f"),
    (CHUNKS, gated_delta_chunks, "__syncthreads();\n\n      float d[4]", "\n      float d[4]"),
    (CHUNKS, gated_delta_prepare, "__syncthreads();\n    T* const so", "\n    T* const so"),
    # Wrong only for prompts: their router has several groups, and their norms fewer warps per row.
    (ROUTER, topk.KERNEL, "row = grid_x * warps + warp", "row = warp"),
    (ADD_NORM, residual.ADD_NORM.kernel, "squares / DIM", "squares / (WARPS == 8 ? 1 : DIM)"),
    (ADD_NORM, residual.ADD_NORM.kernel, "attended[row * DIM + c]", "added[row * DIM + c]"),
    (ADD_MIX_NORM, residual.ADD_MIX_NORM.kernel, "attended[row * DIM + c]", "attended[c]"),
    (ROTATE, norms.ROTATE.kernel, "token * V_BY0", "0"),
    (ROTATE, norms.ROTATE.kernel, "(own - KEYS) * V_BY1", "0"),
    (FLASH, flash_attention, "i % 2 > first", "i % 2 >= first"),
]
OTHERS = [
    (STEP, gated_delta_step, "    BARRIER;\n    if (!ADVANCE)", "    if (!ADVANCE)"),
    (STEP, gated_delta_step, "num_folded", "num_kept"),
    (STEP, gated_delta_step, "(is_value || keeps_key)", "keeps_key"),
    (GATED_DELTA, gated_delta, "t < num_kept[b]", "t < num_kept[b] - 1"),
    (GATED_DELTA, gated_delta, "const int hk = hv / (Hv / Hk);", "const int hk = 0;"),
    (GATED_DELTA, gated_delta, "ADVANCE ? lengths[b] : length", "length"),
    (SHORT_CONV, short_conv.KERNEL, "(first + t) * B_BY0", "t * B_BY0"),
    (SHORT_CONV, short_conv.KERNEL, "is_value ? own % (Hv / Hk) : 0;", "0;"),
    (WINDOWS, decode_attention, "lane + 32 * i <= own ?", "lane + 32 * i < own ?"),
    (WINDOWS, decode_attention, "(stats[2 * from] - most) * SCALE", "0.0f"),
    (WINDOWS, decode_attention, "int end = pos", "int end = pos[0] + pos"),
    (BLOCKS, window_attention, "sum *= kept", "sum *= 1.0f + 0.0f * kept"),
    (BLOCKS, window_attention, "int end = positions[token] + 1", "int end = positions[token]"),
    (FLASH, flash_attention, "(lane ^ warp) % 8", "lane % 8"),
    (FLASH, flash_attention, "BLOCK * 128, 1024", "1024, BLOCK * 128"),
    (FLASH, flash_attention, "(long long)min(first + 8 * i + warp, last)", "0"),
    (FLASH, flash_attention, "o[i] *= factor", "o[i] *= 1.0f + 0.0f * factor"),
    (FLASH, flash_attention, "block % 3", "block % 2"),
    (
        FLASH,
        flash_attention,
        "if (block + 2 < blocks) load_keys(block + 2)",
        "load_keys(block + 1)",
    ),
    (FLASH, flash_attention, "meet();\n      if", "if"),
    (FLASH, flash_attention, "wait_products<1>", "wait_products<2>"),
    (FLASH, flash_attention, "wait<0>(), publish()", "wait<1>(), publish()"),
    (FLASH, mma, "1u << 30", "1u << 31"),
    (FLASH, mma, "down >> 4", "down >> 3"),
]


@pytest.mark.parametrize(
    ("case", "owner", "right", "wrong"),
    [*QUICK, *(full(*row) for row in OTHERS)],
)
def test_a_wrong_body_is_found_and_not_used(matrix_units, spoil, caplog, case, owner, right, wrong):
    """A wrong body is also found if the operation is compared within a decode step."""
    names = "body", "_BODY", "_PART", "_PIECES", "_ADD", "_LOAD", "MATRIX"
    spoil(owner, next(name for name in names if right in getattr(owner, name, "")), right, wrong)
    with gpu.decode_pass(case is ADD_NORM):
        assert not case.operation.works(case.shape, case.dtype)
    assert "slower code is used" in caplog.text


@pytest.mark.parametrize(
    "case", [*SMALL, FLASH, *map(full, (WINDOWS, BLOCKS))], ids=lambda c: c.operation.name
)
def test_right_bodies_are_used(matrix_units, case, caplog):
    """Right bodies are used in each type, and pass the self-test; attention has its own tests."""
    others = {CHUNKS: (BF16, mx.float16), FLASH: (), WINDOWS: (), BLOCKS: ()}
    dtypes = others.get(case, (F32, BF16))
    (check,) = check_cases("small", [case])
    assert check.ok and check.applies and check.difference < gpu.TOLERANCE
    assert (check.difference > 0) != (case is STEP), "a step's has the bits of its parts"
    for dtype in dtypes:
        assert case.operation.works(case.shape, dtype), caplog.text


def test_every_operation_is_a_case():
    operations = {id(each) for each in OBJECTS if isinstance(each, gpu.Operation)}
    assert operations == {id(each) for each in cases.OPERATIONS}
    assert {id(case.operation) for case in [*SMALL, WINDOWS, BLOCKS, FLASH]} == operations
