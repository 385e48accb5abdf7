"""Sources of drafts on the host, which a row can verify in place of the MTP head's drafts.

The head drafts on the device, after a window and for the next one. These sources, named as in
`config.HOST_DRAFTS`, draft on the host before a window is launched, from tokens that were read.
"""

from collections.abc import Hashable, Sequence
from typing import Protocol

from mlx_mtp.speculative.ngram import NgramSource


class HostDrafter(Protocol):
    """Proposes drafts for one request."""

    @property
    def next_run(self) -> Sequence[int]:
        """The tokens expected after the last one that was read, at most `MAX_RUN`."""

    @property
    def of_others(self) -> bool:
        """True if the run is from another request, possibly of another client."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Read more tokens of the answer; see `RowDrafting.read`."""

    def cumulative_acceptance(self, ahead: int) -> list[float]:
        """Returns the acceptance up to each token after the first `ahead`; [] if it has no run."""


class HostSources:
    """The sources in use, by name; each keeps at most `limit` bytes of earlier answers."""

    def __init__(self, names: Sequence[str] = (), limit: int = 0) -> None:
        self._sources = {name: NgramSource(limit) for name in names}

    def drafters(
        self, prompt: tuple[int, ...], salt: Hashable, *, alone: bool = False
    ) -> dict[str, HostDrafter]:
        """Returns a request's drafters by source; if not `alone`, with answers of the same salt."""
        return {name: s.drafter(prompt, salt, alone=alone) for name, s in self._sources.items()}

    def keep(self, salt: Hashable, answer: Sequence[int]) -> None:
        """Add a finished answer to the sources."""
        for source in self._sources.values():
            source.keep(salt, answer)

    def clear(self) -> None:
        for source in self._sources.values():
            source.clear()
