"""The session's server process, on the bundled model with MTP, for all clients."""

import pytest

from tests.process import Server
from tests.server.conftest import serve, tokenizer

__all__ = ["serve", "tokenizer"]


@pytest.fixture(scope="session")
def server(mtp_server: Server) -> Server:
    return mtp_server
