"""mlx's own gated delta rule for prompts on Metal: used where it agrees and is faster."""

import mlx.core as mx
import pytest

from mlx_mtp.kernels import gpu, recurrence
from mlx_mtp.kernels.gdn_types import GDNShape
from mlx_mtp.kernels.metal import gated_delta_prompts
from mlx_mtp.kernels.self_check import RandomInputs


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("case", ["used", "slower", "wrong", "fails", "absent"])
def test_it_is_used_where_it_agrees_and_is_faster(dtype, case, monkeypatch):
    shape, times = GDNShape(1, 32, 2, 32), iter([1.0, 2.0] if case != "slower" else [2.0, 1.0])
    monkeypatch.setattr(gpu, "backend", lambda: "metal")
    monkeypatch.setattr(gpu, "slower", set())
    monkeypatch.setattr(gated_delta_prompts, "_seconds", lambda _: next(times))
    gated_delta_prompts._is_used.cache_clear()
    real, asked = mx.fast.gated_delta_update, []

    def theirs(*given):
        asked.append(given[0].shape)
        if case == "fails":
            raise RuntimeError("no such kernel")
        outputs, state = real(*given)
        return outputs, state * (1.01 if case == "wrong" else 1)

    monkeypatch.setattr(mx.fast, "gated_delta_update", theirs)
    if case == "absent":
        monkeypatch.delattr(mx.fast, "gated_delta_update")
    inputs = RandomInputs(0, shape, dtype)
    (q, window), state = inputs.window(2, 70), inputs.state(2)
    lengths = mx.array([70, 33], dtype=mx.int32)
    assert gated_delta_prompts.fits(window) == (case == "used")
    assert gpu.slower == (set() if case in ("used", "absent") else {gated_delta_prompts.NAME})
    if case == "used":
        y, after, _ = recurrence.run_window(q, window, state, None, None, lengths)
        assert asked[-1] == q.shape and y.dtype == dtype and after.dtype == mx.float32
        short = window._replace(**{n: getattr(window, n)[:, :63] for n in window._fields})
        assert not gated_delta_prompts.fits(short)
    gated_delta_prompts._is_used.cache_clear()
