"""The kernels' real sources and launches on an emulated GPU, against the portable code."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from benchmarks import kernel_checks, kernel_timings
from benchmarks.kernel_checks import Variant, check_inputs, check_recurrence
from mlx_mtp.kernels import gated_delta, inputs, portable, self_check
from mlx_mtp.kernels.self_check import Cases
from mlx_mtp.kernels.window import Pending, Projected, Shape
from mlx_mtp.selftest.kernels import check_kernels

SMALL = Shape(2, 32, 4, 32)
F32, BF16 = mx.float32, mx.bfloat16


def with_full(quick: list[tuple], full: list[tuple]) -> list:
    """Backend, shape and type of each case; the last ones run with `make test-full` alone."""
    return [*quick, *(pytest.param(*case, marks=pytest.mark.full) for case in full)]


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


@pytest.mark.parametrize(
    ("emulated", "shape", "dtype"),
    with_full(
        [("cuda", SMALL, F32), ("metal", SMALL, BF16)],
        [
            *[("metal", SMALL, F32), ("cuda", SMALL, BF16), ("cuda", Shape(1, 64, 3, 6), F32)],
            *[("metal", Shape(3, 32, 3, 5), F32), ("cuda", Shape(3, 32, 3, 5), F32)],
        ],
    ),
    indirect=["emulated"],
)
def test_windows_in_a_row(emulated, shape, dtype):
    """Ragged parts of windows of many lengths, through the functions that the caches call."""
    cases = Cases(3, shape, dtype)
    rows = 3
    state = true_state = cases.state(rows)
    pending = true_pending = kept = None
    assert gated_delta.fits(cases.window(1, 1)[1]), "the check before first use"
    for length in (1, 4, 2, 9, 1):
        q, window = cases.window(rows, length)
        y, state, pending = gated_delta.run(q, window, state, pending, kept)
        if true_pending is not None:
            true_state = portable.fold(true_pending, kept, true_state)
        true_y, _, true_pending = portable.run(q, window, true_state, advance=False)
        close([y, state, pending.delta], [true_y, true_state, true_pending.delta])
        kept = cases.counts(rows, length)
    lengths = cases.counts(rows, 6)
    q, window = cases.window(rows, 6)
    y, after, _ = gated_delta.run(q, window, state, pending, kept, lengths)
    folded = gated_delta.fold(pending, kept, state)
    true_state = portable.fold(true_pending, kept, true_state)
    true_y, true_after, _ = portable.run(q, window.cut(lengths), true_state)
    close([folded, after], [true_state, true_after])
    kept_rows = np.arange(6) < np.array(lengths)[:, None]
    y, true_y = (np.array(a.astype(mx.float32)) for a in (y, true_y))
    np.testing.assert_allclose(y[kept_rows], true_y[kept_rows], rtol=2e-2, atol=2e-2)
    # What other rows may meet through masked attention is a number.
    assert (y[~kept_rows] == 0).all()


@pytest.mark.parametrize(
    ("emulated", "shape", "dtype"),
    with_full(
        [("cuda", SMALL, F32), ("metal", SMALL, BF16)],
        [
            *[("metal", SMALL, F32), ("cuda", SMALL, BF16)],
            *[(b, s, F32) for b in ("cuda", "metal") for s in (Shape(1, 64, 3, 32, 2),)],
            *[(b, Shape(2, 32, 4, 64), F32) for b in ("cuda", "metal")],
        ],
    ),
    indirect=["emulated"],
)
def test_inputs_of_windows_in_a_row(emulated, shape, dtype):
    cases = Cases(5, shape, dtype)
    rows = 3
    convolution = cases.convolution()
    history = true_history = cases.history(rows, 0)
    kept = None
    assert inputs.fits(cases.projected(1, 1), convolution)
    for length in (1, 3, 9, 2):
        projected = cases.projected(rows, length)
        q, window, history = inputs.prepare(projected, convolution, history, kept)
        true_q, true_window, true_history = portable.prepare(
            projected, convolution, true_history, kept
        )
        close([q, *window], [true_q, *true_window])
        assert mx.array_equal(history, true_history)
        kept = cases.counts(rows, length)


def test_inputs_may_be_slices(emulated):
    cases = Cases(4, SMALL, F32)
    q, window = cases.window(2, 3)
    state, kept = cases.state(2), mx.array([1, 3])
    _, _, pending = portable.run(q, window, state)
    expected = gated_delta.launch(q, window, state, pending, kept)
    projected, convolution, history = cases.projected(2, 3), cases.convolution(), None
    history = cases.history(2, 0)
    true_q, true_window, _ = inputs.launch(projected, convolution, history, None)
    for axis in (0, 1, 2):
        sliced = window._replace(k=spread(window.k, axis), v=spread(window.v, axis))
        before = Pending(spread(pending.k, axis), pending.delta, pending.g)
        found = gated_delta.launch(spread(q, axis), sliced, state, before, kept)
        assert all(map(mx.array_equal, found, expected))
        parts = Projected(*(spread(a, axis) for a in projected))
        again, found, _ = inputs.launch(parts, convolution, history, None)
        assert all(map(mx.array_equal, (again, *found), (true_q, *true_window)))


# What is compared before first use, by the self-test and by the benchmark.


@pytest.mark.parametrize(
    ("module", "right", "wrong"),
    [
        # The previous window is not forgotten at its own rate.
        (gated_delta, "fma(key[i], d, s[r][i] * decay)", "fma(key[i], d, s[r][i])"),
        (inputs, "+ num_kept[b]) * C", ") * C"),
        *with_full(
            [],
            [
                (gated_delta, "t < num_kept[b]", "t < num_kept[b] - 1"),
                (gated_delta, "const int hk = hv / (Hv / Hk);", "const int hk = 0;"),
                (gated_delta, "int other = 16; other > 0", "int other = 16; other > 1"),
                (gated_delta, "if (t >= valid) {", "if (false) {"),
                (inputs, "is_value ? own % (Hv / Hk) : 0;", "0;"),
                (inputs, "log(w) * u / (w - 1.0f)", "0.0f"),
            ],
        ),
    ],
)
def test_a_wrong_body_is_found_and_not_used(emulated, monkeypatch, caplog, module, right, wrong):
    body = module._KERNEL.body
    assert right in body
    monkeypatch.setattr(module._KERNEL, "body", body.replace(right, wrong, 1))
    cases = Cases(0, SMALL, F32)
    if module is gated_delta:
        assert not module.fits(cases.window(1, 1)[1])
    else:
        assert not module.fits(cases.projected(1, 1), cases.convolution())
    assert "not used" in caplog.text


def test_a_body_that_does_not_compile_is_not_used(emulated, monkeypatch, caplog):
    monkeypatch.setattr(gated_delta._KERNEL, "body", "nonsense;")
    q, window = Cases(0, SMALL, F32).window(2, 2)
    assert not gated_delta.fits(window)
    assert "does not compile" in caplog.text and "slower code is used" in caplog.text
    y, _, _ = gated_delta.run(q, window, Cases(1, SMALL, F32).state(2), None, None)
    assert y.shape == (2, 2, 4, 32)
    first = check_kernels({"small": SMALL})[0]
    assert not first.ok and first.difference is None
    assert "does not compile" in first.problem


def test_the_check_measures_what_it_says(emulated):
    """A kernel that is the portable code is off by nothing but the order of its sums."""

    def run(q, window, state, previous, num_kept, lengths=None):
        if previous is not None:
            state = portable.fold(previous, num_kept, state)
        if lengths is not None:
            return (*portable.run(q, window.cut(lengths), state)[:2], None)
        y, _, pending = portable.run(q, window, state, advance=False)
        return y, state, pending.delta

    assert self_check.gated_delta(run, SMALL, F32) < 1e-6

    def broken(*given):
        y, state, delta = run(*given)
        return y, state, None if delta is None else delta * mx.nan

    assert not self_check.gated_delta(broken, SMALL, F32) < 1


def test_the_grid_of_the_benchmark_finds_a_wrong_kernel(emulated, monkeypatch):
    monkeypatch.setattr(kernel_checks, "WINDOWS", (1, 2, 5))
    monkeypatch.setattr(kernel_checks, "PREVIOUS", (0, 1, 3))
    monkeypatch.setattr(Variant, "shape", SMALL)
    variant = Variant(F32, 2, 32)
    found = check_recurrence(variant)
    assert found.ok and found.cases == 9 and found.worst > 0
    assert check_inputs(variant).ok
    kernel = gated_delta._KERNEL
    wrong = kernel.body.replace("* strength", "", 1)
    assert wrong != kernel.body
    monkeypatch.setattr(kernel, "body", wrong)
    monkeypatch.setattr(kernel, "_built", {})
    assert not check_recurrence(variant).ok
    checks = {c.name: c for c in check_kernels({"small": SMALL}) if c.dtype == "float32"}
    assert not checks["gated delta kernel / portable"].ok
    assert checks["inputs kernel / portable"].ok


def test_shapes_that_the_kernels_are_not_made_for(emulated):
    found = check_kernels({"odd": Shape(1, 48, 2, 48)})
    assert len(found) == 4
    assert all(check.ok and not check.applies for check in found)


@pytest.mark.full
@pytest.mark.parametrize("verify", [True, False])
def test_what_is_timed_computes_the_same_call_after_call(emulated, verify):
    steps = kernel_timings.contenders(Cases(0, SMALL, F32), 2, 3, verify=verify)
    assert set(steps) == {"kernel", "mlx-lm's loop", "chunkwise"}
    for _ in range(3):
        y, *others = (step()[0] for step in steps.values())
        assert all(mx.allclose(y, other, atol=1e-5) for other in others)
