"""The device's accepted equals a loop over rows and tokens."""

from __future__ import annotations

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.speculative.acceptance import SpeculationCounters, accept


def reference(targets, window, stop_ids, remaining, finished, num_drafts):
    """One row: (num_kept, num_accepted, finished, remaining, last)."""
    window = window[: num_drafts + 1]
    if finished:
        return 0, 0, True, remaining, window[0]
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
    return len(emitted), num_accepted, done, left, emitted[-1]


token = st.integers(0, 4)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), length=st.integers(1, 6), batch=st.integers(1, 4))
def test_equals_a_loop(data, length, batch):
    cells = st.lists(token, min_size=length, max_size=length)
    targets = [data.draw(cells) for _ in range(batch)]
    # Drafts that often agree, so that long prefixes are seen too.
    window = []
    for target in targets:
        flips = data.draw(st.lists(st.integers(0, 3), min_size=length, max_size=length))
        drafts = [t if f else (t + 1) % 5 for t, f in zip(target, flips)]
        window.append([data.draw(token), *drafts[:-1]])
    stops = [data.draw(st.lists(token, max_size=2)) for _ in range(batch)]
    remaining = [data.draw(st.integers(1, 8)) for _ in range(batch)]
    finished = [data.draw(st.booleans()) for _ in range(batch)]
    limited = data.draw(st.booleans())
    limits = [data.draw(st.integers(0, length - 1)) if limited else length for _ in range(batch)]
    width = max(map(len, stops))
    accepted = accept(
        mx.array(targets),
        mx.array(window),
        stop_ids=mx.array([[*s, *[-1] * (width - len(s))] for s in stops], dtype=mx.int32).reshape(
            batch, width
        ),
        remaining=mx.array(remaining),
        finished=mx.array(finished),
        num_drafts=mx.array(limits) if limited else None,
    )
    got = list(zip(*(a.tolist() for a in accepted)))
    expected = [
        reference(*cells)
        for cells in zip(targets, window, stops, remaining, finished, limits, strict=True)
    ]
    assert got == expected


def test_counters_count_by_position():
    counters = SpeculationCounters()
    for drafts, accepted in ((0, 0), (2, 2), (3, 1), (3, 0), (1, 1)):
        counters.observe(drafts, accepted)
    assert counters.num_drafts == 4
    assert counters.num_draft_tokens == 9
    assert counters.num_accepted_tokens == 4
    assert counters.num_accepted_tokens_per_pos == [3, 1, 0]
