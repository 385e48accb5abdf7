"""The gated delta rule of prompts on matrix units: the real source on an emulated GPU."""

import mlx.core as mx
import pytest

from mlx_mtp.kernels import gpu, portable, recurrence
from mlx_mtp.kernels.cuda import gated_delta_chunks
from mlx_mtp.kernels.gdn_types import GDNShape
from mlx_mtp.kernels.self_check import RandomInputs, difference

pytestmark = pytest.mark.usefixtures("matrix_units")

SMALL = GDNShape(2, 64, 4, 32)
FULL = [
    (GDNShape(1, 128, 3, 64), mx.bfloat16, 200),
    (GDNShape(2, 64, 2, 96), mx.float16, 130),
]


@pytest.mark.parametrize(
    ("shape", "dtype", "length"),
    [(SMALL, mx.bfloat16, 65), *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)],
)
def test_it_equals_the_portable_code(caplog, shape, dtype, length):
    """Rows keep all of a window, nothing or a part, and decays range from 0 to 1."""
    cases = RandomInputs(1, shape, dtype)
    (q, window), state, kept = cases.window(3, length), cases.state(3), cases.counts(3, length)
    decay = mx.where(mx.arange(length)[:, None] % 7 == 3, window.g**40, window.g)
    decay[0, 5, 0], decay[0, 9:30, 1], decay[2, 3:] = 0.0, 1e-30, 1.0
    window = window._replace(g=decay)
    true_y, true_after, _ = portable.run_chunked(q, window.masked(kept), state)
    # Tokens that are not kept can have any values.
    ours = (mx.arange(length) < kept[:, None])[..., None]
    q, k, v = (mx.where(ours[..., None], a, mx.nan).astype(dtype) for a in (q, *window[:2]))
    window = window._replace(k=k, v=v)
    assert gated_delta_chunks.fits(window), caplog.text
    y, after, pending = recurrence.run_window(q, window, state, None, None, kept)
    assert pending is None and difference([after], [true_after]) < 1e-4
    assert mx.array_equal(after[1], state[1]), "a row that keeps nothing has changed"
    assert (mx.where(ours[..., None], 0, y) == 0).all()
    for row, count in enumerate(kept.tolist()):
        if count:
            assert difference([y[row, :count]], [true_y[row, :count]]) < 1e-4


def test_after_a_window_that_has_not_been_folded():
    cases = RandomInputs(2, SMALL, mx.bfloat16)
    first, (q, window), state = cases.window(2, 3), cases.window(2, 64), cases.state(2)
    kept, all_of_it = mx.array([1, 3]), mx.array([64, 64])
    _, _, pending = recurrence.run_window(*first, state, None, None)
    y, after, _ = recurrence.run_window(q, window, state, pending, kept, all_of_it)
    true = portable.run_chunked(q, window, portable.fold(pending, kept, state))
    assert difference([y, after], true[:2]) < 1e-4


def test_a_gpu_with_too_little_shared_memory(monkeypatch):
    for kilobytes, applies in ((99, False), (227, True)):
        monkeypatch.setattr(gpu, "shared_memory", lambda: kilobytes << 10)  # noqa: B023
        operation = gated_delta_chunks.GATED_DELTA_CHUNKS
        assert operation.applies(SMALL, mx.bfloat16) == applies
