"""Finding a model: bundled, local, or from a hub, which here is a small one on loopback."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from mlx_mtp.errors import ModelError
from mlx_mtp.models.hub import BUNDLED_MODEL, resolve_model
from tests.support.fake_hub import FakeHub

GOOD = (
    *("config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "mtp.safetensors"),
    *("model.safetensors.index.json", "chat_template.jinja", "merges.txt"),
)
BAD = ("evil.py", "pytorch_model.bin", "x.gguf", "README.md", "original/consolidated.safetensors")
WANTED, UNWANTED = ({name: name.encode() for name in names} for names in (GOOD, BAD))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    hub = FakeHub("org/model", WANTED | UNWANTED)
    hub.trouble = {"org/gated": (403, "GatedRepo"), "org/broken": (500, "")}
    with hub.serve_here(tmp_path):
        yield hub


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


def test_a_hub_model_comes_with_the_files_that_are_needed(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = resolve_model("org/model")
    assert {file.name: file.read_bytes() for file in path.iterdir()} == WANTED
    assert {name for _, name, _ in hub.log} == set(WANTED)
    hub.log.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("org/model") == path
    assert hub.log == []


@pytest.mark.parametrize(
    ("name", "endpoint", "words"),
    [
        ("org/missing", "", ["no such model", "org/missing", "HF_TOKEN"]),
        ("org/gated", "", ["gated", "accept its terms", "https://huggingface.co/org/gated"]),
        ("org/broken", "", ["can't be reached", "500"]),
        ("org/model", "http://127.0.0.1:9", ["can't be reached"]),
    ],
)
def test_what_fails_is_explained(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, name: str, endpoint: str, words: list[str]
) -> None:
    if endpoint:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(hub.url, endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(ModelError) as failure:
        resolve_model(name)
    assert all(word in str(failure.value) for word in words)
