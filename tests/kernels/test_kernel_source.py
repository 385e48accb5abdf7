"""The kernels' sources must compile on backends that aren't here; `test_emulated.py` runs them."""

import re

import pytest

from mlx_mtp.kernels import gpu
from tests.kernels.conftest import KERNELS

# What mlx declares when a Metal source has the word, all of them uint3.
METAL_NAMES = {
    *("thread_position_in_grid", "thread_position_in_threadgroup", "threads_per_threadgroup"),
    *("threadgroup_position_in_grid", "threads_per_grid", "threadgroups_per_grid"),
}
METAL_ONLY = re.compile(r"\b(simd_\w+|\w+_in_(?:grid|threadgroup|simdgroup)|metal|device|half)\b")
CUDA_ONLY = re.compile(r"\b(threadIdx|blockIdx|blockDim|gridDim|__\w+|cg::\w+)")
# Common to C++ for both; anything else that is called must be made sure of first.
COMMON_CALLS = {"fma", "sqrt", "exp", "log", "fabs", "SHUFFLE_XOR"}
SYNTAX = {"if", "for", "while", "switch", "return", "static_cast", "sizeof"}


@pytest.mark.parametrize("module", KERNELS)
def test_the_body_is_common_c_of_both_backends(module):
    kernel = module._KERNEL
    body = re.sub(r"//[^\n]*", "", kernel.body)
    assert not METAL_ONLY.findall(body) and not CUDA_ONLY.findall(body)
    assert set(re.findall(r"\b([A-Za-z_]\w*)\s*\(", body)) - SYNTAX <= COMMON_CALLS
    # A double has no place on Metal.
    assert "double" not in body and not re.findall(r"\b\d+\.\d*(?![\df])", body)
    # mlx declares an array's shape and strides where it is an input and the source has the words.
    asked = re.findall(r"\b(\w+)_(?:shape|strides|ndim)\b", body)
    assert asked and set(asked) <= set(kernel.inputs)


def test_prologues_and_headers():
    names = {"lane", "grid_x", "grid_y", "grid_z"}
    for where, foreign in (("metal", CUDA_ONLY), ("cuda", METAL_ONLY)):
        prologue, header = gpu._PROLOGUES[where], gpu._HEADERS[where]
        assert not foreign.findall(prologue + header)
        assert set(re.findall(r"const int (\w+) =", prologue)) == names
        assert "#define SHUFFLE_XOR(value, other)" in header
    words = {where: re.findall(r"\b(\w+)\.[xyz]", p) for where, p in gpu._PROLOGUES.items()}
    assert set(words["metal"]) <= METAL_NAMES
    assert set(words["cuda"]) <= {"threadIdx", "blockIdx", "blockDim"}
