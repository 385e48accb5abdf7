"""A proxy between a client and the server that keeps what both say."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from tests.loopback import LoopbackServer

SECONDS = 600
_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "host", "keep-alive"}


@dataclass
class Exchange:
    """One request and what became of it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int = 0
    answer: bytearray = field(default_factory=bytearray)


class Recorder:
    """The exchanges so far, in the order of their requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.exchanges: list[Exchange] = []


@contextmanager
def recording(server_url: str) -> Iterator[Recorder]:
    """Forward to `server_url` from a port of its own, byte by byte as the server sends."""
    target = urlsplit(server_url).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {k.lower(): v for k, v in self.headers.items()}
            body = json.loads(content) if content else None
            exchange = Exchange(self.command, self.path, headers, body)
            recorder.exchanges.append(exchange)
            sent = {k: v for k, v in headers.items() if k not in _HOP_BY_HOP}
            connection = HTTPConnection(target, timeout=SECONDS)
            try:
                connection.request(self.command, self.path, content, sent)
                self._pass_on(connection, exchange)
            except OSError:
                self.close_connection = True  # Either side went away.
            finally:
                connection.close()

        def _pass_on(self, connection: HTTPConnection, exchange: Exchange) -> None:
            answer = connection.getresponse()
            exchange.status = answer.status
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP_BY_HOP | {"server", "date"}:
                    self.send_header(name, value)
            # Its end is the connection's: no framing of its own to get wrong.
            self.send_header("connection", "close")
            self.end_headers()
            while chunk := answer.read1(1 << 16):
                exchange.answer += chunk
                self.wfile.write(chunk)
                self.wfile.flush()
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"):
        setattr(Handler, f"do_{method}", Handler.forward)
    proxy = LoopbackServer(Handler)
    proxy.daemon_threads = True
    recorder = Recorder(proxy.url)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield recorder
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
