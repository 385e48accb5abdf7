"""The kernels' sources must compile on backends that aren't here; `test_emulated.py` runs them."""

import re

import pytest

from mlx_mtp.kernels import gpu
from tests.kernels.conftest import KERNELS

METAL_ONLY = re.compile(r"\b(simd_\w+|\w+_in_(?:grid|threadgroup|simdgroup)|metal|device|half)\b")
CUDA_ONLY = re.compile(r"\b(threadIdx|blockIdx|blockDim|gridDim|__\w+|cg::\w+)")
# Common to C++ for both; anything else that is called must be made sure of first.
CALLS = {"fma", "sqrt", "exp", "log", "fabs", "SHUFFLE_XOR", "if", "for", "return", "static_cast"}


@pytest.mark.parametrize("module", KERNELS)
def test_the_body_is_common_c_of_both_backends(module):
    body = re.sub(r"//[^\n]*", "", module._KERNEL.body)
    assert not METAL_ONLY.findall(body) and not CUDA_ONLY.findall(body)
    assert set(re.findall(r"\b([A-Za-z_]\w*)\s*\(", body)) <= CALLS
    # A double has no place on Metal.
    assert "double" not in body and not re.findall(r"\b\d+\.\d*(?![\df])", body)


def test_prologues_and_headers_are_of_their_backend():
    for where, foreign in (("metal", CUDA_ONLY), ("cuda", METAL_ONLY)):
        assert not foreign.findall(gpu._PROLOGUES[where] + gpu._HEADERS[where])
