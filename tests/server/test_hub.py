"""Finding a model: bundled, local, or from a hub, which here is a small one on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from mlx_mtp.errors import ModelError
from mlx_mtp.models.hub import BUNDLED_MODEL, resolve_model
from tests.loopback import LoopbackServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WANTED = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "model-00001-of-00002.safetensors": b"first",
    "model.safetensors.index.json": b"{}",
    "mtp.safetensors": b"head",
    "chat_template.jinja": b"{{ messages }}",
    "merges.txt": b"a b",
}
UNWANTED = {
    "modeling_evil.py": b"import os",
    "pytorch_model.bin": b"pickle",
    "README.md": b"hello",
    "original/consolidated.safetensors": b"again",
}


class FakeHub(BaseHTTPRequestHandler):
    """The three calls that a download makes: the revision, the tree, each file."""

    files = WANTED | UNWANTED
    asked: list[str]

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        type(self).asked.append(path)
        if path.startswith("/api/models/org/model/revision/"):
            siblings = [{"rfilename": name} for name in self.files]
            self._json({"_id": "1", "id": "org/model", "sha": COMMIT, "siblings": siblings})
        elif path.startswith("/api/models/org/model/tree/"):
            self._json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                    for name, data in self.files.items()
                ]
            )
        elif path.startswith(f"/org/model/resolve/{COMMIT}/"):
            data = self.files[path.removeprefix(f"/org/model/resolve/{COMMIT}/")]
            headers = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": COMMIT}
            self._send(200, data if with_body else b"", headers, len(data))
        elif "org/gated" in path:
            message = "Access to model org/gated is restricted"
            self._send(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": message}, 0)
        elif "org/broken" in path:
            self._send(500, b"", {}, 0)
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, 0)

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self._send(200, data, {"Content-Type": "application/json"}, len(data))

    def _send(self, status: int, data: bytes, headers: dict[str, str], length: int) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(length)}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[str]:
    FakeHub.asked = []
    with LoopbackServer(FakeHub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


def resolve_elsewhere(name: str, home: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Resolve in a process of its own: huggingface_hub reads its settings when it is imported."""
    code = """
import sys
from mlx_mtp.errors import ModelError
from mlx_mtp.models.hub import resolve_model
try:
    print(resolve_model(sys.argv[1]))
except ModelError as error:
    sys.exit(f"ModelError: {error}")
"""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    settings = {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, name],
        capture_output=True,
        text=True,
        env=clean | settings | environ,
        check=False,
    )


def test_nothing_named_is_the_bundled_model() -> None:
    assert resolve_model(None) == BUNDLED_MODEL
    assert (BUNDLED_MODEL / "config.json").is_file()


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_directory_comes_before_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/model") == Path("org/model")


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").touch()
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(tmp_path / "x.safetensors"))


@pytest.mark.parametrize(
    "name", ["model", "/no/such", "./org/model", "a/b/c", "../a", "org/", "org/mo del", "-a/b"]
)
def test_what_is_no_hub_id_is_not_asked_for(name: str) -> None:
    with pytest.raises(ModelError, match="neither an existing directory nor a hub id"):
        resolve_model(name)


def test_a_hub_model_comes_with_the_files_that_are_needed(hub: str, tmp_path: Path) -> None:
    result = resolve_elsewhere("org/model", tmp_path, HF_ENDPOINT=hub)
    assert result.returncode == 0, result.stderr
    path = Path(result.stdout.strip())
    assert {file.name: file.read_bytes() for file in path.iterdir()} == WANTED
    asked = {path.rpartition("/")[2] for path in FakeHub.asked if "/resolve/" in path}
    assert asked == set(WANTED)

    FakeHub.asked.clear()
    again = resolve_elsewhere("org/model", tmp_path, HF_ENDPOINT=hub, HF_HUB_OFFLINE="1")
    assert again.stdout == result.stdout
    assert FakeHub.asked == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/missing", ["no such model", "org/missing", "HF_TOKEN"]),
        ("org/gated", ["gated", "accept its terms", "https://huggingface.co/org/gated"]),
        ("org/broken", ["can't be reached", "500"]),
    ],
)
def test_what_the_hub_refuses_is_told(
    hub: str, tmp_path: Path, name: str, words: list[str]
) -> None:
    result = resolve_elsewhere(name, tmp_path, HF_ENDPOINT=hub)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("ModelError")
    assert all(word in result.stderr for word in words)
    assert "Traceback" not in result.stderr


def test_being_offline_is_told(tmp_path: Path) -> None:
    offline = resolve_elsewhere("org/model", tmp_path, HF_HUB_OFFLINE="1")
    nobody = resolve_elsewhere("org/model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    for result in (offline, nobody):
        assert result.returncode == 1
        assert "can't be reached" in result.stderr
        assert "Traceback" not in result.stderr
