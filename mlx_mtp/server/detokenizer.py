"""Tokens to text, one at a time: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class Detokenizer:
    """One sequence's text, given out as soon as it is certain.

    Bytes of an unfinished character wait for the rest of it; text that may turn out to be the start
    of a stop string waits until it is, or isn't. Tokens go in singly, so what comes out over a
    whole sequence doesn't depend on how many of them a step brought.

    Args:
        text_bytes: the UTF-8 bytes that a token adds to the text, none for a special token.
        stops: strings that end the text; they and what follows are never given out.
    """

    def __init__(self, text_bytes: Callable[[int], bytes], stops: Sequence[str] = ()) -> None:
        self._text_bytes = text_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stops)
        self._held = ""
        self.num_decoded = 0
        """Characters decoded so far, held ones included."""
        self.stop: str | None = None
        """The stop string that was found; nothing more comes out."""

    @property
    def stopped(self) -> bool:
        """A stop string was found."""
        return self.stop is not None

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is now certain."""
        return self._release(self._utf8.decode(self._text_bytes(token_id)))

    def flush(self) -> str:
        """The sequence is over: return what was held, with U+FFFD for an unfinished character."""
        text = self._release(self._utf8.decode(b"", final=True))
        if not self.stopped:
            text += self._held
            self._held = ""
        return text

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        self.num_decoded += len(new)
        text = self._held + new
        found = self._stop_in(text)
        if found is not None:
            start, self.stop = found
            self._held = ""
            text = text[:start]
        else:
            keep = self._possible_stop(text)
            self._held = text[len(text) - keep :]
            text = text[: len(text) - keep]
        return text

    def _stop_in(self, text: str) -> tuple[int, str] | None:
        """Where a stop string begins, and which."""
        # The match that ends first is the one that a reader of single characters would meet first,
        # whatever the chunks; of two that end together the longer hides more.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1:] if found else None

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
