"""The device's acceptance equals a loop over rows and tokens."""

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.speculative.verify import verify_window


def reference(targets, window, stop_ids, remaining, finished, num_drafts):
    """Returns one row's `AcceptResult`."""
    window = window[: num_drafts + 1]
    if finished:
        return 0, 0, True, remaining, window[0], 0
    emitted = []
    num_accepted = 0
    for j, target in enumerate(targets):
        emitted.append(target)
        agreed = j + 1 < len(window) and window[j + 1] == target
        num_accepted += agreed
        if target in stop_ids or len(emitted) == remaining or not agreed:
            break
    left = remaining - len(emitted)
    done = emitted[-1] in stop_ids or left == 0
    return len(emitted), num_accepted, done, left, emitted[-1], len(emitted) - 1


@settings(max_examples=300, deadline=None)
@given(data=st.data(), length=st.integers(1, 6), batch=st.integers(1, 4))
def test_equals_a_loop(data, length, batch):
    def draw(cell, size=length):
        return [data.draw(st.lists(cell, min_size=size, max_size=size)) for _ in range(batch)]

    token, width = st.integers(0, 4), data.draw(st.integers(0, 2))
    targets, firsts = draw(token), draw(token, 1)
    # Drafts often agree, so that long accepted prefixes occur, too.
    window = [
        [first, *((t if flip else (t + 1) % 5) for t, flip in zip(target[:-1], flips))]
        for (first,), target, flips in zip(firsts, targets, draw(st.integers(0, 3)))
    ]
    stops = draw(st.integers(-1, 4), width)
    remaining = [cell for (cell,) in draw(st.integers(1, 8), 1)]
    finished = [cell for (cell,) in draw(st.booleans(), 1)]
    limited = data.draw(st.booleans())
    limits = [cell if limited else length for (cell,) in draw(st.integers(0, length - 1), 1)]
    accepted = verify_window(
        mx.array(targets),
        mx.array(window),
        stop_ids=mx.array(stops, dtype=mx.int32).reshape(batch, width),
        remaining=mx.array(remaining),
        finished=mx.array(finished),
        num_drafts=mx.array(limits) if limited else None,
    )
    rows = zip(targets, window, stops, remaining, finished, limits, strict=True)
    assert list(zip(*(a.tolist() for a in accepted))) == [reference(*row) for row in rows]
