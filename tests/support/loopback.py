"""The HTTP server that tests build their fakes on."""

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class LoopbackServer(ThreadingHTTPServer):
    """Many connections at once on a loopback port; says nothing of clients that leave."""

    request_queue_size = 128

    def __init__(self, handler: type) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # No fault, and told on the standard error of whichever test runs by then: a connection's
        # thread may learn of it when its own test has ended.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"
