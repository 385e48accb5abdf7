"""The kernels' real sources and launches on an emulated or real GPU equal the portable code."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.cache.batch import BatchCache
from mlx_mtp.cache.gated_delta import GatedDeltaCache
from mlx_mtp.cache.specs import GatedDeltaSpec, MLPSpec
from mlx_mtp.kernels import (
    gated_delta,
    gated_delta_step,
    gpu,
    portable,
    recurrence,
    self_check,
    short_conv,
)
from mlx_mtp.kernels.gdn_types import GDNProjections, GDNShape, PendingWindow
from mlx_mtp.kernels.self_check import RandomInputs
from mlx_mtp.kernels.view import to_arrays
from mlx_mtp.selftest.kernels import check_kernels
from tests.support.cases import arrays_of

SMALL = GDNShape(2, 32, 4, 32)
TOLERANCE = 2e-5 if gpu.backend() is None else 1e-4
F32, BF16 = mx.float32, mx.bfloat16


def variants(*full: GDNShape) -> pytest.MarkDecorator:
    """Parametrize by backend, shape and type; all but two cases run only in `make test-full`."""
    quick = [("cuda", SMALL, F32), ("metal", SMALL, BF16)]
    others = [("metal", SMALL, F32), ("cuda", SMALL, BF16), *[("cuda", s, F32) for s in full]]
    cases = [*quick, *(pytest.param(*case, marks=pytest.mark.full) for case in others)]
    return pytest.mark.parametrize(("emulated", "shape", "dtype"), cases, indirect=["emulated"])


def close(ours, true, tolerance=TOLERANCE):
    """Check equality up to the order of sums, and a rounding step or two of a 16-bit type."""
    for a, b in zip(ours, true, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        relative = tolerance if a.dtype == F32 else 2e-2
        left, right = (np.array(x.astype(mx.float32)) for x in (a, b))
        np.testing.assert_allclose(left, right, rtol=relative, atol=relative)


def spread(array, axis):
    """Returns the same values with gaps between them along an axis; the last axis stays dense."""
    wide = mx.repeat(array, 2, axis=axis)
    return wide[(*[slice(None)] * axis, slice(None, None, 2))]


@variants(GDNShape(1, 64, 3, 6), GDNShape(3, 32, 3, 5))
def test_windows_in_a_row(emulated, shape, dtype):
    compare_windows(shape, dtype)


def compare_windows(shape, dtype, lengths=(1, 4, 2, 9, 1), last=6):
    """Compare windows of these lengths, of which rows keep parts, by the caches' functions.

    Each row's part of the last window is known before it is computed, as with a prompt.
    """
    cases = RandomInputs(3, shape, dtype)
    rows = 3
    state = true_state = cases.state(rows)
    pending = true_pending = kept = None
    assert gated_delta.fits(cases.window(1, 1)[1]), "the check before first use"
    for length in lengths:
        q, window = cases.window(rows, length)
        y, state, pending = recurrence.run_window(q, window, state, pending, kept)
        with mx.stream(mx.cpu):
            true = portable.run_window(q, window, true_state, true_pending, kept)
        true_y, true_state, true_pending = true
        close([y, state, pending.delta], [true_y, true_state, true_pending.delta])
        kept = cases.counts(rows, length)
    parts = cases.counts(rows, last)
    q, window = cases.window(rows, last)
    y, after, _ = recurrence.run_window(q, window, state, pending, kept, parts)
    folded = recurrence.fold(pending, kept, state)
    with mx.stream(mx.cpu):
        true_state = portable.fold(true_pending, kept, true_state)
        true_y, true_after, _ = portable.run_chunked(q, window.masked(parts), true_state)
    close([folded, after], [true_state, true_after])
    valid = np.arange(last) < np.array(parts)[:, None]
    y, true_y = (np.array(a.astype(mx.float32)) for a in (y, true_y))
    np.testing.assert_allclose(y[valid], true_y[valid], rtol=2e-2, atol=2e-2)
    # Masked attention can still read these outputs, so they must not be NaN.
    assert (y[~valid] == 0).all()


@variants(GDNShape(1, 64, 3, 32, 2), GDNShape(2, 32, 4, 64))
def test_inputs_of_windows_in_a_row(emulated, shape, dtype):
    compare_inputs(shape, dtype)


def compare_inputs(shape, dtype, lengths=(1, 3, 18, 2)):
    cases = RandomInputs(5, shape, dtype)
    convolution = cases.convolution()
    history = true_history = cases.history(3, 0)
    kept = None
    assert short_conv.fits(cases.projected(1, 1), convolution)
    for length in lengths:
        given = cases.projected(3, length), convolution
        q, window, history = short_conv.convolve(*given, history, kept)
        with mx.stream(mx.cpu):
            true_q, true_window, true_history = portable.short_conv(*given, true_history, kept)
        *found, beta = to_arrays([q, *window])
        close([*found, beta.astype(dtype)], [true_q, *true_window])
        assert mx.array_equal(beta.astype(dtype).astype(beta.dtype), beta), "rounded"
        assert mx.array_equal(history, true_history)
        kept = cases.counts(3, length)


def test_a_cache_keeps_packed_windows(emulated, monkeypatch):
    """Rows leave and join while windows are pending, whose bytes are those of the plan.

    One kernel or three run a window, with the same bits.
    """
    spec = GatedDeltaSpec(MLPSpec(1, 1), SMALL)
    planned = 3 * (sum(spec.state_nbytes(4).values()) + spec.window_nbytes(2, 4) + 4)
    ours, used = run_cache()
    assert used < planned, "with a count for each row"
    monkeypatch.setattr(gated_delta_step, "_MOST_GROUPS", 0)
    by_three, used = run_cache()
    assert used == planned
    close(ours, by_three, tolerance=0)
    monkeypatch.setattr(gpu, "backend", lambda: None)
    close(ours, run_cache()[0])


def run_cache():
    """Returns a cache's outputs, states and history, and its bytes after a window of 3."""
    cases = RandomInputs(6, SMALL, F32)
    weights, outputs = cases.convolution(), list[mx.array]()

    def run(cache, length, kept):
        rows = len(kept)
        gate = gated_delta_step.random_gate(cases, rows * length)
        cache.reserve([length] * rows)
        counts = cache.begin_window([length] * rows).kept
        projected = cases.projected(rows, length)
        outputs.append(cache.layers[0].run_gated(projected, weights, counts, *gate))
        cache.commit(mx.array(kept))

    cache, other = (BatchCache([GatedDeltaCache(n, SMALL, F32)], n) for n in (3, 1))
    run(cache, 5, [5, 0, 2])
    run(cache, 3, [1, 3, 0])
    used = sum(a.nbytes for a in arrays_of([cache.layers[0].arrays, cache.num_kept]))
    run(other, 2, [1])
    cache = cache.select([1, 0])
    cache.extend(other)
    run(cache, 4, [3, 0, 4])
    cache.fold()
    state, _, history = cache.layers[0].arrays
    return [*outputs, state, history], used


def test_inputs_may_be_slices(emulated):
    cases = RandomInputs(4, SMALL, F32)
    q, window = cases.window(2, 3)
    state, kept = cases.state(2), mx.array([1, 3])
    _, _, pending = portable.run_chunked(q, window, state)
    y, folded, after = gated_delta.run_kernel(q, window, state, pending, kept)
    projected, *weights = cases.projected(2, 3), cases.convolution(), cases.history(2, 0)
    true_q, true_window, _ = short_conv.run_kernel(projected, *weights, None)
    true_inputs = to_arrays([true_q, *true_window])
    for axis in (0, 1, 2):
        sliced = window._replace(k=spread(window.k, axis), v=spread(window.v, axis))
        before = PendingWindow(spread(pending.k, axis), pending.delta, pending.g)
        found = gated_delta.run_kernel(spread(q, axis), sliced, state, before, kept)
        close([*found[:2], *found[2]], [y, folded, *after], tolerance=0)
        parts = GDNProjections(*(spread(a, axis) for a in to_arrays(projected)))
        found_q, found_window, _ = short_conv.run_kernel(parts, *weights, None)
        close(to_arrays([found_q, *found_window]), true_inputs, tolerance=0)


def test_a_body_that_does_not_compile_is_not_used(emulated, monkeypatch, caplog):
    monkeypatch.setattr(gated_delta, "_BODY", "nonsense;")
    q, window = RandomInputs(0, SMALL, F32).window(2, 2)
    y, _, _ = recurrence.run_window(q, window, RandomInputs(1, SMALL, F32).state(2), None, None)
    assert y.shape == (2, 2, 4, 32)
    assert "does not compile" in caplog.text and "slower code is used" in caplog.text
    first, second, *_ = check_kernels({"small": SMALL})
    assert not first.ok and first.difference is first.microseconds is None
    assert "does not compile" in first.problem
    assert second.ok and min(second.microseconds, second.portable) > 0


def test_a_nan_is_a_difference():
    def broken(*given):
        y, *others = portable.run_window(*given)
        return y * mx.nan, *others

    assert not self_check.gated_delta_error(broken, SMALL, F32) < 1


def test_shapes_that_the_kernels_are_not_made_for(emulated):
    found = check_kernels({"odd": GDNShape(1, 48, 2, 48)})
    assert len(found) == (8 if emulated == "cuda" else 6)
    assert all(check.ok and not check.applies for check in found)


on_a_gpu = pytest.mark.skipif(gpu.backend() is None, reason="mlx has no GPU here")


@on_a_gpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (GDNShape(2, 32, 2, 64), F32),
        (GDNShape(2, 64, 6, 32), mx.float16),
        (GDNShape(2, 128, 4, 32), BF16),
    ],
)
def test_on_a_real_gpu_the_kernels_are_used_and_equal_the_portable_code(shape, dtype):
    compare_windows(shape, dtype)
    compare_inputs(shape, dtype)
    assert all(check.ok for check in check_kernels({"small": shape}))


@pytest.mark.full
@on_a_gpu
@pytest.mark.parametrize("key_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("dtype", [F32, mx.float16, BF16])
def test_windows_after_windows_on_a_real_gpu(dtype, ratio, key_dim):
    """Each combination is a kernel of its own, which takes seconds to compile."""
    shape = GDNShape(2, key_dim, 2 * ratio, 64 if key_dim == 32 else 32)
    for previous, length in itertools.product(range(9), (*range(1, 10), 64, 512)):
        if length < 64 or previous in (0, 3):  # The portable code is slow.
            lengths = [previous, length] if previous else [length]
            compare_windows(shape, dtype, lengths, length)
            compare_inputs(shape, dtype, lengths)
