"""From recorded reads to times and tokens."""

from __future__ import annotations

import pytest

from mlx_mtp.bench.answer import Answer, Split, parse_answer
from mlx_mtp.errors import BenchError
from tests.bench.fake_server import DONE, closing, end, event, piece, usage

ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])


def answer(*reads: tuple[float, bytes]) -> Answer:
    return parse_answer(10.0, reads)


def test_one_token_a_chunk():
    found = answer(
        (10.5, ROLE),
        (11.0, piece("Once")),
        (11.1, piece(" upon")),
        (11.3, piece(" a")),
        (11.4, closing("stop")),
        (11.5, end(4, prompt=7, timings={"draft_n": 3, "draft_n_accepted": 2})),
        (11.6, DONE),
    )
    assert found.ttft == 1.0
    assert found.gaps == pytest.approx((0.1, 0.2))
    assert found.tokens == (1, 1, 1)
    assert found.num_tokens == 4  # the end's token has no text
    assert found.split is Split.SINGLE
    assert found.decoding_rate == pytest.approx(2 / 0.3)
    assert (found.prompt_tokens, found.num_drafts, found.num_accepted) == (7, 3, 2)
    assert found.ended == 11.6


def test_tokens_that_the_server_counts_in_each_chunk():
    found = answer(
        (11.0, piece("a", usage=usage(1))),
        (12.0, piece("bcd", usage=usage(4))),
        (12.5, piece("e", usage=usage(6))),
        (12.6, closing("stop", usage=usage(7))),
        (12.7, end(7) + DONE),
    )
    assert found.split is Split.TOLD
    assert found.tokens == (1, 3, 2)
    assert found.num_tokens == 7
    assert found.decoding_rate == pytest.approx(5 / 1.5)


def test_text_that_was_kept_back_is_no_chunk_of_its_own():
    found = answer(
        (11.0, piece("a", usage=usage(1))),
        (12.0, piece("b", usage=usage(3))),
        (12.5, piece("c", usage=usage(3))),
        (12.7, closing() + end(3) + DONE),
    )
    assert (found.times, found.tokens, found.num_events) == ((11.0, 12.0), (1, 2), 3)
    assert found.split is Split.TOLD


@pytest.mark.parametrize("counts", [(0, 2), (5, 2)])
def test_counts_that_make_no_sense_are_not_believed(counts):
    first, second = counts
    found = answer(
        (11.0, piece("a", usage=usage(first))),
        (12.0, piece("b", usage=usage(second))),
        (12.7, closing() + end(2) + DONE),
    )
    assert found.split is Split.SINGLE
    assert found.tokens == (1, 1)


@pytest.mark.parametrize(("reason", "with_text"), [("stop", 8), ("length", 9)])
def test_tokens_are_shared_out_by_the_length_of_the_text(reason, with_text):
    found = answer(
        (11.0, piece("12")),
        (12.0, piece("123456")),
        (13.0, piece("12")),
        (13.5, closing(reason)),
        (13.7, end(9) + DONE),
    )
    left = with_text - 3
    assert found.split is Split.TEXT
    assert found.tokens == pytest.approx((1 + 0.2 * left, 1 + 0.6 * left, 1 + 0.2 * left))
    assert sum(found.tokens) == pytest.approx(with_text)
    assert found.num_tokens == 9


def test_fewer_tokens_than_chunks():
    found = answer((11.0, piece("a") + piece("b")), (12.0, piece("c") + closing() + end(1)))
    assert (found.num_tokens, found.num_events) == (1, 3)
    assert found.tokens == pytest.approx((2 / 3, 1 / 3))


@pytest.mark.parametrize("last", [b"", event(choices=[], usage=usage(0))])
def test_without_usage_chunks_are_counted(last):
    found = answer((11.0, piece("a")), (12.0, piece("bcdef")), (12.1, closing() + last + DONE))
    assert found.split is Split.CHUNKS
    assert (found.num_tokens, found.tokens) == (2, (1, 1))
    assert found.prompt_tokens is None


def test_what_one_read_brings_is_one_chunk():
    found = answer(
        (11.0, piece("a")),
        (12.0, piece("b") + piece("c")),
        (12.1, closing() + end(3) + DONE),
    )
    assert (found.times, found.tokens) == ((11.0, 12.0), (1, 2))
    assert found.num_events == 3


def test_reasoning_and_calls_are_text_too():
    call = {"index": 0, "function": {"name": "f", "arguments": "{}"}}
    found = answer(
        (11.0, event(choices=[{"delta": {"reasoning_content": "Hm"}}])),
        (12.0, event(choices=[{"delta": {"content": None, "reasoning": "so"}}])),
        (13.0, event(choices=[{"delta": {"tool_calls": [call]}}])),
        (13.1, event(choices=[{"delta": None}]) + closing() + end(3) + DONE),
    )
    assert found.times == (11.0, 12.0, 13.0)


def test_an_answer_without_text():
    found = answer((11.0, ROLE + closing("stop")), (11.5, end(1) + DONE))
    assert found.ttft is found.decoding_rate is None
    assert (found.gaps, found.num_tokens, found.ended) == ((), 1, 11.5)


def test_a_whole_answer_in_one_chunk_has_no_rate():
    found = answer((11.0, piece("abc") + closing() + end(20) + DONE))
    assert found.decoding_rate is None
    assert (found.ttft, found.tokens) == (1.0, (20.0,))


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (piece("a") + piece("b"), "cut off after 2 chunks"),
        (b"", "cut off after 0 chunks"),
        (event(error={"message": "the GPU is on fire"}), "the GPU is on fire"),
        (event(error="short"), "error: short"),
        (b"data: hello\n\n", "'hello', which is not a chat completion chunk"),
        (b"data: [1]\n\n", "not a chat completion chunk"),
        (b'data: {"choices": 3}\n\n', "not a chat completion chunk"),
        (b"data: \xff\n\n", "not UTF-8"),
    ],
)
def test_what_is_no_answer(stream, message):
    with pytest.raises(BenchError, match=message):
        answer((11.0, stream))


@pytest.mark.parametrize("last", [closing(), DONE])
def test_either_end_is_enough(last):
    assert answer((11.0, piece("a") + last)).num_tokens == 1
