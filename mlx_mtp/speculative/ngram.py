"""N-gram drafts: the tokens that followed the end of a text where it occurred before.

Also known as prompt lookup (vLLM's ngram proposer). An edited file is mostly a copy of the prompt,
and an agent repeats its earlier answers. The drafts are the tokens after the longest match with the
end of prompt and answer, in the request itself or else in earlier answers under its cache_salt.
Indexing takes about a microsecond per token.
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, takewhile
from operator import eq, mul
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from mlx_mtp.config import MAX_HOST_DRAFTS, MAX_RUN

GRAM = 3  # tokens that must be equal
MOST_MATCH = 127  # tokens; a longer match is treated like one of this length
_MOST_TRIED = 16  # occurrences that are compared, the latest first
_GOOD_MATCH = 16  # tokens: while such a match goes on, no other is looked for
_LEAST_ACCEPTANCE = 0.3  # of the first token: below it nothing is offered
_FIRST_ENTRIES = 256
OBJECTS = 640  # bytes of an index and of its key, without the index's arrays
_FACTOR, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
_SEPARATOR = -1  # between answers; not a token's id
_PRIOR_TRIALS = 2.0  # weight of the prior in the rate of all requests,
_POOL_TRIALS = 16.0  # and of that rate in the rate of one
_PRIORS = (0.35, 0.6, 0.8, 0.9, 0.95, 0.97)  # by class of a match's length
# The class of each length: powers of two from 4 on.
_CLASSES = [
    min(max(length.bit_length() - 2, 0), len(_PRIORS) - 1)
    for length in range(MOST_MATCH + MAX_RUN + 1)
]


class NgramIndex:
    """Where each n-gram of `GRAM` tokens occurred in a text: a hash table of chains, latest first.

    Takes 4 bytes per token, 4 for its chain, 4 per entry of the table (at most twice as many as
    tokens, at least 256), and `OBJECTS`.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = array("i")
        self._before = array("i")  # the place before it with the same hash; 0: none
        self._heads = array("i", bytes(4 * _FIRST_ENTRIES))  # the latest place with each hash
        self.extend(tokens)

    @property
    def nbytes(self) -> int:
        return OBJECTS + 4 * (len(self.tokens) + len(self._before) + len(self._heads))

    def extend(self, tokens: Sequence[int]) -> None:
        first = max(len(self.tokens), GRAM)
        self.tokens.extend(tokens)
        # Building takes a third of the time per token, but has to take all tokens.
        is_long = len(tokens) > max(_FIRST_ENTRIES, len(self.tokens) // 4)
        if is_long or len(self.tokens) > len(self._heads):
            self._build()
            return
        self._before.extend([0] * (len(self.tokens) - len(self._before)))
        for place in range(first, len(self.tokens)):
            entry = self._entry(self.tokens, place)
            self._before[place], self._heads[entry] = self._heads[entry], place

    def find(self, text: Sequence[int]) -> tuple[int, int]:
        """Length of the longest match with the end of `text`, and the place after the match.

        Returns (0, 0) if there is none. A match at the very end of the index does not count: no
        token follows it.
        """
        best = at = 0
        place = self._heads[self._entry(text, len(text))] if len(text) >= GRAM else 0
        for _ in range(_MOST_TRIED):
            if place == 0 or best == MOST_MATCH:
                break
            before = self.tokens[max(place - MOST_MATCH, 0) : place]
            if (length := _num_equal(reversed(before), reversed(text))) > best:
                best, at = length, place
            place = self._before[place]
        return (best, at) if best >= GRAM else (0, 0)

    def _entry(self, tokens: Sequence[int], place: int) -> int:
        """Entry of the table for the `GRAM` tokens before a place."""
        entry: int = _hash(*tokens[place - GRAM : place]) & (len(self._heads) - 1)
        return entry

    def _build(self) -> None:
        """Index all tokens at once, with NumPy: about 0.1 microseconds per token."""
        count = len(self.tokens)
        size = 1 << count.bit_length()
        tokens = np.frombuffer(self.tokens, np.int32).astype(np.uint64)
        # Entry and place are packed into one number, as sorting these is several times as fast as
        # sorting places by entry.
        keys = _hash(tokens[:-3], tokens[1:-2], tokens[2:-1]) & (size - 1)
        keys = np.sort(keys << 32 | np.arange(GRAM, count, dtype=np.uint64))
        entries, places = keys >> 32, keys.astype(np.uint32).astype(np.int32)
        heads, before = np.zeros(size, np.int32), np.zeros(count, np.int32)
        before[places[1:]] = np.where(entries[1:] == entries[:-1], places[:-1], 0)
        heads[entries] = places  # Of equal entries the last one stays.
        self._heads, self._before = array("i", heads.tobytes()), array("i", before.tobytes())


def _hash(a: Any, b: Any, c: Any) -> Any:
    """Of three tokens, or of as many arrays of them, uint64 [N]: 32 bits."""
    return (((a * _FACTOR + b) * _FACTOR + c) * _FACTOR & _WORD) >> 32


def _num_equal(some: Iterable[int], others: Iterable[int]) -> int:
    """How many tokens are equal before the first that differ."""
    return sum(takewhile(bool, map(eq, some, others)))


class NgramRates:
    """Acceptance rates by class of the match; each trial fades the earlier ones by `memory`."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._tried, self._accepted = [0.0] * len(_PRIORS), [0.0] * len(_PRIORS)

    def rate(self, index: int, prior: float, weight: float) -> float:
        return (self._accepted[index] + weight * prior) / (self._tried[index] + weight)

    def observe(self, match: int, num_accepted: int, *, missed: bool) -> None:
        """Count the tokens after a match; each accepted one makes the match longer."""
        for length in range(match, match + num_accepted + missed):
            index, is_accepted = _CLASSES[length], length < match + num_accepted
            self._tried[index] = self._tried[index] * self._memory + 1.0
            self._accepted[index] = self._accepted[index] * self._memory + is_accepted

    def cumulative_acceptance(self, match: int, count: int, pool: "NgramRates") -> list[float]:
        """Of the first, second, .. of `count` tokens after a match; `pool`: of all requests."""
        classes = _CLASSES[match : match + count]
        rates = dict[int, float]()
        for index in set(classes):
            prior = pool.rate(index, _PRIORS[index], _PRIOR_TRIALS)
            rates[index] = self.rate(index, prior, _POOL_TRIALS)
        return list(accumulate((rates[index] for index in classes), mul))


class NgramSource:
    """A source of `HostSources`: earlier answers by salt, in at most `limit` bytes.

    The least recently used salts are dropped first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._texts: OrderedDict[Hashable, NgramIndex] = OrderedDict()
        self.nbytes = 0
        # By salt and prompt while a request uses them: the choices of a request share an index.
        self._prompts: WeakValueDictionary[Hashable, NgramIndex] = WeakValueDictionary()
        self._rates = NgramRates(0.99)  # of all requests

    def drafter(
        self, prompt: tuple[int, ...], salt: Hashable, *, alone: bool = False
    ) -> "NgramDrafter":
        """A drafter for a request; if `alone`, it uses no earlier answers."""
        key = salt, prompt
        index = self._prompts.get(key)
        if index is None:
            index = self._prompts[key] = NgramIndex(prompt)
        return NgramDrafter(index, self._rates, None if alone else self._texts.get(salt))

    def keep(self, salt: Hashable, answer: Sequence[int]) -> None:
        """Add an answer to those of its salt."""
        if not self._limit or len(answer) <= GRAM:
            return
        text = self._texts.pop(salt, None)
        if text is None:
            text = NgramIndex()
        else:
            self.nbytes -= text.nbytes
        text.extend([_SEPARATOR, *answer])
        if text.nbytes > self._limit:
            # At most 16 bytes per token; cut to half of the limit, so that this is rare.
            text = NgramIndex(text.tokens[-(self._limit // 32) :])
        self._texts[salt] = text
        self.nbytes += text.nbytes
        while self.nbytes > self._limit:
            self.nbytes -= self._texts.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        self._texts.clear()
        self.nbytes = 0


class NgramDrafter:
    """A `HostDrafter`: its run follows a match of `match` tokens.

    Runs are compared with the tokens that come, whether they were drafted or not, so acceptance is
    known before a run is used.
    """

    def __init__(self, prompt: NgramIndex, pool: NgramRates, others: NgramIndex | None) -> None:
        # The answer, after as many tokens of the prompt as a match may have.
        self._text, self._prompt = NgramIndex(prompt.tokens[-MOST_MATCH:]), prompt
        self._others, self._pool = others, pool
        self._rates = NgramRates(0.97)
        self._source, self._at = self._text, 0
        self.match = 0
        self.next_run: Sequence[int] = ()

    @property
    def of_others(self) -> bool:
        """True if the run is from an earlier answer, not from the request's prompt or answer."""
        return self._source is self._others

    def extend(self, tokens: Sequence[int]) -> None:
        """Count how far the run was right, and look for the next one."""
        num_right = _num_equal(self.next_run, tokens)
        is_miss = num_right < min(len(self.next_run), len(tokens))
        for rates in (self._rates, self._pool):
            rates.observe(self.match, num_right, missed=is_miss)
        goes_on = 0 < num_right == len(tokens)
        self._text.extend(tokens)
        self._at, self.match = self._at + num_right, min(self.match + num_right, MOST_MATCH)
        if not goes_on or self.match < _GOOD_MATCH or self._at >= len(self._source.tokens):
            self._look()
        self.next_run = self._source.tokens[self._at : self._at + MAX_RUN] if self.match else ()
        if self._source is self._text and 0 < len(self.next_run) < MAX_RUN:
            # The run reaches the end of the text: it repeats itself.
            self.next_run = (self.next_run * MAX_RUN)[:MAX_RUN]
        if _SEPARATOR in self.next_run:
            self.next_run = self.next_run[: self.next_run.index(_SEPARATOR)]

    def cumulative_acceptance(self, ahead: int) -> list[float]:
        """Of the first, second, .. token of the run after `ahead` others; [] if that is too low.

        A window in flight may emit the others.
        """
        count = min(len(self.next_run), ahead + MAX_HOST_DRAFTS)
        acceptance = self._rates.cumulative_acceptance(self.match, count, self._pool)[ahead:]
        return acceptance if acceptance and acceptance[0] >= _LEAST_ACCEPTANCE else []

    def _look(self) -> None:
        self._source, self.match, self._at = self._text, 0, 0
        for source in (self._text, self._prompt, self._others):
            if source is not None and self.match < _GOOD_MATCH:
                match, at = source.find(self._text.tokens)
                if match > self.match:
                    self._source, self.match, self._at = source, match, at
