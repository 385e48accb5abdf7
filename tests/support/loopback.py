"""The HTTP server that tests build their fakes on."""

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class LoopbackServer(ThreadingHTTPServer):
    """Serves many concurrent connections on a loopback port; ignores clients that disconnect."""

    request_queue_size = 128

    def __init__(self, handler: type) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A disconnect is no fault, and its message could appear in another test's stderr, because a
        # connection's thread can notice it after its own test has ended.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"
