"""HTTP as bytes, for requests that no client library would send; and checks of error bodies."""

from __future__ import annotations

import http.client
import io
import json
import socket
from typing import Any

from tests.server.conftest import Served


def request_bytes(
    method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b""
) -> bytes:
    """Returns a well-formed request, except for the fields in `headers`."""
    fields = {"Host": "localhost", "Content-Type": "application/json"}
    if body and "Transfer-Encoding" not in (headers or {}):
        fields["Content-Length"] = str(len(body))
    fields |= headers or {}
    lines = [f"{method} {path} HTTP/1.1", *(f"{key}: {value}" for key, value in fields.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class _Kept(io.BufferedReader):
    """Stays open after an answer: bytes that were read ahead belong to the next answer."""

    def close(self) -> None:
        """Do nothing: the owner of the socket closes it."""

    def makefile(self, _: str) -> _Kept:
        return self


def incoming(sock: socket.socket) -> _Kept:
    """Returns a connection's reader, for several answers in a row."""
    return _Kept(sock.makefile("rb", buffering=0))


class Answer:
    """One answer, read to its end."""

    def __init__(self, source: _Kept, method: str = "POST") -> None:
        response = http.client.HTTPResponse(source, method=method)
        response.begin()
        self.status = response.status
        self.headers = {key.lower(): value for key, value in response.getheaders()}
        self.body = response.read()

    def json(self) -> Any:
        return json.loads(self.body)


def exchange(client: Served, sent: bytes, *, end: bool = False) -> Answer:
    """Send bytes on a new connection and read one answer; `end` shuts the sending side down."""
    with socket.create_connection(client.address, timeout=30) as sock:
        sock.sendall(sent)
        if end:
            sock.shutdown(socket.SHUT_WR)
        method = sent.split(b" ", 1)[0].decode("latin-1")
        return Answer(incoming(sock), method if method in ("HEAD", "CONNECT") else "POST")


def error_of(answer: Any, path: str, status: int | None = None) -> str:
    """Returns an error's message, after checking the whole error against the API's format."""
    assert status in (None, getattr(answer, "status_code", None)), (path, answer)
    body = answer.json()
    error = body.pop("error")
    if path.startswith("/api/"):
        assert body == {}
        assert 0 < len(error) < 1000
        return str(error)
    assert isinstance(error["type"], str)
    assert 0 < len(error["message"]) < 1000
    if path.startswith(("/v1/messages", "/messages")):
        assert body == {"type": "error"}
        assert set(error) == {"type", "message"}
    else:
        assert body == {}
        assert set(error) == {"message", "type", "param", "code"}
        assert all(isinstance(error[name], str | None) for name in ("param", "code"))
    return error["message"]
