"""A hub on loopback: one repository's files by HEAD and (ranged) GET, and a log of the requests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.loopback import LoopbackServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """What is served (`files`), how it fails, and what was asked for."""

    def __init__(self, repo_id: str, files: dict[str, bytes]) -> None:
        self.repo_id, self.files = repo_id, files
        self.trouble: dict[str, tuple[int, str]] = {}  # Status and code by file or repository.
        self.log: list[tuple[str, str, str | None]] = []  # Method, file and range, but of listings.

    @classmethod
    def of(cls, repo_id: str, directory: Path) -> FakeHub:
        return cls(repo_id, {p.name: p.read_bytes() for p in directory.iterdir()})

    @property
    def downloaded(self) -> set[str]:
        """Files whose contents were asked for."""
        return {name for method, name, _ in self.log if method == "GET"}

    @contextlib.contextmanager
    def serve(self) -> Iterator[FakeHub]:
        with LoopbackServer(type("Handler", (_Handler,), {"hub": self})) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
            thread.start()
            self.url = server.url
            yield self
            server.shutdown()
            thread.join()

    @contextlib.contextmanager
    def serve_here(self, cache: Path) -> Iterator[FakeHub]:
        """Serve it as the hub of this process, with an empty cache."""
        with self.serve(), pytest.MonkeyPatch.context() as patch:
            template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            patch.setattr(constants, "ENDPOINT", self.url)
            patch.setattr(constants, "HF_HUB_CACHE", str(cache))
            # What an earlier test of this process has found out about the real hub.
            patch.setattr(constants, "HF_HUB_OFFLINE", False)
            patch.setattr("mlx_mtp.models.hub._unreachable", "")
            yield self


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
            self._send(200, json.dumps(self._listing("/tree/" in path)).encode())
            return
        repo, _, rest = path.removeprefix("/api/models").partition("/re")
        revision, _, name = rest.partition("/")[2].partition("/")
        if repo != f"/{hub.repo_id}":
            self._fail(*hub.trouble.get(repo[1:], (404, "RepoNotFound")))
            return
        hub.log.append((self.command, name, self.headers["Range"]))
        if revision not in ("main", "v1", COMMIT):
            self._fail(404, "RevisionNotFound")
        elif name not in hub.files:
            self._fail(404, "EntryNotFound")
        elif self.command == "GET" and name in hub.trouble:
            self._fail(*hub.trouble[name])
        else:
            self._send_file(hub.files[name])

    def _listing(self, with_sizes: bool) -> object:
        files = self.hub.files
        if with_sizes:
            fixed = {"type": "file", "oid": "0" * 40}
            return [{**fixed, "path": name, "size": len(data)} for name, data in files.items()]
        siblings = [{"rfilename": name} for name in files]
        return {"_id": "1", "id": self.hub.repo_id, "sha": COMMIT, "siblings": siblings}

    def _send_file(self, content: bytes) -> None:
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        headers = {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = self.headers["Range"]
        if not asked:
            self._send(200, content, headers)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last or len(content)) + 1]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self._send(206, part, headers)

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": "Restricted"})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
