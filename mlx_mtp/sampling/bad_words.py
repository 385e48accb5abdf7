"""Texts that an answer must not contain, and the tokens that would complete them; no mlx."""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 64


class TokenTexts:
    """The bytes of a vocabulary's tokens, sorted so that tokens that begin alike are adjacent."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        order = sorted(range(len(texts)), key=texts.__getitem__)
        self._ids = np.array(order, dtype=np.int32)
        self._sorted = [texts[token] for token in order]
        self._joined = b"\xff".join(self._sorted)  # No UTF-8 text has this byte, so no word does.
        self._ends = np.cumsum([len(text) + 1 for text in self._sorted])
        self.num_words = (len(texts) + 31) // 32  # 32-bit words of a mask

    def starting_with(self, text: bytes) -> np.ndarray:
        after = text[:-1] + bytes([text[-1] + 1])
        return self._ids[bisect_left(self._sorted, text) : bisect_left(self._sorted, after)]

    def containing(self, text: bytes) -> np.ndarray:
        places = [match.start() for match in re.finditer(re.escape(text), self._joined)]
        return self._ids[np.searchsorted(self._ends, places, side="right")]


class BadWords:
    """Texts that an answer must not contain, however it is split into tokens.

    `shown` returns the bytes that a token adds to the answer's text. A `tail` is the end of a text,
    as long as is needed to find words that begin in it.
    """

    def __init__(
        self, words: Sequence[str], texts: TokenTexts, shown: Callable[[int], bytes]
    ) -> None:
        self._words = [word.encode() for word in words]
        self._texts, self._shown = texts, shown
        self._longest = max(map(len, self._words)) - 1  # bytes of a tail
        self._inside = np.concatenate([texts.containing(word) for word in self._words])
        self._rests = defaultdict[bytes, list[bytes]](list)  # rests of words, by their beginnings
        for word in self._words:
            for length in range(1, len(word)):
                self._rests[word[:length]].append(word[length:])
        self.num_words = texts.num_words

    def next_tail(self, tail: bytes, token: int) -> bytes:
        text = tail + self._shown(token)
        return text[max(len(text) - self._longest, 0) :]

    def completed(self, tail: bytes, token: int) -> bool:
        """Returns True if `token` completes a word after `tail`."""
        text = tail + self._shown(token)
        return any(text.find(w, max(len(tail) - len(w) + 1, 0)) >= 0 for w in self._words)

    def forbid(self, mask: np.ndarray, tail: bytes) -> None:
        """Clear the bits of tokens that would complete a word; `mask` is int32 [words]."""
        ends = (tail[start:] for start in range(len(tail)))
        rests = (rest for end in ends for rest in self._rests.get(end, ()))
        ids = np.concatenate([self._inside, *map(self._texts.starting_with, rests)])
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        bits[ids] = 0
        mask.view(np.uint8)[:] = np.packbits(bits, bitorder="little")
