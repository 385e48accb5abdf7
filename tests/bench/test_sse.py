from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.bench.sse import timed_events

STREAM = (
    b": keep-alive\n\n"
    b'data: {"a": 1}\n\n'
    b"event: delta\r\nid: 7\r\ndata:no space\r\n\r\n"
    b"data: two\ndata: lines\n\n"
    + "data: Zeilen\u2028trenner und \x85\x0b\x1e\n\n".encode()
    + b"\n\ndata: last"
)
EVENTS = ['{"a": 1}', "no space", "two\nlines", "Zeilen\u2028trenner und \x85\x0b\x1e", "last"]


def test_one_read():
    assert list(timed_events([(3.0, STREAM)])) == [(3.0, data) for data in EVENTS]


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_wherever_the_reads_are_cut(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    reads = [(float(b), STREAM[a:b]) for a, b in itertools.pairwise(edges)]
    found = list(timed_events(reads))
    assert [data for _, data in found] == EVENTS
    # An event is there when its empty line has come, and not before.
    ends = [STREAM.index(b"1}\n\n") + 4, STREAM.index(b"\r\n\r\n") + 4]
    for (at, _), complete in zip(found, ends):
        assert at == min(edge for edge in edges[1:] if edge >= complete)


def test_nothing():
    assert list(timed_events([])) == list(timed_events([(1.0, b": hm\n\n")])) == []


def test_what_is_no_utf8():
    with pytest.raises(UnicodeDecodeError):
        list(timed_events([(0.0, b"data: \xff\n\n")]))
