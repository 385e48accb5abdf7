"""Waiting for what another thread or process brings about."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object]) -> None:
    """Look again and again; fail after a minute, which is long for a busy machine too."""
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "what was waited for has not come about"
        time.sleep(0.01)
