"""What a decoding step costs, told from when steps are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx_mtp.engine.window import Launched


class StepTimer:
    """Times steps, and says which times mean something.

    With look-ahead a step runs while the host launches the one behind it, and where one ends and
    the other begins can't be seen from here. So a time counts only where the step, the one read
    before it and the one launched behind it had the same rows, and the step and the one behind it
    verified as many drafts as they proposed, and nothing was prefilled beside them.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: Sequence[Launched] = ()
        self._at = 0.0

    def lap(self, read: Sequence[Launched], behind: Sequence[Launched]) -> float | None:
        """A step was read just now.

        Args:
            read: its windows.
            behind: what was launched last: with look-ahead the next step, else the same.

        Returns:
            Seconds since the step before it was read; None where they are not its cost.
        """
        now = self._clock()
        seconds = now - self._at
        last, self._last, self._at = self._last, read, now
        rows = _rows(last)
        if rows is None or not (_steady(read) and _steady(behind)):
            return None
        same = rows == _rows(read) == _rows(behind)
        alike = same and read[0].num_proposed == behind[0].num_proposed
        return seconds if alike else None


def _rows(step: Sequence[Launched]) -> tuple[object, ...] | None:
    """The rows of a step that decoded and did nothing else."""
    if len(step) != 1 or step[0].is_prefill or step[0].error is not None:
        return None
    return step[0].sequences


def _steady(step: Sequence[Launched]) -> bool:
    """It decoded, and verified as many drafts as it proposed."""
    return _rows(step) is not None and step[0].num_positions[0] == step[0].num_proposed + 1
