"""Finding a model: bundled, local, or from a hub, which here is a small one on loopback."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_mtp.errors import ModelError
from mlx_mtp.models.hub import BUNDLED_MODEL, resolve_model
from tests.convert.fake_hub import FakeHub

GOOD = (
    *("config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "mtp.safetensors"),
    *("model.safetensors.index.json", "chat_template.jinja", "merges.txt"),
)
BAD = ("evil.py", "pytorch_model.bin", "x.gguf", "README.md", "original/consolidated.safetensors")
WANTED, UNWANTED = ({name: name.encode() for name in names} for names in (GOOD, BAD))


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    hub = FakeHub("org/model", WANTED | UNWANTED)
    hub.trouble = {"org/gated": (403, "GatedRepo"), "org/broken": (500, "")}
    with hub.serve():
        yield hub


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
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"HF_HOME": str(home), **environ}
    command = [sys.executable, "-c", code, name]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_bundled_model_a_directory_and_what_is_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_model(None) == BUNDLED_MODEL
    assert (BUNDLED_MODEL / "config.json").is_file()
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/model") == Path("org/model"), "a directory comes before a hub id"
    (tmp_path / "x.safetensors").touch()
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(tmp_path / "x.safetensors"))
    for name in ("model", "/no/such", "./a/b", "a/b/c", "../a", "who/", "org/mo del", "-a/b"):
        with pytest.raises(ModelError, match="neither an existing directory nor a hub id"):
            resolve_model(name)


def test_a_hub_model_comes_with_the_files_that_are_needed(hub: FakeHub, tmp_path: Path) -> None:
    result = resolve_elsewhere("org/model", tmp_path, HF_ENDPOINT=hub.url)
    assert result.returncode == 0, result.stderr
    path = Path(result.stdout.strip())
    assert {file.name: file.read_bytes() for file in path.iterdir()} == WANTED
    assert {name for _, name, _ in hub.log} == set(WANTED)
    hub.log.clear()
    again = resolve_elsewhere("org/model", tmp_path, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert again.stdout == result.stdout
    assert hub.log == []


@pytest.mark.parametrize(
    ("name", "environ", "words"),
    [
        ("org/missing", {}, ["no such model", "org/missing", "HF_TOKEN"]),
        ("org/gated", {}, ["gated", "accept its terms", "https://huggingface.co/org/gated"]),
        ("org/broken", {}, ["can't be reached", "500"]),
        ("org/model", {"HF_ENDPOINT": "http://127.0.0.1:9"}, ["can't be reached"]),
    ],
)
def test_what_fails_is_explained(
    hub: FakeHub, tmp_path: Path, name: str, environ: dict[str, str], words: list[str]
) -> None:
    result = resolve_elsewhere(name, tmp_path, **{"HF_ENDPOINT": hub.url, **environ})
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("ModelError")
    assert all(word in result.stderr for word in words)
    assert "Traceback" not in result.stderr
