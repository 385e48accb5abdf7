"""The time that a self-test may take."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """Counts down from when it is made.

    Args:
        seconds: to be spent.
        clock: tells the seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds = seconds
        self._began = clock()

    def spent(self) -> float:
        """Seconds so far."""
        return self._clock() - self._began

    def left(self) -> float:
        """Seconds still to be spent; 0 when there are none."""
        return max(0.0, self.seconds - self.spent())
