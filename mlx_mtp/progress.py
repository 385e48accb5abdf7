"""The progress of long work: a bar in a terminal, and a line every 10 seconds elsewhere."""

import sys
from typing import Any

from tqdm import tqdm

from mlx_mtp.console import one_line, say

_DELAY_SECONDS = 0.5  # shorter work needs no bar
_LINE_SECONDS = 10.0
_LINE = "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt}, {rate_fmt}, {remaining} left"


class Bar(tqdm):
    """tqdm's bar on standard error, of bytes by default, with sizes and time left."""

    monitor_interval = 0  # no thread of tqdm's own

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lines = not sys.stderr.isatty()
        defaults = {"unit": "B", "unit_scale": True, "delay": _DELAY_SECONDS}
        if self._lines:
            defaults |= dict.fromkeys(("delay", "mininterval", "maxinterval"), _LINE_SECONDS)
            defaults |= {"bar_format": _LINE, "leave": False}
        super().__init__(*args, **defaults | kwargs)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Write the bar, or, without a terminal, a new line."""
        text = one_line(str(self) if msg is None else msg)  # It can contain names of files.
        if not self._lines:
            super().display(text, pos)
        elif text:
            say(text, file=sys.stderr)
