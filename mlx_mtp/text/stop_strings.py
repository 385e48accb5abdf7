"""Finds the stop string that ends an answer's text."""

from collections.abc import Sequence


class StopStrings:
    """Releases an answer's text up to the first stop string.

    Text that can be the beginning of a stop string is held until that is decided. The stop string
    itself is released only if `include` is true. Stop strings that end within the first
    `min_tokens` tokens are ignored.
    """

    def __init__(
        self, stops: Sequence[str] = (), min_tokens: int = 0, include: bool = False
    ) -> None:
        self.include = include
        self.found: str | None = None  # the string that ended the text
        self._stops = tuple(stops)
        self._too_early = min_tokens  # number of next tokens that can't complete a string
        self._held = ""

    def count_token(self) -> None:
        """Count the token whose text is passed to `release` next."""
        self._too_early -= 1

    def release(self, new: str) -> str:
        """Read more text; returns the text that can be released now."""
        if self.found is not None:
            return ""
        text = self._held + new
        # Take the match that ends first, as it does not depend on how the text was divided. Of two
        # with the same end, take the longer one.
        stops = self._stops if self._too_early < 0 else ()
        matches = [
            (at + len(stop), at, stop)
            for stop in stops
            # A match that ends before the new text was ignored, as it came too early.
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
        """End the text; returns the text that was held."""
        text, self._held = self._held, ""
        return text


def _begun(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
