"""A hub on loopback: one repository's files by HEAD and (ranged) GET, and a log of the requests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.loopback import LoopbackServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """What is served, how it fails, and what was asked for.

    Args:
        repo_id: the one repository.
        files: their contents, by name.
        break_after: file -> how many bytes come before each connection breaks, one per connection.
        status: file -> an HTTP status to answer its GETs with.
        ranges: whether ranged requests are honoured.
        log: (method, file, range) of each request.
    """

    repo_id: str
    files: dict[str, bytes]
    break_after: dict[str, list[int]] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    ranges: bool = True
    log: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    @classmethod
    def of(cls, repo_id: str, directory: Path) -> FakeHub:
        """The files of a directory."""
        return cls(repo_id, {p.name: p.read_bytes() for p in directory.iterdir()})

    @property
    def downloaded(self) -> set[str]:
        """Files whose contents were asked for."""
        return {name for method, name, _ in self.log if method == "GET"}

    @contextlib.contextmanager
    def serve(self) -> Iterator[FakeHub]:
        """Serve while the context lasts."""
        hub = self

        class Handler(_Handler):
            state = hub

        server = LoopbackServer(Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        self.url = server.url
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{self.state.repo_id}/"):
            self._answer_api(path)
            return
        parts = path.split("/resolve/")
        if len(parts) != 2 or parts[0] != f"/{self.state.repo_id}":
            self._fail(404, "RepoNotFound")
            return
        revision, _, name = parts[1].partition("/")
        self.state.log.append((self.command, name, self.headers["Range"]))
        if revision not in ("main", "v1", COMMIT):
            self._fail(404, "RevisionNotFound")
        elif name not in self.state.files:
            self._fail(404, "EntryNotFound")
        elif body and name in self.state.status:
            self._fail(self.state.status[name], "Trouble")
        else:
            self._send(name, self.state.files[name], body=body)

    def _answer_api(self, path: str) -> None:
        """The commit, or the list of files; what a listing is made of is not logged."""
        files = self.state.files
        answer: object = {"_id": "1", "id": self.state.repo_id, "sha": COMMIT}
        if "/tree/" in path:
            answer = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in files.items()
            ]
        elif isinstance(answer, dict):
            answer["siblings"] = [{"rfilename": name} for name in files]
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _send(self, name: str, content: bytes, *, body: bool) -> None:
        digest = hashlib.sha256(content).hexdigest()
        start, stop = self._range(len(content))
        whole = (start, stop) == (0, len(content))
        self.send_response(200 if whole else 206)
        self.send_header("Content-Length", str(stop - start))
        if not whole:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.send_header("ETag", f'"{digest}"')
        self.send_header("X-Linked-Etag", f'"{digest}"')
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if not body:
            return
        breaks = self.state.break_after.get(name, [])
        if breaks:
            self.wfile.write(content[start : start + breaks.pop(0)])
            self.close_connection = True
            return
        self.wfile.write(content[start:stop])

    def _range(self, size: int) -> tuple[int, int]:
        asked = self.headers["Range"]
        if not asked or not self.state.ranges:
            return 0, size
        first, _, last = asked.removeprefix("bytes=").partition("-")
        return int(first), min(int(last) + 1, size) if last else size

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
