"""A hub on loopback: serves repositories' files to HEAD and (ranged) GET, and logs the requests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.loopback import LoopbackServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves `files`, fails as configured, and records the requests."""

    def __init__(self, repo_id: str, files: dict[str, bytes]) -> None:
        self.repo_id, self.files, self.commit = repo_id, files, COMMIT
        self.trouble: dict[str, tuple[int, str]] = {}  # Status and code by file or repository.
        self.log: list[tuple[str, str, str | None]] = []  # Method, file and range; no listings.
        self.num_requests = 0  # Listings included.
        self.others: dict[str, dict[str, bytes]] = {}  # Files of further repositories.
        self.damaged: dict[str, bytes] = {}  # Sent in place of a file's content, with its hash.
        # Called with a file's name and its content from the requested offset on; returns the pieces
        # that are sent before the connection ends.
        self.pieces: Callable[[str, bytes], Iterable[bytes]] = lambda _, content: (content,)

    @classmethod
    def of(cls, repo_id: str, directory: Path) -> FakeHub:
        return cls(repo_id, {p.name: p.read_bytes() for p in directory.iterdir()})

    @property
    def downloaded(self) -> set[str]:
        """The files whose contents were requested."""
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
        """Serve this hub as the one that this process uses, with an empty cache."""
        with self.serve(), pytest.MonkeyPatch.context() as patch:
            template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            patch.setattr(constants, "ENDPOINT", self.url)
            patch.setattr(constants, "HF_HUB_CACHE", str(cache))
            # Reset what an earlier test in this process found out about the real hub.
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
        hub.num_requests += 1
        # /owner/name/resolve/REVISION/FILE, or /api/models/owner/name/(tree|revision)/REVISION
        parts = path.removeprefix("/api/models").split("/", 5)[1:]
        repo, revision, name = "/".join(parts[:2]), *[*parts[3:], "", ""][:2]
        files = {hub.repo_id: hub.files, **hub.others}.get(repo)
        if files is None:
            self._fail(*hub.trouble.get(repo, (404, "RepoNotFound")))
            return
        if path.startswith("/api/"):
            self._send(
                200, json.dumps(_listing(repo, files, hub.commit, parts[2] == "tree")).encode()
            )
            return
        hub.log.append((self.command, name, self.headers["Range"]))
        if revision not in ("main", "v1", hub.commit):
            self._fail(404, "RevisionNotFound")
        elif name not in files:
            self._fail(404, "EntryNotFound")
        elif self.command == "GET" and name in hub.trouble:
            self._fail(*hub.trouble[name])
        else:
            self._send_file(name, files[name])

    def _send_file(self, name: str, content: bytes) -> None:
        headers = {"ETag": f'"{content_hash(name, content)}"', "X-Repo-Commit": self.hub.commit}
        headers["Accept-Ranges"] = "bytes"
        content = self.hub.damaged.get(name, content)
        asked = self.headers["Range"]
        if not asked:
            self._send(200, content, headers, name)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last or len(content)) + 1]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self._send(206, part, headers, name)

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": "Restricted"})

    def _send(
        self, status: int, content: bytes, headers: dict[str, str] | None = None, name: str = ""
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            left = len(content)
            for piece in self.hub.pieces(name, content):
                self.wfile.write(piece)
                left -= len(piece)
            self.close_connection |= left > 0


def content_hash(name: str, content: bytes) -> str:
    """Returns the hash by which the hub identifies a file's content: git's, except for weights."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _listing(repo: str, files: dict[str, bytes], commit: str, with_sizes: bool) -> object:
    if not with_sizes:
        siblings = [{"rfilename": name} for name in files]
        return {"_id": "1", "id": repo, "sha": commit, "siblings": siblings}
    entries = list[dict[str, object]]()
    for name, data in files.items():
        digest = content_hash(name, data)
        entry = {"type": "file", "path": name, "size": len(data), "oid": digest[:40]}
        if len(digest) == 64:
            entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 100}
        entries.append(entry)
    return entries
