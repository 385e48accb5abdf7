"""Detokenizing: equal to decoding at once, whole characters only, stop strings over any borders."""

from __future__ import annotations

import itertools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.server.detokenizer import Detokenizer
from mlx_mtp.server.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(BUNDLED_MODEL)
DECODE = tokenizers.Tokenizer.from_str(TOKENIZER.to_json()).decode

SMILE = "🙂".encode()
emoji = st.sampled_from("🎉👩‍👩‍👧🇩🇪✈️日本語éß\u200d\ufffd\x00")
texts = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), emoji), max_size=60)


def feed(pieces: list[bytes], stops: list[str]) -> tuple[list[str], Detokenizer]:
    """What comes out after each piece, and last what flushing brings."""
    detokenizer = Detokenizer(pieces.__getitem__, stops)
    return [*map(detokenizer.push, range(len(pieces))), detokenizer.flush()], detokenizer


def cut_at_stop(text: str, stops: list[str]) -> str:
    """The reference: read character by character; the first stop string to be complete ends it."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))]
    return text


def pieces_of(text: str, borders: list[int]) -> list[bytes]:
    raw = text.encode()
    cuts = sorted({0, len(raw), *(border % (len(raw) + 1) for border in borders)})
    return [raw[a:b] for a, b in itertools.pairwise(cuts)]


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40))
@settings(max_examples=200)
def test_any_tokens_give_what_decoding_at_once_gives(ids: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER.text_bytes)
    parts = [detokenizer.push(token) for token in ids]
    assert "".join(parts) + detokenizer.flush() == DECODE(ids, skip_special_tokens=True)


@given(texts, st.lists(st.integers(0, 500), max_size=20))
def test_only_whole_characters_come_out(text: str, borders: list[int]) -> None:
    parts, _ = feed(pieces_of(text, borders), [])
    assert "".join(parts) == text
    assert parts[-1] == ""


@given(
    st.text("ab🎉<", max_size=30),
    st.lists(st.text("ab🎉<", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 100), max_size=20),
)
@settings(max_examples=300)
def test_stop_strings_cut_at_the_same_place_whatever_the_borders(
    text: str, stops: list[str], borders: list[int]
) -> None:
    parts, detokenizer = feed(pieces_of(text, borders), stops)
    expected = cut_at_stop(text, stops)
    assert "".join(parts) == expected
    assert (detokenizer.stop is not None) == (
        expected != text or any(text.endswith(s) for s in stops)
    )


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_no_more_is_held_than_could_begin_a_stop(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(lambda index: text[index].encode(), stops)
    out = ""
    for index in range(len(text)):
        out += detokenizer.push(index)
        if detokenizer.stop is not None:
            break
        held = text[len(out) : index + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "parts"),
    [
        # Half a character is held until it is whole, and is a replacement at the end.
        ([b"a" + SMILE[:1], SMILE[1:3], SMILE[3:] + b"b"], [], ["a", "", "🙂b", ""]),
        ([b"a", "é".encode()[:1]], [], ["a", "", "\ufffd"]),
        # Text before a stop comes at once, and nothing after it; a false start is released.
        ([b"one <", b"/s", b"> two", b"three"], ["</s>"], ["one ", "", "", "", ""]),
        ([b"x<", b"/", b"b>", b"y</"], ["</s>"], ["x", "", "</b>", "y", "</"]),
        # The stop that is complete first wins; of two that end together the longer.
        ([b"abcd"], ["abcd", "bc"], ["a", ""]),
        ([b"a", b"b", b"c", b"d"], ["abcd", "bc"], ["", "", "a", "", ""]),
        ([b"xabc"], ["bc", "abc"], ["x", ""]),
    ],
)
def test_what_comes_out_when(pieces: list[bytes], stops: list[str], parts: list[str]) -> None:
    assert feed(pieces, stops)[0] == parts


def test_special_tokens_have_no_text_and_plain_added_ones_have() -> None:
    ids = [4089, 4094, 4095]  # <|im_end|> is special, <think> and </think> are not.
    detokenizer = Detokenizer(TOKENIZER.text_bytes)
    assert [detokenizer.push(token) for token in ids] == ["", "<think>", "</think>"]
