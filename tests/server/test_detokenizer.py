"""Detokenizing: as decoding in one go, whole characters only, stop strings across tokens."""

import itertools

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.text.stop_strings import StopStrings
from mlx_mtp.text.stream import Detokenizer
from mlx_mtp.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(BUNDLED_MODEL)
DECODE = tokenizers.Tokenizer.from_str(TOKENIZER.to_json()).decode


def cut_at_stop(text: str, stops: list[str], begin: int, include: bool) -> str | None:
    """The reference: returns the text up to the first complete stop string, read by character.

    Returns None if no stop string ends after the first `begin` characters.
    """
    for end in range(begin + 1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end if include else end - max(map(len, hits))]
    return None


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


@given(
    st.text("ab🎉<", max_size=30),
    st.lists(st.text("ab🎉<", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 100), max_size=20),
    st.integers(0, 4),
    st.booleans(),
)
@settings(max_examples=300)
def test_stop_strings_cut_at_the_same_place_whatever_the_borders(
    text: str, stops: list[str], borders: list[int], min_tokens: int, include: bool
) -> None:
    pieces = pieces_of(text, borders)
    detokenizer, strings = Detokenizer(pieces.__getitem__), StopStrings(stops, min_tokens, include)
    begin = len(b"".join(pieces[:min_tokens]).decode(errors="ignore"))
    out, expected = "", cut_at_stop(text, stops, begin, include)
    for index in range(len(pieces)):
        strings.count_token()
        out += strings.release(detokenizer.push(index))
        # Only the possible beginning of a stop string, or half a character, is held back.
        come = b"".join(pieces[: index + 1]).decode(errors="ignore")
        held = come[len(out) :]
        assert strings.found or not held or any(stop.startswith(held) for stop in stops)
    out += strings.release(detokenizer.flush()) + strings.flush()
    assert out == (text if expected is None else expected)
    assert (strings.found is None) == (expected is None)
