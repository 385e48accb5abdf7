"""One real server process on the bundled model, with MTP, for all clients."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.server.conftest import serve, tokenizer
from tests.test_server_process import Server, start

__all__ = ["serve", "tokenizer"]

MODEL = "mlx-mtp-demo"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """With float32, for the whole session."""
    flags = ("--enable-mtp", "--mtp-num-draft-tokens", "3", "--dtype", "float32")
    running = start(*flags)
    yield running
    with running.process as process:
        process.send_signal(signal.SIGINT)
