"""`--enable-mtp` with a hub id: a missing head is noticed before the weights are downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DEMO
from tests.convert.checkpoints import write_source
from tests.convert.fake_hub import COMMIT, FakeHub
from tests.tiny_models import Layout

REPO = "Some/Model"
SMALL = {"config.json", "model.safetensors.index.json", "README.md"}


def python(hub: FakeHub, home: Path, *arguments: str, **more: str) -> tuple[int, str]:
    """Python in a process of its own: huggingface_hub reads its settings when it is imported."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **more,
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


def model(directory: Path, *, with_head: bool, shards: int) -> Path:
    write_source(directory, Layout("qwen3_next", with_head=with_head), shards=shards)
    (directory / "README.md").write_text("---\nbase_model: Qwen/Original\n---\n")
    return directory


CHECK = """
import sys
from mlx_mtp.convert.hub_head import check_head_on_hub
from mlx_mtp.errors import MissingHeadError
try:
    check_head_on_hub(sys.argv[1])
except MissingHeadError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("command", ["serve", "selftest"])
def test_without_a_head_nothing_large_is_downloaded(tmp_path, command):
    with FakeHub.of(REPO, model(tmp_path / "m", with_head=False, shards=3)).serve() as hub:
        mtp = ["--enable-mtp", "--port", "0"] if command == "serve" else []
        status, said = python(hub, tmp_path / "home", "-m", "mlx_mtp", command, REPO, *mtp)
        assert status == 2
        assert said.startswith(f"mlx-mtp: {REPO} has no MTP head")
        adding = f"`mlx-mtp add-mtp-weights --mlx-model-path {REPO} --source-model Qwen/Original`"
        assert adding in said
        assert "weights were not downloaded" in said
        assert hub.downloaded <= SMALL


def test_without_a_head_in_one_file(tmp_path):
    """Its header is read alone."""
    with FakeHub.of(REPO, model(tmp_path / "m", with_head=False, shards=1)).serve() as hub:
        status, said = python(hub, tmp_path / "home", "-c", CHECK, REPO)
        assert status == 1
        assert "has no MTP head" in said
        asked = {asked for m, n, asked in hub.log if (m, n) == ("GET", "model.safetensors")}
        assert asked == {"bytes=0-100000"}


@pytest.mark.parametrize("where", ["inside", "one file", "beside", "beside, in parts", "cached"])
def test_with_a_head_the_model_is_taken(tmp_path, where):
    inside = where in ("inside", "one file")
    path = model(tmp_path / "m", with_head=inside, shards=1 if where == "one file" else 3)
    if where == "beside":
        (path / "mtp.safetensors").touch()
    elif where == "beside, in parts":
        (path / "mtp-00001-of-00001.safetensors").touch()
    home = tmp_path / "home"
    if where == "cached":
        snapshot = home / "hub" / "models--Some--Model" / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (snapshot / "mtp.safetensors").touch()
    with FakeHub.of(REPO, path).serve() as hub:
        assert python(hub, home, "-c", CHECK, REPO) == (0, "")


@pytest.mark.parametrize("trouble", ["unknown", "offline", "directory"])
def test_what_cannot_be_found_out_is_left_to_the_download(tmp_path, trouble):
    with FakeHub.of(REPO, model(tmp_path / "m", with_head=False, shards=3)).serve() as hub:
        name = {"unknown": "Other/Model", "directory": str(tmp_path / "m")}.get(trouble, REPO)
        more = {"HF_HUB_OFFLINE": "1"} if trouble == "offline" else {}
        assert python(hub, tmp_path / "home", "-c", CHECK, name, **more) == (0, "")


def test_a_model_with_its_head_is_downloaded(tmp_path):
    """And refused then, as it is given no memory."""
    directory = model(tmp_path / "m", with_head=True, shards=3)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory)
    with FakeHub.of(REPO, directory).serve() as hub:
        flags = ["--enable-mtp", "--port", "0", "--memory-limit", "1KB"]
        status, said = python(hub, tmp_path / "home", "-m", "mlx_mtp", "serve", REPO, *flags)
        assert status == 2
        assert "Not enough memory" in said
        assert {name for name in hub.files if name.startswith("model-")} <= hub.downloaded
