"""What rows emit of a window without drafts, in its own fewer operations."""

import mlx.core as mx
import numpy as np

from mlx_mtp.speculative.verify import verify_window


def test_a_token_is_a_window_whose_draft_is_wrong():
    rng, rows = np.random.default_rng(0), 512
    sampled = mx.array(rng.integers(0, 6, (rows, 2)), dtype=mx.int32)
    last = mx.array(rng.integers(0, 6, (rows, 1)), dtype=mx.int32)
    limits = {
        "stop_ids": mx.array(rng.integers(-1, 3, (rows, 2)), dtype=mx.int32),
        "remaining": mx.array(rng.integers(0, 3, rows), dtype=mx.int32),
        "finished": mx.array(rng.integers(0, 3, rows) == 0),
    }
    wrong = mx.concatenate([last, (sampled[:, :1] + 1) % 6], axis=1)
    expected = verify_window(sampled, wrong, **limits)
    found = verify_window(sampled[:, :1], last, **limits)
    for name, one, other in zip(expected._fields, found, expected, strict=True):
        assert one.dtype == other.dtype and mx.array_equal(one, other), name
