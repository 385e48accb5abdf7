"""Standard output whose reader has gone, as in `mlx-mtp generate hi | head -c 1`."""

from __future__ import annotations

import os
import sys
from typing import TextIO

CLOSED_PIPE_STATUS = 141
"""What a shell reports for a program that SIGPIPE ended."""


def print_or_discard(text: str) -> None:
    """Print; where nobody reads any more, nothing is printed from now on."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard(sys.stdout)


def discard(*streams: TextIO) -> None:
    """Send what is still written, by anyone, nowhere: at exit Python flushes what is left."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
