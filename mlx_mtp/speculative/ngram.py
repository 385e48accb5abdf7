"""Drafts that are copied: what followed the end of a text where it occurred before.

An edited file is mostly copied from the prompt, and an agent repeats its earlier answers. The next
tokens are those after the longest match with the end of prompt and answer, in the request itself
or else in earlier answers under its cache_salt. An index takes about a microsecond a token.
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import takewhile
from weakref import WeakValueDictionary

import numpy as np

from mlx_mtp.config import MAX_HOST_DRAFTS, MAX_RUN
from mlx_mtp.speculative.acceptance_rates import MOST_MATCH, NgramRates

GRAM = 3  # tokens that must agree
_MOST_TRIED = 16  # occurrences that are compared, the latest first
_GOOD_MATCH = 16  # nothing else is looked for while one of so many goes on
_LEAST_CHANCE = 0.3  # of the first token: below it nothing is offered
_FIRST_ENTRIES = 256
OBJECTS = 640  # bytes of an index without what is in its arrays, and of its key
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)  # odd
_WORD = (1 << 64) - 1
_SEPARATOR = -1  # between answers: no token's id


class NgramIndex:
    """Where each `GRAM` tokens of a text occurred: a hash table of chains, the latest first.

    It takes 4 bytes for each token, 4 for its chain and 4 for each of at most twice as many
    entries (256 at least), and what its objects take.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = array("i")
        self._before = array("i")  # the place of the same hash before; 0: none
        self._heads = array("i", bytes(4 * _FIRST_ENTRIES))  # the latest place of each hash
        self.extend(tokens)

    @property
    def nbytes(self) -> int:
        return OBJECTS + 4 * (len(self.tokens) + len(self._before) + len(self._heads))

    def extend(self, tokens: Sequence[int]) -> None:
        first = max(len(self.tokens), GRAM)
        self.tokens.extend(tokens)
        # Building takes a third of the time a token, but for all tokens.
        many = len(tokens) > max(_FIRST_ENTRIES, len(self.tokens) // 4)
        if many or len(self.tokens) > len(self._heads):
            self._build()
            return
        self._before.extend([0] * (len(self.tokens) - len(self._before)))
        for place in range(first, len(self.tokens)):
            entry = self._entry(self.tokens, place)
            self._before[place], self._heads[entry] = self._heads[entry], place

    def find(self, text: Sequence[int]) -> tuple[int, int]:
        """The longest match with the end of `text`: its length, and the place after it.

        0 and 0 without one. Places have a token: the end of the index's own text is none.
        """
        best = at = 0
        if len(text) < GRAM:
            return best, at
        place = self._heads[self._entry(text, len(text))]
        for _ in range(_MOST_TRIED):
            if place == 0 or best == MOST_MATCH:
                break
            length = self._match(text, place)
            if length > best:
                best, at = length, place
            place = self._before[place]
        return (best, at) if best >= GRAM else (0, 0)

    def _match(self, text: Sequence[int], place: int) -> int:
        length, step, end = 0, (MOST_MATCH + 1) // 2, len(text)
        while step:
            more = length + step
            if more <= min(place, end) and (
                self.tokens[place - more : place - length] == text[end - more : end - length]
            ):
                length = more
            step //= 2
        return length

    def _entry(self, tokens: Sequence[int], place: int) -> int:
        """Of the `GRAM` tokens before a place."""
        a, b, c = tokens[place - GRAM : place]
        value = (a * _FACTORS[0] + b * _FACTORS[1] + c * _FACTORS[2]) & _WORD
        return (value >> 32) & (len(self._heads) - 1)

    def _build(self) -> None:
        """All at once, with arrays: about 0.1 microseconds a token."""
        count = len(self.tokens)
        size = max(_FIRST_ENTRIES, 1 << count.bit_length())
        tokens = np.frombuffer(self.tokens, np.int32).astype(np.uint64)
        heads, before = np.zeros(size, np.int32), np.zeros(count, np.int32)
        if count > GRAM:
            # Entry and place in one number: that sorts several times as fast as one by the other.
            # In place: what numpy takes for a moment the process keeps.
            keys = np.zeros(count - GRAM, np.uint64)
            for i, factor in enumerate(_FACTORS):
                keys += tokens[i : i + count - GRAM] * np.uint64(factor)
            del tokens
            keys >>= np.uint64(32)
            keys &= np.uint64(size - 1)
            keys <<= np.uint64(32)
            keys |= np.arange(GRAM, count, dtype=np.uint64)
            keys.sort()
            places = keys.astype(np.uint32).astype(np.int32)
            keys >>= np.uint64(32)
            before[places[1:]] = np.where(keys[1:] == keys[:-1], places[:-1], 0)
            heads[keys] = places  # Of equal ones the last stays.
        self._heads, self._before = array("i"), array("i")
        self._heads.frombytes(heads.data.cast("B"))
        self._before.frombytes(before.data.cast("B"))


class NgramSource:
    """What requests may copy; earlier answers by salt, in at most `limit` bytes.

    The salts that were used least recently go first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._texts: OrderedDict[Hashable, NgramIndex] = OrderedDict()
        self.nbytes = 0
        # By salt too, while a request uses them: the choices of a prompt share its index.
        self._prompts: WeakValueDictionary[Hashable, NgramIndex] = WeakValueDictionary()
        self._rates = NgramRates(0.99)  # of all requests

    def drafter(
        self, prompt: tuple[int, ...], salt: Hashable, *, alone: bool = False
    ) -> "NgramDrafter":
        """A drafter for a request; if `alone`, it reads the request itself only."""
        key = salt, prompt
        index = self._prompts.get(key)
        if index is None:
            index = self._prompts[key] = NgramIndex(prompt)
        return NgramDrafter(index, self._rates, None if alone else self._texts.get(salt))

    def keep(self, salt: Hashable, answer: Sequence[int]) -> None:
        if not self._limit or len(answer) <= GRAM:
            return
        text = self._texts.pop(salt, None)
        if text is None:
            text = NgramIndex()
        else:
            self.nbytes -= text.nbytes
        text.extend([_SEPARATOR, *answer])
        if text.nbytes > self._limit:
            # 16 bytes a token at most; half of it, so that this is rare.
            text = NgramIndex(text.tokens[-(self._limit // 32) :])
        self._texts[salt] = text
        self.nbytes += text.nbytes
        while self.nbytes > self._limit:
            self.nbytes -= self._texts.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        self._texts.clear()
        self.nbytes = 0


class NgramDrafter:
    """What one request may copy next: `run`, after a match of `match` tokens.

    It is compared with what comes in any case, so its chances are known before it is used.
    """

    def __init__(self, prompt: NgramIndex, pool: NgramRates, others: NgramIndex | None) -> None:
        # The answer, behind as much of the prompt as a match may have.
        self._text, self._prompt = NgramIndex(prompt.tokens[-MOST_MATCH:]), prompt
        self._others, self._pool = others, pool
        self._rates = NgramRates(0.97)
        self._source, self._at = self._text, 0
        self.match = 0
        self.run: Sequence[int] = ()

    @property
    def of_others(self) -> bool:
        """True if the run is from an earlier answer, not from the request's prompt or answer."""
        return self._source is self._others

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens have been drawn: judge the run by them, and look for the next one."""
        pairs = list(zip(self.run, tokens))
        passed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        for rates in (self._rates, self._pool):
            rates.observe(self.match, passed, failed=passed < len(pairs))
        going_on = 0 < passed == len(tokens)
        self._text.extend(tokens)
        self._at, self.match = self._at + passed, min(self.match + passed, MOST_MATCH)
        if not going_on or self.match < _GOOD_MATCH or self._at >= len(self._source.tokens):
            self._look()
        self.run = self._source.tokens[self._at : self._at + MAX_RUN] if self.match else ()
        if self._source is self._text and 0 < len(self.run) < MAX_RUN:
            # What comes after the text's end repeats its end.
            self.run = (self.run * MAX_RUN)[:MAX_RUN]
        if _SEPARATOR in self.run:
            self.run = self.run[: self.run.index(_SEPARATOR)]

    def cumulative_acceptance(self, ahead: int) -> list[float]:
        """That the first, second, .. token of the run behind `ahead` others comes there.

        Empty where that is unlikely. The others are what a window in flight may bring.
        """
        count = min(len(self.run), ahead + MAX_HOST_DRAFTS)
        chances = self._rates.cumulative_acceptance(self.match, count, self._pool)[ahead:]
        return chances if chances and chances[0] >= _LEAST_CHANCE else []

    def _look(self) -> None:
        self._source, self.match, self._at = self._text, 0, 0
        for source in (self._text, self._prompt, self._others):
            if source is not None and self.match < _GOOD_MATCH:
                match, at = source.find(self._text.tokens)
                if match > self.match:
                    self._source, self.match, self._at = source, match, at
