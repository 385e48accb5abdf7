"""Bad words: a mask forbids the tokens that a search of every token finds."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.sampling.bad_words import BadWords, TokenTexts
from mlx_mtp.text.tokenizer import Tokenizer
from tests.conftest import DEMO
from tests.support.grammars import bad_words, texts


def forbidden(words: BadWords, tail: bytes) -> set[int]:
    mask = np.full(words.num_words, -1, dtype=np.int32)
    words.forbid(mask, tail)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little") == 0).tolist())


def completing(words: list[str], text: bytes, vocabulary: tuple[bytes, ...]) -> set[int]:
    """Returns the tokens that complete a word, with their last byte or an earlier one."""
    found = set()
    for token, added in enumerate(vocabulary):
        ends = [(text + added)[: len(text) + n] for n in range(1, len(added) + 1)]
        if any(end.endswith(word.encode()) for end in ends for word in words):
            found.add(token)
    return found


@given(
    st.lists(st.text('abtrue "', min_size=1, max_size=5), min_size=1, max_size=5),
    st.lists(
        st.sampled_from([t for t, text in enumerate(texts()) if text.strip(b'abtrue "') == b""])
    ),
)
@settings(max_examples=100)
def test_a_token_is_forbidden_where_it_would_complete_a_word(words, tokens):
    checked, tail, text = bad_words(*words), b"", b""
    for token in tokens:
        tail, text = checked.next_tail(tail, token), text + texts()[token]
    found = completing(words, text, texts())
    assert forbidden(checked, tail) == found
    assert {t for t in range(96) if checked.completed(tail, t)} == found


def test_letters_of_several_tokens_and_special_tokens_that_show_nothing():
    tokenizer = Tokenizer.load(DEMO)
    vocabulary = tuple(map(tokenizer.token_bytes, range(tokenizer.vocab_size)))
    words = ["\N{PARTY POPPER}", "the", "<|im_end|>"]
    checked = BadWords(words, TokenTexts(vocabulary), tokenizer.text_bytes)
    for text in ("", " t", "breat", "\N{PARTY POPPER}", "t<|im_start|>h"):
        ids = tokenizer.encode(text)
        for shown in range(len(ids)):
            tail = b""
            for token in ids[:shown]:
                tail = checked.next_tail(tail, token)
            before = b"".join(map(tokenizer.text_bytes, ids[:shown]))
            assert forbidden(checked, tail) == completing(words, before, vocabulary)
    assert len(forbidden(checked, b"t")) > len(forbidden(checked, b"")) > 1
