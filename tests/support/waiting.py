"""Waiting for what another thread or process brings about."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Look again and again; fail in the end: a minute is long for a busy machine too."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for has not come about"
        time.sleep(0.01)
