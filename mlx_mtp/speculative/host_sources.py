"""Sources of drafts on the host, which a verify window takes in place of the MTP head's drafts.

The head drafts on the device, after a window and for the next one. These sources draft on the
host, before a window is launched, from what has been read of their request. To add one: a module
with a class like `NgramSource`, its name in `config.HOST_DRAFTS`, and an entry in `_SOURCES`.
"""

from collections.abc import Hashable, Sequence
from typing import Protocol

from mlx_mtp.speculative.ngram import NgramSource


class HostDrafter(Protocol):
    """Proposes drafts for one request."""

    @property
    def next_run(self) -> Sequence[int]:
        """Tokens that should follow the last one that was read, at most `MAX_RUN`."""

    @property
    def of_others(self) -> bool:
        """True if the run is from another request, maybe another client's."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Read more tokens of the answer."""

    def cumulative_acceptance(self, ahead: int) -> list[float]:
        """Probabilities that the run is right up to its first, second, .. token behind `ahead`.

        The first `ahead` tokens are what a window in flight may bring. Empty: nothing is offered.
        """


_SOURCES = {"copy": NgramSource}


class HostSources:
    """The sources in use, by name; the answers that each remembers take at most `limit` bytes."""

    def __init__(self, names: Sequence[str] = (), limit: int = 0) -> None:
        self._sources = {name: _SOURCES[name](limit) for name in names}

    def drafters(
        self, prompt: tuple[int, ...], salt: Hashable, *, own_text_only: bool = False
    ) -> dict[str, HostDrafter]:
        """A request's drafters by source; if `own_text_only`, they read nothing of other requests.

        Requests share answers only if their `salt` is the same.
        """
        return {
            name: source.drafter(prompt, salt, alone=own_text_only)
            for name, source in self._sources.items()
        }

    def keep(self, salt: Hashable, answer: Sequence[int]) -> None:
        """Remember an answer that has ended."""
        for source in self._sources.values():
            source.keep(salt, answer)

    def clear(self) -> None:
        for source in self._sources.values():
            source.clear()
