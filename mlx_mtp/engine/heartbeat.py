"""Tells a step that hangs from one that takes its time.

The engine's thread says when a step begins and ends, and what it is; other threads ask how it goes.
What a step may take follows from what steps of its kind have taken: a chunk of 512 tokens takes
0.1 s here and 20 s there. Kinds that have not run yet may have to compile kernels first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

HANG_SECONDS = 4.0
"""A step may always take so long."""
SLOWNESS = 10.0
"""And so many times as long as the slowest recent step of its kind."""
NEW_KIND_SECONDS = 30.0
"""What a step of a kind that has not run may take: some kernels are compiled for a shape."""
START_SECONDS = 300.0
"""What building the runner and measuring step costs may take together, and each of the first steps,
which compile most kernels: about two minutes were seen on a fresh GPU machine."""
_FADE = 0.9
"""What a slow step still counts after the next one of its kind."""
_NUM_FIRST_STEPS = 2
"""With look-ahead, what the first step launches is waited for in the second."""

Kind = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Beat:
    """The step that runs."""

    began: float
    allowed: float
    name: str


class Heartbeat:
    """The engine's thread's pulse. `begin` and `end` are that thread's; `hang` is anybody's.

    Args:
        hang_seconds: what any step may take.
        clock: seconds.
    """

    def __init__(
        self, hang_seconds: float = HANG_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._hang_seconds = hang_seconds
        self._clock = clock
        self._slowest: dict[Kind, float] = {}
        self._seen: dict[object, int] = {}
        # One reference, replaced as a whole: readers need no lock.
        self._beat: _Beat | None = None
        self._kind: Kind | None = None

    def begin_start(self) -> None:
        """The runner is being built, and costs are measured."""
        self._kind = None
        self._beat = _Beat(self._clock(), START_SECONDS, "its start")

    def turn(self) -> None:
        """The thread has work; what it is will be told by `begin`."""
        self._kind = None
        self._beat = _Beat(self._clock(), self._hang_seconds, "the planning of a step")

    def begin(self, kind: Kind, name: str) -> None:
        """A step begins.

        Args:
            kind: steps of one kind cost about the same; its first part is the most general.
            name: for a person.
        """
        self._kind = kind
        self._beat = _Beat(self._clock(), self._allowed(kind), name)

    def end(self) -> None:
        """The step has ended; the thread is about to begin another, or waits for work."""
        beat, kind, self._beat, self._kind = self._beat, self._kind, None, None
        if beat is None or kind is None:
            return
        seconds = self._clock() - beat.began
        first = self._seen.get(kind[0], 0) < _NUM_FIRST_STEPS
        self._seen[kind[0]] = self._seen.get(kind[0], 0) + 1
        if first:
            return  # Mostly compiling.
        # Of a step that hung one learns little: should the machine have become slow, the next may
        # take twice as long.
        learnt = min(seconds, 2 * beat.allowed / SLOWNESS) if seconds > beat.allowed else seconds
        self._slowest[kind] = max(learnt, self._slowest.get(kind, 0.0) * _FADE)

    def hang(self) -> str | None:
        """Why the engine's thread is taken to hang; None while it is well."""
        beat = self._beat
        if beat is None:
            return None
        seconds = self._clock() - beat.began
        if seconds <= beat.allowed:
            return None
        return (
            f"the engine hangs: it has been in {beat.name} for {seconds:.1f} s, which may take "
            f"{beat.allowed:.1f} s"
        )

    def _allowed(self, kind: Kind) -> float:
        if self._seen.get(kind[0], 0) < _NUM_FIRST_STEPS:
            return START_SECONDS
        slowest = self._slowest.get(kind)
        if slowest is None:
            return max(NEW_KIND_SECONDS, self._hang_seconds)
        return max(self._hang_seconds, SLOWNESS * slowest)
