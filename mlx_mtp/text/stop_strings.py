"""Where a stop string ends an answer's text."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on until one of some strings occurs in it.

    Text that may begin one is held until it does or doesn't. Nothing after the string is passed on,
    and the string itself only if `include`. Strings that end within the first `min_tokens` tokens
    don't count.
    """

    def __init__(
        self, stops: Sequence[str] = (), min_tokens: int = 0, include: bool = False
    ) -> None:
        self.include = include
        self.found: str | None = None  # the string that ended the text
        self._stops = tuple(stops)
        self._too_early = min_tokens  # how many more tokens can't complete a string
        self._held = ""

    def count_token(self) -> None:
        """The text that comes next is of one more token."""
        self._too_early -= 1

    def release(self, new: str) -> str:
        """Read some more text; return what is certain now."""
        if self.found is not None:
            return ""
        text = self._held + new
        # The match that ends first does not depend on how the text came in chunks; of two that end
        # together the longer one hides more.
        stops = self._stops if self._too_early < 0 else ()
        matches = [
            (at + len(stop), at, stop)
            for stop in stops
            # A match that ended before this text was too early.
            if (at := text.find(stop, max(len(self._held) - len(stop) + 1, 0))) >= 0
        ]
        if matches:
            end, start, self.found = min(matches)
            self._held = ""
            return text[: end if self.include else start]
        sure = len(text) - max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[sure:]
        return text[:sure]

    def flush(self) -> str:
        """The text is over: return what was held."""
        text, self._held = self._held, ""
        return text


def _begun(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
