"""The kernels on a real GPU, over a small grid of `python -m benchmarks.kernels`."""

import mlx.core as mx
import pytest

from benchmarks.kernel_checks import Variant, check_inputs, check_recurrence
from mlx_mtp.kernels import gated_delta, gpu, inputs
from mlx_mtp.kernels.self_check import Cases
from mlx_mtp.selftest.kernels import check_kernels

pytestmark = pytest.mark.skipif(
    gpu.backend() is None, reason="mlx has no GPU here: the kernels run on Metal and CUDA"
)
_SIZES = [(mx.float32, 1, 32), (mx.float16, 3, 64), (mx.bfloat16, 2, 128)]


@pytest.mark.parametrize("variant", [Variant(*sizes) for sizes in _SIZES], ids=str)
def test_the_kernels_are_used_and_equal_the_portable_code(variant):
    cases = Cases(0, variant.shape, variant.dtype)
    assert gated_delta.fits(cases.window(1, 1)[1])
    assert inputs.fits(cases.projected(1, 1), cases.convolution())
    for found in (check_recurrence(variant), check_inputs(variant)):
        assert found.ok, found
    assert all(c.applies and c.ok for c in check_kernels({"small": variant.shape}))
