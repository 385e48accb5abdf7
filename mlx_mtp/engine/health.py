"""The health of the engine: hangs, errors of a step, and how often the thread is restarted."""

import re
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from mlx_mtp.errors import StepError, StepMemoryError

# A step hangs if it takes longer than the largest of these that apply to it.
HANG_SECONDS = 4.0  # for any step
SLOWNESS = 10.0  # times as long as the slowest recent step of its kind
NEW_KIND_SECONDS = 30.0  # for the first step of a kind: some kernels are compiled per shape
# For building the runner and measuring step costs, and for each of the first steps, which compile
# most kernels: two minutes were seen on a fresh GPU machine.
START_SECONDS = 300.0
_FADE = 0.9  # factor for the slowest step's time, with each later step of its kind
_NUM_FIRST_STEPS = 2  # with look-ahead the second step waits for what the first one launched

MAX_RESTARTS = 3  # of the engine, within `RESTART_WINDOW` seconds
RESTART_WINDOW = 60.0

# mlx has no exception type for this: texts of its allocators, Metal's command buffers and CUDA.
_NO_MEMORY = re.compile(
    r"\[(metal::)?malloc\w*\]|Insufficient Memory|out of memory|MemoryAllocation", re.IGNORECASE
)

StepKind = tuple[object, ...]
"""Steps of one kind cost about the same. The first element of a kind is the most general one:
"prefill" or "decode"."""


def step_error(error: BaseException) -> StepError:
    """Returns the error for the requests in a step that raised `error`."""
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        return StepMemoryError(
            f"There was not enough memory for the step that this request was in ({what}). Try "
            "again when fewer requests run, or with a shorter prompt; a server started with a "
            "smaller --max-num-seqs or --prefill-step-size needs less."
        )
    return StepError(f"The step that this request was in failed: {what}")


def acquire_restart(restarts: deque[float], now: float) -> bool:
    """Add a restart at `now` to the recent ones; returns False if there were too many."""
    while restarts and now - restarts[0] >= RESTART_WINDOW:
        restarts.popleft()
    if len(restarts) == MAX_RESTARTS:
        return False
    restarts.append(now)
    return True


class _Beat(NamedTuple):
    began: float
    allowed: float
    name: str
    kind: StepKind | None


class Heartbeat:
    """Detects a step that hangs. `hang` and `resume` are thread-safe.

    The time that a step is allowed follows from earlier steps of its kind: a chunk of 512 tokens
    takes 0.1 s on one machine and 20 s on another. A new kind may have to compile kernels first.
    """

    def __init__(
        self, hang_seconds: float = HANG_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._hang_seconds = hang_seconds
        self._clock = clock
        self._slowest: dict[StepKind, float] = {}
        self._seen = Counter[object]()
        self._beat: _Beat | None = None  # replaced as a whole: readers need no lock
        self._resumed = 0.0  # when the process last continued after a stop

    def begin(self, name: str, kind: StepKind | None = None, *, allowed: float = 0.0) -> None:
        """Note that work begins: a step of `kind`, or other work with `allowed` seconds of time."""
        if kind is not None and self._seen[kind[0]] < _NUM_FIRST_STEPS:
            allowed = START_SECONDS
        elif kind is not None:
            allowed = SLOWNESS * self._slowest[kind] if kind in self._slowest else NEW_KIND_SECONDS
        self._beat = _Beat(self._clock(), max(self._hang_seconds, allowed), name, kind)

    def end(self) -> None:
        """Note that the work has ended, and learn its time."""
        beat, self._beat = self._beat, None
        if beat is None or beat.kind is None:
            return
        kind, seconds = beat.kind, self._seconds_in(beat)
        self._seen[kind[0]] += 1
        if self._seen[kind[0]] <= _NUM_FIRST_STEPS:
            return  # They mostly compile.
        # A hang says little about the kind, but the machine may have become slow: the next step of
        # the kind is allowed twice as long as this one was.
        learnt = min(seconds, 2 * beat.allowed / SLOWNESS) if seconds > beat.allowed else seconds
        self._slowest[kind] = max(learnt, self._slowest.get(kind, 0.0) * _FADE)

    def hang(self) -> str | None:
        """Why the engine seems to hang; None while it does not."""
        beat = self._beat
        seconds = 0.0 if beat is None else self._seconds_in(beat)
        if beat is None or seconds <= beat.allowed:
            return None
        return (
            f"the engine hangs: it has been in {beat.name} for {seconds:.1f} s, which may take "
            f"{beat.allowed:.1f} s"
        )

    def resume(self) -> None:
        """Call after SIGCONT: the step in progress counts as begun now."""
        self._resumed = self._clock()

    def _seconds_in(self, beat: _Beat) -> float:
        return self._clock() - max(beat.began, self._resumed)
