"""Waiting for a condition that another thread or process brings about."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Poll until `condition` holds; fails after a time that is long even on a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for has not come about"
        time.sleep(0.01)
