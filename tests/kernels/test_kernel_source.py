"""The kernels' sources: what mlx generates from them must compile on backends that aren't here.

`test_emulated.py` runs them.
"""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.kernels import gated_delta, gpu
from mlx_mtp.kernels.self_check import Cases
from mlx_mtp.kernels.window import Pending, Shape
from tests.kernels.conftest import KERNELS

SMALL = Shape(2, 32, 4, 8)
# What mlx declares when a Metal source has the word, all of them uint3.
METAL_NAMES = {
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threads_per_threadgroup",
    "threads_per_grid",
    "threadgroups_per_grid",
}
METAL_ONLY = re.compile(r"\b(simd_\w+|\w+_in_(?:grid|threadgroup|simdgroup)|metal|device|half)\b")
CUDA_ONLY = re.compile(r"\b(threadIdx|blockIdx|blockDim|gridDim|__\w+|cg::\w+)")
# Common to C++ for both; anything else that is called must be made sure of first.
COMMON_CALLS = {"fma", "sqrt", "exp", "log", "fabs", "SHUFFLE_XOR"}
SYNTAX = {"if", "for", "while", "switch", "return", "static_cast", "sizeof"}


def launches(module):
    """How a module launches its kernel: what mlx is given, for each way to call it."""
    found = []

    def record(kernel, inputs, template, grid, outputs):
        found.append((kernel, inputs, template, grid, outputs))
        return [mx.zeros(shape, dtype=kind) for shape, kind in outputs]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu.Kernel, "__call__", record)
        patched.setattr(gpu.Kernel, "works", lambda *_: True)
        cases = Cases(0, SMALL, mx.float32)
        rows, length = 2, 3
        if module is gated_delta:
            q, window = cases.window(rows, length)
            kept = cases.counts(rows, length)
            state = cases.state(rows)
            _, _, delta = module.launch(q, window, state, None, None)
            pending = Pending(window.k, delta, window.g)
            module.launch(q, window, state, pending, kept)
            module.launch(q, window, state, pending, kept, kept)
            module.fold(pending, kept, state)
        else:
            args = cases.projected(rows, length), cases.convolution()
            module.launch(*args, cases.history(rows, 0), None)
            module.launch(*args, cases.history(rows, 2), cases.counts(rows, 2))
    return found


def without_comments(source):
    return re.sub(r"//[^\n]*", "", source)


@pytest.mark.parametrize("module", KERNELS)
def test_the_body_is_common_c_of_both_backends(module):
    body = without_comments(module._KERNEL.body)
    for where in ("metal", "cuda"):
        source = gpu._PROLOGUES[where] + module._KERNEL.body
        assert source.endswith(module._KERNEL.body) and source.count("grid_y =") == 1
    assert not METAL_ONLY.findall(body) and not CUDA_ONLY.findall(body)
    called = set(re.findall(r"\b([A-Za-z_]\w*)\s*\(", body)) - SYNTAX
    assert called <= COMMON_CALLS
    for first, last in ("{}", "()", "[]"):
        assert body.count(first) == body.count(last)
    # A double has no place on Metal.
    assert "double" not in body and not re.findall(r"\b\d+\.\d*(?![\df])", body)


@pytest.mark.parametrize("module", KERNELS)
def test_every_array_is_used_with_shapes_and_strides_of_inputs_alone(module):
    kernel = module._KERNEL
    body = without_comments(kernel.body)
    assert not set(kernel.inputs) & set(kernel.outputs)
    for name in (*kernel.inputs, *kernel.outputs):
        assert re.search(rf"\b{name}\b", body), name
    for name in kernel.outputs:
        # Written to, perhaps through a pointer made of it.
        assert re.search(rf"\b{name}\b(\[[^=;]*\] =[^=]|[^;=]*[+)] )", body), name
    asked = re.findall(r"\b(\w+)_(?:shape|strides|ndim)\b", body)
    assert asked and set(asked) <= set(kernel.inputs)


@pytest.mark.parametrize("module", KERNELS)
def test_launches_give_what_the_body_takes(module):
    body = without_comments(module._KERNEL.body)
    local = set(re.findall(r"\b(?:int|float|bool|auto)\s+([A-Z]\w*)\b", body))
    constants = set(re.findall(r"\b([A-Z]\w*)\b", body)) - local - COMMON_CALLS
    for kernel, given, template, (x, y, z), outputs in launches(module):
        names = [name for name, _ in template]
        assert set(names) == constants and len(names) == len(constants)
        # What mlx takes: a type, a truth value or an int.
        assert all(isinstance(value, bool | int | mx.Dtype) for _, value in template)
        assert len(outputs) == len(kernel.outputs)
        assert min(x, y, z) >= 1
        # The x of a group is one warp, which the body takes for granted.
        assert gpu.LANES * min(gpu._WARPS, y) <= 1024
        arrays = dict(zip(kernel.inputs, given, strict=True))
        mx.eval(given)
        for name, array in arrays.items():
            # A fold runs no position, and so reads nothing of its window.
            unread = name in ("g", "beta") and not int(arrays["lengths"].max())
            if f"{name}_strides" in body or unread:
                continue
            # The body indexes it as if it were contiguous.
            expected = np.zeros(array.shape, dtype=np.uint8).strides
            real = tuple(s // array.dtype.size for s in memoryview(array).strides)
            assert real == expected, name


def test_prologues_and_headers():
    names = {"lane", "grid_x", "grid_y", "grid_z"}
    for where, foreign in (("metal", CUDA_ONLY), ("cuda", METAL_ONLY)):
        prologue, header = gpu._PROLOGUES[where], gpu._HEADERS[where]
        assert not foreign.findall(prologue + header)
        assert set(re.findall(r"const int (\w+) =", prologue)) == names
        assert "#define SHUFFLE_XOR(value, other)" in header
    words = set(re.findall(r"\b(\w+)\.[xyz]", gpu._PROLOGUES["metal"]))
    assert words <= METAL_NAMES
    assert set(re.findall(r"\b(\w+)\.[xyz]", gpu._PROLOGUES["cuda"])) <= {
        *("threadIdx", "blockIdx", "blockDim"),
    }
