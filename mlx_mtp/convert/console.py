"""Lines and progress bars, or lines alone where nobody watches."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from mlx_mtp.units import size_text

_BAR_WIDTH = 30
_SECONDS_BETWEEN_DRAWS = 0.1


class Console:
    """What the converter tells while it works.

    Args:
        out: for lines.
        err: for warnings and bars; bars are drawn only if it is a terminal.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out, self._err = out or sys.stdout, err or sys.stderr

    def say(self, text: str) -> None:
        """One line."""
        print(text, file=self._out, flush=True)

    def warn(self, text: str) -> None:
        """One line that should not be missed."""
        print(f"warning: {text}", file=self._err, flush=True)

    @contextlib.contextmanager
    def progress(self, label: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
        """A bar, or a line before and one after, of work counted in bytes.

        Args:
            label: what is done.
            total: bytes to do.
            done: bytes done before.

        Yields:
            To be called with the number of bytes just done.
        """
        start = time.perf_counter()
        if self._err.isatty():
            bar = _Bar(label, total, done, self._err)
            try:
                yield bar.advance
            finally:
                bar.clear()
        else:
            yield _Lines(label, total, done, self.say).advance
        self.say(f"{label}: {size_text(total - done)} in {time.perf_counter() - start:.1f} s")


class _Lines:
    """A line at the start and at each quarter."""

    def __init__(self, label: str, total: int, done: int, say: Callable[[str], None]) -> None:
        self._label, self._total, self._done, self._say = label, max(total, 1), done, say
        self._quarter = self._quarters()
        say(f"{label}: {size_text(total - done)} to do")

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._quarter < self._quarters() < 4:
            self._quarter = self._quarters()
            self._say(f"{self._label}: {size_text(self._done)} of {size_text(self._total)}")

    def _quarters(self) -> int:
        return 4 * self._done // self._total


class _Bar:
    def __init__(self, label: str, total: int, done: int, stream: TextIO) -> None:
        self._label, self._total, self._done, self._stream = label, max(total, 1), done, stream
        self._start_done, self._start = done, time.perf_counter()
        self._drawn = -_SECONDS_BETWEEN_DRAWS
        self._length = 0
        self.advance(0)

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.perf_counter()
        if now - self._drawn < _SECONDS_BETWEEN_DRAWS:
            return
        self._drawn = now
        share = min(self._done / self._total, 1.0)
        filled = round(share * _BAR_WIDTH)
        rate = (self._done - self._start_done) / max(now - self._start, 1e-9)
        text = (
            f"{self._label} [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {share:4.0%} "
            f"{size_text(self._done)} of {size_text(self._total)}, {size_text(round(rate))}/s"
        )
        self._stream.write("\r" + text.ljust(self._length))
        self._stream.flush()
        self._length = len(text)

    def clear(self) -> None:
        self._stream.write("\r" + " " * self._length + "\r")
        self._stream.flush()
