"""The kernels' sources: what mlx generates from them must compile on backends that aren't here.

On Linux the same sources also run, on an emulated GPU (see `emulator.py`).
"""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.kernels import (
    chunkwise,
    gated_delta,
    gated_delta_kernel,
    gpu,
    inputs,
    inputs_kernel,
    portable_inputs,
    self_check,
)
from mlx_mtp.kernels.window import Pending, Projected
from mlx_mtp.selftest.cases import Cases, Shape
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

    def record(kernel, inputs, template, grid, warps, outputs):
        found.append((kernel, inputs, template, grid, warps, outputs))
        return [mx.zeros(shape, dtype=kind) for shape, kind in outputs]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu.Kernel, "__call__", record)
        cases = Cases(0, SMALL, mx.float32)
        rows, length = 2, 3
        if module is gated_delta_kernel:
            q, window = cases.window(rows, length)
            kept = cases.counts(rows, length)
            state = cases.state(rows)
            _, _, pending = module.fold_and_verify(q, window, state, None, None)
            module.fold_and_verify(q, window, state, pending, kept)
            module.fold_and_advance(q, window, state, pending, kept, kept)
            module.fold(pending, kept, state)
        else:
            args = cases.projected(rows, length), cases.convolution()
            module.prepare(*args, cases.history(rows, 0), None)
            module.prepare(*args, cases.history(rows, 2), cases.counts(rows, 2))
    return found


def without_comments(source):
    return re.sub(r"//[^\n]*", "", source)


@pytest.mark.parametrize("module", KERNELS)
class TestRules:
    def test_one_body_for_both(self, module):
        body = module._KERNEL.body
        for where in ("metal", "cuda"):
            assert gpu.source(body, where).endswith(body)
            assert gpu.source(body, where).count("grid_y =") == 1

    def test_the_body_names_neither_backend(self, module):
        body = without_comments(module._KERNEL.body)
        assert not METAL_ONLY.findall(body)
        assert not CUDA_ONLY.findall(body)

    def test_only_functions_of_both_are_called(self, module):
        body = without_comments(module._KERNEL.body)
        called = set(re.findall(r"\b([A-Za-z_]\w*)\s*\(", body)) - SYNTAX
        assert called <= COMMON_CALLS

    def test_braces_close(self, module):
        body = without_comments(module._KERNEL.body)
        for first, last in ("{}", "()", "[]"):
            assert body.count(first) == body.count(last)

    def test_literals_are_float32(self, module):
        # A double has no place on Metal.
        body = without_comments(module._KERNEL.body)
        assert not re.findall(r"\b\d+\.\d*(?![\df])", body)
        assert "double" not in body

    def test_every_array_is_used(self, module):
        kernel = module._KERNEL
        body = without_comments(kernel.body)
        assert not set(kernel.inputs) & set(kernel.outputs)
        for name in (*kernel.inputs, *kernel.outputs):
            assert re.search(rf"\b{name}\b", body), name
        for name in kernel.outputs:
            # Written to, perhaps through a pointer made of it.
            assert re.search(rf"\b{name}\b(\[[^=;]*\] =[^=]|[^;=]*[+)] )", body), name

    def test_shapes_and_strides_are_of_inputs(self, module):
        kernel = module._KERNEL
        asked = re.findall(r"\b(\w+)_(?:shape|strides|ndim)\b", without_comments(kernel.body))
        assert asked and set(asked) <= set(kernel.inputs)

    def test_inputs_without_strides_are_contiguous(self, module):
        """Those that the body indexes as if they were, of all that the launches give it."""
        body = module._KERNEL.body
        for kernel, given, _, _, _, _ in launches(module):
            arrays = dict(zip(kernel.inputs, given, strict=True))
            mx.eval(given)
            for name, array in arrays.items():
                # A fold runs no position, and so reads nothing of its window.
                unread = name in ("g", "beta") and not int(arrays["lengths"].max())
                if f"{name}_strides" in body or unread:
                    continue
                expected = np.zeros(array.shape, dtype=np.uint8).strides
                real = tuple(s // array.dtype.size for s in memoryview(array).strides)
                assert real == expected, name

    def test_template_and_outputs(self, module):
        body = without_comments(module._KERNEL.body)
        local = set(re.findall(r"\b(?:int|float|bool|auto)\s+([A-Z]\w*)\b", body))
        used = set(re.findall(r"\b([A-Z]\w*)\b", body)) - local - COMMON_CALLS
        for kernel, given, template, _, _, outputs in launches(module):
            names = [name for name, _ in template]
            assert set(names) == used and len(names) == len(used)
            assert len(given) == len(kernel.inputs)
            assert len(outputs) == len(kernel.outputs)
            for _, value in template:
                # What mlx takes: a type, a truth value or an int.
                assert isinstance(value, bool | int | mx.Dtype)

    def test_groups(self, module):
        for _, _, _, (x, y, z), warps, _ in launches(module):
            assert min(x, y, z) >= 1
            group = gpu.LANES * min(warps, y)
            assert group <= 1024 and group % gpu.LANES == 0
            # The x of a group is one warp, which the body takes for granted.
            assert (gpu.LANES * x) % gpu.LANES == 0


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


def close(ours, true, tolerance=2e-5):
    """Equal up to an order of sums, and a step or two of a coarse type."""
    for a, b in zip(ours, true, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        relative = 2e-2 if a.dtype == mx.bfloat16 else tolerance
        left, right = (np.array(x.astype(mx.float32)) for x in (a, b))
        np.testing.assert_allclose(left, right, rtol=relative, atol=relative)


def spread(array, axis):
    """The same values with gaps between them along an axis; the last one stays dense."""
    wide = mx.repeat(array, 2, axis=axis)
    index = [slice(None)] * array.ndim
    index[axis] = slice(None, None, 2)
    return wide[tuple(index)]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_check_before_first_use_passes(emulated, dtype):
    q, window = Cases(0, SMALL, dtype).window(1, 1)
    assert gated_delta_kernel.fits(window)
    cases = Cases(0, Shape(1, 32, 2, 32), dtype)
    assert inputs_kernel.fits(cases.projected(1, 1), cases.convolution())


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (SMALL, mx.float32),
        (SMALL, mx.bfloat16),
        (Shape(1, 64, 3, 6), mx.float32),
        (Shape(3, 32, 3, 5), mx.float32),
    ],
)
def test_windows_in_a_row(emulated, shape, dtype):
    """Ragged parts of windows of many lengths, through the functions that the caches call."""
    cases = Cases(3, shape, dtype)
    rows = 3
    state = true_state = cases.state(rows)
    pending = true_pending = kept = None
    assert gated_delta_kernel.fits(cases.window(1, 1)[1])
    for length in (1, 4, 2, 9, 1):
        q, window = cases.window(rows, length)
        y, state, pending = gated_delta.fold_and_verify(q, window, state, pending, kept)
        if true_pending is not None:
            true_state = chunkwise.fold(true_pending, kept, true_state)
        true_y, _, true_pending = chunkwise.run(q, window, true_state, advance=False)
        close([y, state, pending.delta], [true_y, true_state, true_pending.delta])
        kept = cases.counts(rows, length)
    lengths = cases.counts(rows, 6)
    q, window = cases.window(rows, 6)
    y, after = gated_delta.fold_and_advance(q, window, state, pending, kept, lengths)
    folded = gated_delta.fold(pending, kept, state)
    true_state = chunkwise.fold(true_pending, kept, true_state)
    true_y, true_after, _ = chunkwise.run(q, window.cut(lengths), true_state)
    close([folded, after], [true_state, true_after])
    kept_rows = np.arange(6) < np.array(lengths)[:, None]
    y, true_y = (np.array(a.astype(mx.float32)) for a in (y, true_y))
    np.testing.assert_allclose(y[kept_rows], true_y[kept_rows], rtol=2e-2, atol=2e-2)
    # What other rows may meet through masked attention is a number.
    assert (y[~kept_rows] == 0).all()


def test_queries_keys_and_values_may_be_slices(emulated):
    cases = Cases(4, SMALL, mx.float32)
    q, window = cases.window(2, 3)
    state, kept = cases.state(2), mx.array([1, 3])
    _, _, pending = chunkwise.run(q, window, state)
    expected = gated_delta_kernel.fold_and_verify(q, window, state, pending, kept)
    for axis in (0, 1, 2):
        sliced = window._replace(k=spread(window.k, axis), v=spread(window.v, axis))
        before = Pending(spread(pending.k, axis), pending.delta, pending.g)
        given = (spread(q, axis), sliced, state, before, kept)
        found = gated_delta_kernel.fold_and_verify(*given)
        for a, b in ((found[0], expected[0]), (found[1], expected[1])):
            np.testing.assert_array_equal(np.array(a), np.array(b))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (Shape(2, 32, 4, 64, 4), mx.float32),
        (Shape(1, 64, 3, 32, 2), mx.float32),
        (Shape(2, 32, 2, 32, 4), mx.bfloat16),
    ],
)
def test_inputs_of_windows_in_a_row(emulated, shape, dtype):
    cases = Cases(5, shape, dtype)
    rows = 3
    convolution = cases.convolution()
    history = true_history = cases.history(rows, 0)
    kept = None
    assert inputs_kernel.fits(cases.projected(1, 1), convolution)
    for length in (1, 3, 9, 2):
        projected = cases.projected(rows, length)
        q, window, history = inputs.prepare(projected, convolution, history, kept)
        true_q, true_window, true_history = portable_inputs.prepare(
            projected, convolution, true_history, kept
        )
        close([q, *window], [true_q, *true_window])
        np.testing.assert_array_equal(
            np.array(history.astype(mx.float32)), np.array(true_history.astype(mx.float32))
        )
        kept = cases.counts(rows, length)


def test_projections_may_be_slices(emulated):
    cases = Cases(6, Shape(2, 32, 4, 32), mx.float32)
    projected, convolution = cases.projected(2, 3), cases.convolution()
    history = cases.history(2, 0)
    q, window, _ = inputs_kernel.prepare(projected, convolution, history, None)
    for axis in (0, 1, 2):
        sliced = Projected(*(spread(a, axis) for a in projected))
        again, found, _ = inputs_kernel.prepare(sliced, convolution, history, None)
        for a, b in zip((again, *found), (q, *window), strict=True):
            np.testing.assert_array_equal(np.array(a), np.array(b))


@pytest.mark.parametrize(
    ("module", "right", "wrong"),
    [
        # The previous window is not forgotten at its own rate.
        (gated_delta_kernel, "fma(key[i], d, s[r][i] * decay)", "fma(key[i], d, s[r][i])"),
        (gated_delta_kernel, "t < num_kept[b]", "t < num_kept[b] - 1"),
        (gated_delta_kernel, "const int hk = hv / (Hv / Hk);", "const int hk = 0;"),
        (gated_delta_kernel, "int other = 16; other > 0", "int other = 16; other > 1"),
        (gated_delta_kernel, "if (t >= valid) {", "if (false) {"),
        (inputs_kernel, "+ num_kept[b]) * C", ") * C"),
        (inputs_kernel, "const int in_hk = is_value ? own % (Hv / Hk) : 0;", "int in_hk = 0;"),
        (inputs_kernel, "log(w) * u / (w - 1.0f)", "0.0f"),
    ],
)
def test_a_wrong_body_is_found_and_not_used(emulated, monkeypatch, caplog, module, right, wrong):
    body = module._KERNEL.body
    assert right in body
    monkeypatch.setattr(module._KERNEL, "body", body.replace(right, wrong, 1))
    cases = Cases(0, Shape(2, 32, 4, 32), mx.float32)
    if module is gated_delta_kernel:
        assert not module.fits(cases.window(1, 1)[1])
    else:
        assert not module.fits(cases.projected(1, 1), cases.convolution())
    assert "not used" in caplog.text


def test_a_body_that_does_not_compile_is_not_used(emulated, monkeypatch, caplog):
    kernel = gated_delta_kernel._KERNEL
    monkeypatch.setattr(kernel, "body", kernel.body + "\n    nonsense;\n")
    q, window = Cases(0, SMALL, mx.float32).window(2, 2)
    assert not gated_delta_kernel.fits(window)
    assert "does not compile" in caplog.text and "slower code does" in caplog.text
    y, _, _ = gated_delta.fold_and_verify(
        q, window, Cases(1, SMALL, mx.float32).state(2), None, None
    )
    assert y.shape == (2, 2, 4, 8)


def test_the_check_measures_what_it_says(emulated):
    """A kernel that is the portable code is off by nothing but the order of its sums."""

    def verify(q, window, state, previous, num_kept):
        if previous is not None:
            state = chunkwise.fold(previous, num_kept, state)
        y, _, pending = chunkwise.run(q, window, state, advance=False)
        return y, state, pending

    def advance(q, window, state, previous, num_kept, lengths):
        state = chunkwise.fold(previous, num_kept, state)
        return chunkwise.run(q, window.cut(lengths), state)[:2]

    assert self_check.gated_delta(verify, advance, SMALL[:4], mx.float32) < 1e-6
