"""What goes wrong in the engine: errors of a step told apart, and how often it may be restarted."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable

from mlx_mtp.errors import StepError, StepMemoryError

MAX_RESTARTS = 3
"""The engine's thread is started again so many times in `RESTART_WINDOW` seconds, and no more."""
RESTART_WINDOW = 60.0

# mlx has no type for it: the words of its allocators, of Metal's command buffers, and of CUDA.
_NO_MEMORY = re.compile(
    r"\[(metal::)?malloc\w*\]|Insufficient Memory|out of memory|MemoryAllocation", re.IGNORECASE
)


def step_error(error: Exception) -> StepError:
    """What the requests in a step that raised `error` end with."""
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        return StepMemoryError(
            f"There was not enough memory for the step that this request was in ({what}). Try "
            "again when fewer requests run, or with a shorter prompt; a server started with a "
            "smaller --max-num-seqs or --prefill-step-size needs less."
        )
    return StepError(f"The step that this request was in failed: {what}")


class RestartBudget:
    """Says whether the engine's thread may be started again.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS)

    def take(self) -> bool:
        """Use up one restart, if there is one."""
        now = self._clock()
        full = len(self._restarts) == MAX_RESTARTS
        if full and now - self._restarts[0] < RESTART_WINDOW:
            return False
        self._restarts.append(now)
        return True
