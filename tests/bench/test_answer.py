"""Parsing of recorded reads into events, and of events into times and token counts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.bench.answer import Split, parse_answer, timed_events
from mlx_mtp.errors import BenchError
from tests.bench.fake_server import DONE, closing, end, event, piece

ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
STREAM = (
    b": keep-alive\n\n"
    b'data: {"a": 1}\n\n'
    b"event: delta\r\nid: 7\r\ndata:no space\r\n\r\n"
    b"data: two\ndata: lines\n\n"
    + "data: Zeilen\u2028trenner und \x85\x0b\x1e\n\n".encode()
    + b"\n\ndata: last"
)
EVENTS = ['{"a": 1}', "no space", "two\nlines", "Zeilen\u2028trenner und \x85\x0b\x1e", "last"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_events_wherever_the_reads_are_cut(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    reads = [(float(b), STREAM[a:b]) for a, b in itertools.pairwise(edges)]
    found = list(timed_events(reads))
    assert [data for _, data in found] == EVENTS
    # An event is complete only when its empty line has arrived.
    ends = [STREAM.index(b"1}\n\n") + 4, STREAM.index(b"\r\n\r\n") + 4]
    for (at, _), complete in zip(found, ends):
        assert at == min(edge for edge in edges[1:] if edge >= complete)


def test_one_token_a_chunk():
    sources = {"mtp": {"draft_n": [2, 1], "draft_n_accepted": [2, 0]}}
    last = end(4, timings={"draft_n": 3, "draft_n_accepted": 2, "draft_sources": sources})
    parts = (ROLE, piece("Once"), piece(" upon"), piece(" a"), closing("stop"), last, DONE)
    reads = [*zip((10.5, 11.0, 11.25, 11.75, 12.0, 12.5, 13.0), parts, strict=True)]
    found = parse_answer(10.0, reads, retries=1)
    assert (found.sent, found.ended, found.retries) == (10.0, 13.0, 1)
    assert (found.ttft, found.gaps, found.decoding_rate) == (1.0, (0.25, 0.5), 2 / 0.75)
    # The final token has no text, so no chunk counts it.
    assert (found.tokens, found.num_tokens, found.split) == ((1, 1, 1), 4, Split.SINGLE)
    assert (found.prompt_tokens, found.num_drafts, found.num_accepted) == (9, 3, 2)
    assert (found.drafts, found.accepted) == ({"mtp": [2, 1]}, {"mtp": [2, 0]})


def delta(**fields: object) -> bytes:
    return event(choices=[{"delta": fields}])


CALL = {"index": 0, "function": {"name": "f", "arguments": "{}"}}
TEXTS = (piece("12"), piece("123456"), piece("12"))
AB, C = piece("a") + piece("b"), piece("c")


@pytest.mark.parametrize(
    ("reads", "split", "counts", "times", "tokens"),
    [
        # Every chunk has usage; tokens with held back text count in the chunk that shows the text.
        ((piece("a", 1), piece("b", 4), end(6)), "told", (6, 2), (1, 2), (1, 3)),
        ((piece("a", 1), piece("b", 1), piece("c", 3)), "told", (3, 3), (1, 3), (1, 2)),
        # Implausible counts are ignored.
        ((piece("a", 0), piece("b", 2), end(2)), "single", (2, 2), (1, 2), (1, 1)),
        ((piece("a", 5), piece("b", 2), end(2)), "single", (2, 2), (1, 2), (1, 1)),
        # Without counts, tokens are divided by length of text; the stop token has no text.
        ((*TEXTS, closing("stop") + end(14)), "text", (14, 3), (1, 2, 3), (3, 7, 3)),
        # The events of one read form one chunk; there can be fewer tokens than events.
        ((AB, C + end(3)), "single", (3, 3), (1, 2), (2, 1)),
        ((piece("a") + piece("bcd"), C + end(1)), "text", (1, 3), (1, 2), (2 / 3, 1 / 3)),
        # Without usage, or with impossible usage, each chunk counts as a token.
        ((piece("a"), piece("bcdef"), end(0)), "chunks", (2, 2), (1, 2), (1, 1)),
        # Reasoning and tool calls count as text; a role does not.
        ((delta(reasoning_content="Hm"),), "chunks", (1, 1), (1,), (1,)),
        ((delta(tool_calls=[{}, CALL]),), "chunks", (1, 1), (1,), (1,)),
        ((event(choices=[{"delta": None}]) + ROLE, end(1)), "single", (1, 0), (), ()),
    ],
)
def test_times_and_tokens_of_chunks(reads, split, counts, times, tokens):
    """Reads that arrive one second apart give these times and token counts."""
    found = parse_answer(0.5, [*enumerate(reads, start=1), (9, DONE)])
    assert (found.split, found.times, found.ended) == (split, times, 9)
    assert (found.num_tokens, found.num_events) == counts
    assert found.tokens == pytest.approx(tokens)
    assert found.ttft == (times[0] - 0.5 if times else None)
    assert (found.decoding_rate is None) == (len(times) < 2)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (piece("a") + piece("b"), "cut off after 2 chunks"),
        (b"", "cut off after 0 chunks"),
        (event(error={"message": "the GPU is on fire"}), "the GPU is on fire"),
        (b"data: hello\n\n", "'hello', which is not a chat completion chunk"),
        (event(choices=[{"delta": {"content": 3}}]), "not a chat completion chunk"),
        (event(usage={"completion_tokens": "x"}), "not a chat completion chunk"),
        (b"data: \xff\n\n", "not UTF-8"),
    ],
)
def test_what_is_no_answer(stream, message):
    with pytest.raises(BenchError, match=message):
        parse_answer(10.0, [(11.0, stream)])
