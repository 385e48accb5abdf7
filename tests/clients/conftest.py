"""The session's server process, on the bundled model with MTP, for all clients."""

import pytest

from tests.server.conftest import serve, tokenizer
from tests.support.process import Server

__all__ = ["serve", "tokenizer"]


@pytest.fixture(scope="session")
def server(mtp_server: Server) -> Server:
    return mtp_server
