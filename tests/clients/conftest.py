"""One real server process on the bundled model, with MTP, for all clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process import Server, running
from tests.server.conftest import serve, tokenizer

__all__ = ["serve", "tokenizer"]

MODEL = "mlx-mtp-demo"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """With float32, for the whole session."""
    flags = ("--enable-mtp", "--mtp-num-draft-tokens", "3", "--dtype", "float32")
    with running(*flags) as server:
        yield server
