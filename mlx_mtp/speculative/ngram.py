"""N-gram drafts: the tokens that followed an earlier occurrence of the text's last tokens.

Also known as prompt lookup (vLLM's ngram proposer). An edited file is mostly a copy of the prompt,
and an agent repeats its earlier answers. The last tokens are searched in the request itself, then
in earlier answers with the same cache_salt; the tokens after the longest match are the drafts.
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

GRAM = 3  # tokens of an indexed n-gram: the minimum length of a match
MOST_MATCH = 127  # maximum length of a match, in tokens; longer matches are cut to it
_MOST_TRIED = 16  # maximum number of occurrences that are compared, the latest first
_GOOD_MATCH = 16  # tokens; while a match of at least this length goes on, no other is searched
_LEAST_ACCEPTANCE = 0.3  # minimum probability of the first draft; below it no run is offered
_FIRST_ENTRIES = 256  # entries of a new hash table
OBJECTS = 640  # bytes of an index and of its key, without the index's arrays
_FACTOR, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
_SEPARATOR = -1  # between answers; not a token's id
_PRIOR_TRIALS = 2.0  # weight, in trials, of the prior in the rates of all requests
_POOL_TRIALS = 64.0  # weight, in trials, of the rates of all requests in those of one request
_PRIORS = (0.35, 0.6, 0.8, 0.9, 0.95, 0.97)  # prior rates by class of match length
# The class of each match length; classes begin at 0, 4, 8, 16, 32 and 64 tokens.
_CLASSES = [min(max(n.bit_length() - 2, 0), 5) for n in range(MOST_MATCH + MAX_RUN + 1)]


class NgramIndex:
    """A hash table of the places of a text's n-grams, each chained to the place before it.

    A place is the index of the token after an n-gram. Takes 8 bytes per token, 4 per entry of the
    table (at most 2 entries per token, but at least 256 entries), and `OBJECTS`.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = array("i")
        self._before = array("i")  # by place: the previous place in its entry; 0: none
        self._heads = array("i", bytes(4 * _FIRST_ENTRIES))  # by entry: the latest place
        self.extend(tokens)

    @property
    def nbytes(self) -> int:
        return OBJECTS + 4 * (len(self.tokens) + len(self._before) + len(self._heads))

    def extend(self, tokens: Sequence[int]) -> None:
        first = max(len(self.tokens), GRAM)
        self.tokens.extend(tokens)
        if len(self.tokens) > len(self._heads):
            self._build()
            return
        self._before.extend([0] * len(tokens))
        for place in range(first, len(self.tokens)):
            entry = self._entry(self.tokens, place)
            self._before[place], self._heads[entry] = self._heads[entry], place

    def find(self, text: Sequence[int]) -> tuple[int, int]:
        """Returns the length of the longest match with the end of `text`, and the place after it.

        Returns (0, 0) if there is no match. A match at the very end of the index does not count, as
        no token follows it.
        """
        best = at = 0
        place = self._heads[self._entry(text, len(text))] if len(text) >= GRAM else 0
        for _ in range(_MOST_TRIED):
            if place == 0 or best == MOST_MATCH:
                break
            # A longer match has one more equal token, so most places need no comparison.
            if best < min(place, len(text)) and self.tokens[place - best - 1] == text[-best - 1]:
                before = self.tokens[max(place - MOST_MATCH, 0) : place]
                if (length := _num_equal(reversed(before), reversed(text))) > best:
                    best, at = length, place
            place = self._before[place]
        return (best, at) if best >= GRAM else (0, 0)

    def _entry(self, tokens: Sequence[int], place: int) -> int:
        """Returns the table's entry for the `GRAM` tokens before `place`."""
        return int(_hash(*tokens[place - GRAM : place])) & (len(self._heads) - 1)

    def _build(self) -> None:
        """Index all tokens with NumPy: about 0.1 microseconds per token."""
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
        heads[entries] = places  # If an entry occurs several times, its last place stays.
        self._heads, self._before = array("i", heads.tobytes()), array("i", before.tobytes())


def _hash(a: Any, b: Any, c: Any) -> Any:
    """Returns the 32-bit hash of three tokens, or the hashes of three uint64 arrays [N]."""
    return (((a * _FACTOR + b) * _FACTOR + c) * _FACTOR & _WORD) >> 32


def _num_equal(some: Iterable[int], others: Iterable[int]) -> int:
    """Returns the number of equal tokens before the first difference."""
    return sum(takewhile(bool, map(eq, some, others)))


class NgramRates:
    """Acceptance rates by class of match length; a trial scales earlier ones by `memory`."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._tried, self._accepted = [0.0] * len(_PRIORS), [0.0] * len(_PRIORS)

    def rate(self, index: int, prior: float, weight: float) -> float:
        return (self._accepted[index] + weight * prior) / (self._tried[index] + weight)

    def observe(self, match: int, num_accepted: int, *, missed: bool) -> None:
        """Count accepted tokens after a match, which lengthen it, and a rejected one, if any."""
        for length in range(match, match + num_accepted + missed):
            index, is_accepted = _CLASSES[length], length < match + num_accepted
            self._tried[index] = self._tried[index] * self._memory + 1.0
            self._accepted[index] = self._accepted[index] * self._memory + is_accepted

    def cumulative_acceptance(self, match: int, count: int, pool: "NgramRates") -> list[float]:
        """Returns the cumulative acceptance of `count` tokens; `pool`: rates of all requests."""
        classes = _CLASSES[match : match + count]
        priors = {index: pool.rate(index, _PRIORS[index], _PRIOR_TRIALS) for index in set(classes)}
        rates = {index: self.rate(index, prior, _POOL_TRIALS) for index, prior in priors.items()}
        return list(accumulate(map(rates.__getitem__, classes), mul))


class NgramSource:
    """A source of `HostSources`: earlier answers by salt, in at most `limit` bytes.

    Beyond the limit, the least recently used salt is dropped first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._texts: OrderedDict[Hashable, NgramIndex] = OrderedDict()
        self.nbytes = 0
        # Prompts of running requests, by salt and prompt: a request's n choices share an index.
        self._prompts: WeakValueDictionary[Hashable, NgramIndex] = WeakValueDictionary()
        self._rates = [NgramRates(0.997), NgramRates(0.997)]  # of all requests, by `of_others`

    def drafter(
        self, prompt: tuple[int, ...], salt: Hashable, *, alone: bool = False
    ) -> "NgramDrafter":
        """Returns a drafter for a request; if `alone`, it uses no earlier answers."""
        key = salt, prompt
        index = self._prompts.get(key) or self._prompts.setdefault(key, NgramIndex(prompt))
        others = None if alone else self._texts.get(salt)
        if others is not None:
            self._texts.move_to_end(salt)
        return NgramDrafter(index, self._rates, others)

    def keep(self, salt: Hashable, answer: Sequence[int]) -> None:
        """Add an answer to the text of its salt."""
        if not self._limit or len(answer) <= GRAM:
            return
        text = self._texts.pop(salt, None) or NgramIndex()
        self.nbytes -= text.nbytes if text.tokens else 0
        text.extend([_SEPARATOR, *answer])
        if text.nbytes > self._limit:
            # An index takes at most 16 bytes per token. Cut to half of the limit, so cuts are rare.
            text = NgramIndex(text.tokens[-(self._limit // 32) :])
        self._texts[salt] = text
        self.nbytes += text.nbytes
        while self.nbytes > self._limit:
            self.nbytes -= self._texts.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        self._texts.clear()
        self.nbytes = 0


class NgramDrafter:
    """A `HostDrafter`: its run is the tokens after a match of `match` tokens.

    Each run is compared with the tokens that are read, whether it was verified or not, so there are
    acceptance rates before any run is used: for copies from the request, and from earlier answers.
    """

    def __init__(
        self, prompt: NgramIndex, pools: Sequence[NgramRates], others: NgramIndex | None
    ) -> None:
        # The answer, after the prompt's last tokens: a match can begin in the prompt.
        self._text, self._prompt = NgramIndex(prompt.tokens[-MOST_MATCH:]), prompt
        self._others = others
        # The request's own rates and those of all requests, by `of_others`.
        self._rates = [(NgramRates(0.97), pool) for pool in pools]
        self._source, self._at, self.match = self._text, 0, 0
        self.next_run: Sequence[int] = ()

    @property
    def of_others(self) -> bool:
        return self._source is self._others

    def extend(self, tokens: Sequence[int]) -> None:
        """Read tokens of the answer: count how many the run predicted, and set the next run."""
        num_right = _num_equal(self.next_run, tokens)
        is_miss = num_right < min(len(self.next_run), len(tokens))
        for rates in self._rates[self.of_others]:
            rates.observe(self.match, num_right, missed=is_miss)
        goes_on = 0 < num_right == len(tokens)
        self._text.extend(tokens)
        self._at, self.match = self._at + num_right, min(self.match + num_right, MOST_MATCH)
        if not goes_on or self.match < _GOOD_MATCH or self._at >= len(self._source.tokens):
            self._look()
        self.next_run = self._source.tokens[self._at : self._at + MAX_RUN] if self.match else ()
        if self._source is self._text and 0 < len(self.next_run) < MAX_RUN:
            # The run reaches the end of the text: assume that the text goes on repeating it.
            self.next_run = (self.next_run * MAX_RUN)[:MAX_RUN]
        if _SEPARATOR in self.next_run:
            self.next_run = self.next_run[: self.next_run.index(_SEPARATOR)]

    def cumulative_acceptance(self, ahead: int) -> list[float]:
        """Returns the cumulative acceptance of the run after its first `ahead` tokens.

        A window in flight can emit those tokens. [] if acceptance is below `_LEAST_ACCEPTANCE`.
        """
        count = min(len(self.next_run), ahead + MAX_HOST_DRAFTS)
        if count <= ahead:
            return []
        rates, pool = self._rates[self.of_others]
        acceptance = rates.cumulative_acceptance(self.match, count, pool)[ahead:]
        return acceptance if acceptance[0] >= _LEAST_ACCEPTANCE else []

    def _look(self) -> None:
        self._source, self.match, self._at = self._text, 0, 0
        for source in (self._text, self._prompt, self._others):
            if source is not None and self.match < _GOOD_MATCH:
                match, at = source.find(self._text.tokens)
                if match > self.match:
                    self._source, self.match, self._at = source, match, at
