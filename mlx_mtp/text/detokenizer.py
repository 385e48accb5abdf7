"""Tokens to text, one at a time, in whole characters and up to a stop string."""

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Detokenizer:
    """Returns one sequence's text as soon as it is certain.

    The bytes of an unfinished character are held until the character is complete, and text that may
    begin one of `stops` until it does or doesn't. Nothing after a stop string is returned, and the
    string itself only if `include_stop`. Stop strings within the first `min_tokens` don't count.
    """

    def __init__(
        self,
        text_bytes: Callable[[int], bytes],
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self.include_stop = include_stop
        self._text_bytes = text_bytes
        self._too_early = min_tokens  # how many more tokens can't complete a stop string
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stops)
        self._held = ""
        self.num_decoded = 0  # characters, those held included
        self.stop: str | None = None  # the stop string that ended the text

    def push(self, token_id: int) -> str:
        """Read one token; return the text that is now certain."""
        self._too_early -= 1
        return self._release(self._utf8.decode(self._text_bytes(token_id)))

    def flush(self) -> str:
        """End the sequence; return what was held, with U+FFFD for an unfinished character."""
        text = self._release(self._utf8.decode(b"", final=True))
        if self.stop is None:
            text += self._held
            self._held = ""
        return text

    def _release(self, new: str) -> str:
        if self.stop is not None:
            return ""
        self.num_decoded += len(new)
        text = self._held + new
        # The match that ends first does not depend on how the text came in chunks; of two that end
        # together the longer one hides more.
        stops = self._stops if self._too_early < 0 else ()
        matches = [
            (at + len(stop), at, stop) for stop in stops if (at := self._find(stop, text)) >= 0
        ]
        if matches:
            end, start, self.stop = min(matches)
            self._held = ""
            return text[: end if self.include_stop else start]
        sure = len(text) - max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[sure:]
        return text[:sure]

    def _find(self, stop: str, text: str) -> int:
        # A match that ended before this text was too early.
        return text.find(stop, max(len(self._held) - len(stop) + 1, 0))


class Echo(NamedTuple):
    """A prompt as the beginning of its completion."""

    text: str
    token_ids: Sequence[int] = ()  # empty unless logprobs go with them
    ends: Sequence[int] = ()  # of each token, in characters of the text


def echo_of(
    given: str | list[int],
    token_ids: Sequence[int],
    token_bytes: Callable[[int], bytes],
    *,
    with_tokens: bool,
) -> Echo:
    """The echo of a prompt: a text as it was given, token ids with their special tokens."""
    if isinstance(given, str) and not with_tokens:
        return Echo(given)
    decoder = Detokenizer(token_bytes)
    decoded = [(decoder.push(token), decoder.num_decoded) for token in token_ids]
    pieces, ends = zip(*decoded)
    text = given if isinstance(given, str) else "".join((*pieces, decoder.flush()))
    return Echo(text, token_ids, ends) if with_tokens else Echo(text)


def _begun(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
