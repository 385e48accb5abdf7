"""The kernels' real sources and launches on an emulated GPU, against the portable code."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.kernels import (
    chunkwise,
    gated_delta,
    gated_delta_kernel,
    inputs,
    inputs_kernel,
    portable_inputs,
    self_check,
)
from mlx_mtp.kernels.cases import Cases, Shape
from mlx_mtp.kernels.window import Pending, Projected

SMALL = Shape(2, 32, 4, 8)


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
    assert gated_delta_kernel.fits(Cases(0, SMALL, dtype).window(1, 1)[1])
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
    assert "does not compile" in caplog.text and "slower code is used" in caplog.text
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
