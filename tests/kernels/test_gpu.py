"""The kernels on a real GPU, over a small grid of `python -m benchmarks.kernels`."""

from __future__ import annotations

import mlx.core as mx
import pytest

from benchmarks.kernel_checks import Variant, check_inputs, check_recurrence
from mlx_mtp.kernels import gated_delta, gpu, inputs
from mlx_mtp.kernels.self_check import Cases
from mlx_mtp.selftest.kernels import check_kernels

pytestmark = pytest.mark.skipif(
    gpu.backend() is None, reason="mlx has no GPU here: the kernels run on Metal and CUDA"
)
VARIANTS = [
    Variant(mx.float32, 1, 32),
    Variant(mx.float16, 3, 64),
    Variant(mx.bfloat16, 2, 128),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_recurrence_equals_the_portable_code(variant):
    found = check_recurrence(variant)
    assert found.ok, found
    assert found.cases > 50


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_inputs_equal_the_portable_code(variant):
    found = check_inputs(variant)
    assert found.ok, found


def test_the_kernels_are_used():
    cases = Cases(0, VARIANTS[0].shape, mx.float32)
    assert gated_delta.fits(cases.window(1, 1)[1])
    assert inputs.fits(cases.projected(1, 1), cases.convolution())


def test_the_self_test_finds_nothing():
    for check in check_kernels({"small": VARIANTS[0].shape}):
        assert check.applies and check.ok, check
