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
        files: contents by name.
        status: file -> an HTTP status to answer its GETs with.
        log: (method, file, range) of each request but listings.
    """

    repo_id: str
    files: dict[str, bytes]
    status: dict[str, int] = field(default_factory=dict)
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
        server = LoopbackServer(type("Handler", (_Handler,), {"hub": self}))
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
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        if path.startswith(f"/api/models/{hub.repo_id}/"):
            self._send(200, json.dumps(self._listing(path)).encode())
            return
        repo, _, rest = path.partition("/resolve/")
        revision, _, name = rest.partition("/")
        if repo != f"/{hub.repo_id}":
            self._send(404, code="RepoNotFound")
            return
        hub.log.append((self.command, name, self.headers["Range"]))
        if revision not in ("main", "v1", COMMIT):
            self._send(404, code="RevisionNotFound")
        elif name not in hub.files:
            self._send(404, code="EntryNotFound")
        elif self.command == "GET" and name in hub.status:
            self._send(hub.status[name], code="Trouble")
        else:
            self._send_file(hub.files[name])

    def _listing(self, path: str) -> object:
        files = self.hub.files
        if "/tree/" in path:
            fixed = {"type": "file", "oid": "0" * 40}
            return [{**fixed, "path": name, "size": len(data)} for name, data in files.items()]
        siblings = [{"rfilename": name} for name in files]
        return {"_id": "1", "id": self.hub.repo_id, "sha": COMMIT, "siblings": siblings}

    def _send_file(self, content: bytes) -> None:
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        headers = {"ETag": etag, "X-Linked-Etag": etag, "X-Linked-Size": str(len(content))}
        headers |= {"X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = self.headers["Range"]
        if not asked:
            self._send(200, content, headers)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last or len(content)) + 1]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self._send(206, part, headers)

    def _send(self, status: int, content: bytes = b"", headers=None, code: str = "") -> None:
        self.send_response(status)
        for name, value in {"X-Error-Code": code, **(headers or {})}.items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
