"""Sources on a hub: exactly the needed files, resumed after a break, failures in plain words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.convert.checkpoints import read_file, write_source, write_target
from tests.convert.fake_hub import COMMIT, FakeHub
from tests.tiny_models import Layout, write_checkpoint

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "add_mtp_weights.py"
LAYOUT = Layout("qwen3_next")
REPO = "Qwen/Tiny-Next"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


class User:
    """Somebody with an empty cache, a model, and the script."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target = write_target(root / "target", LAYOUT, {"bits": 4, "group_size": 32})
        self.cache = root / "home" / "hub"
        self.output = ""

    @property
    def sidecar(self) -> Path:
        return self.target / "mtp.safetensors"

    def run(self, hub: FakeHub, *arguments: str, model: str | None = None, **more: str) -> int:
        """The script in a process of its own; its exit status."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        environment |= {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(self.root / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **more,
        }
        command = [sys.executable, str(SCRIPT), "--mlx-model-path", model or str(self.target)]
        if "--source-model" not in arguments:
            command += ["--source-model", hub.repo_id]
        done = subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        self.output = done.stdout + done.stderr
        assert "Traceback" not in self.output, self.output
        return done.returncode

    def runs(self, hub: FakeHub, *arguments: str, **more: str) -> str:
        assert self.run(hub, *arguments, **more) == 0, self.output
        return self.output

    def refused(self, hub: FakeHub, *arguments: str, **more: str) -> str:
        assert self.run(hub, *arguments, **more) == 2, self.output
        assert [p.name for p in self.target.iterdir()] == ["config.json"]
        return self.output


@pytest.fixture
def user(tmp_path) -> User:
    return User(tmp_path)


@pytest.fixture
def hub(tmp_path):
    write_source(tmp_path / "original", LAYOUT, shards=3)
    (tmp_path / "original" / "tokenizer.json").write_text("{}")
    with FakeHub.of(REPO, tmp_path / "original").serve() as served:
        yield served


def test_exactly_the_needed_files_are_asked_for_once(user, hub):
    said = user.runs(hub)
    needed = {"config.json", "model.safetensors.index.json", *SHARDS[1:]}
    assert hub.downloaded == needed
    assert {name for _, name, _ in hub.log} == needed
    size = sum(len(hub.files[name]) for name in SHARDS[1:])
    announced = next(line for line in said.splitlines() if line.startswith("Downloading 2 file"))
    assert f"{size / 1000:.1f} kB" in announced
    metadata = read_file(user.sidecar)[1]
    assert (metadata["source"], metadata["source_revision"]) == (REPO, COMMIT)


def test_the_result_is_that_of_a_local_source(user, hub, tmp_path):
    user.runs(hub)
    from_hub = read_file(user.sidecar)
    user.sidecar.unlink()
    user.runs(hub, "--source-model", str(tmp_path / "original"))
    local = read_file(user.sidecar)
    assert from_hub[1]["source_files"] == local[1]["source_files"]
    assert {k: v.bits.tobytes() for k, v in from_hub[0].items()} == {
        k: v.bits.tobytes() for k, v in local[0].items()
    }


def test_a_second_run_downloads_nothing(user, hub):
    user.runs(hub)
    hub.log.clear()
    assert "nothing to do" in user.runs(hub)
    assert not hub.downloaded
    user.runs(hub, "--force", "--bits", "8")
    assert not hub.downloaded


def test_the_cache_is_the_usual_one(user, hub):
    """What is downloaded is found by others, and what others downloaded is used."""
    user.runs(hub)
    snapshot = user.cache / "models--Qwen--Tiny-Next" / "snapshots" / COMMIT
    assert (snapshot / SHARDS[2]).read_bytes() == hub.files[SHARDS[2]]
    assert not list(user.cache.rglob("*.incomplete"))
    user.sidecar.unlink()
    user.runs(hub, HF_HUB_OFFLINE="1")
    assert user.sidecar.exists()


def test_a_broken_connection_resumes_where_it_broke(user, hub):
    hub.break_after[SHARDS[1]] = [10_000, 5_000]
    user.runs(hub)
    asked = [asked for method, name, asked in hub.log if (method, name) == ("GET", SHARDS[1])]
    assert asked == ["bytes=0-", "bytes=10000-", "bytes=15000-"]
    assert read_file(user.sidecar)[1]["source_revision"] == COMMIT


def test_a_hub_that_knows_no_ranges_starts_again(user, hub):
    hub.ranges = False
    hub.break_after[SHARDS[1]] = [10_000]
    user.runs(hub)
    snapshot = user.cache / "models--Qwen--Tiny-Next" / "snapshots" / COMMIT
    assert (snapshot / SHARDS[1]).read_bytes() == hub.files[SHARDS[1]]


def test_a_download_that_was_given_up_goes_on_in_the_next_run(user, hub):
    hub.break_after[SHARDS[1]] = [10_000] + [0] * 8
    said = user.refused(hub)
    assert "could not be downloaded" in said
    assert "goes on from there" in said
    hub.break_after.clear()
    hub.log.clear()
    assert "still to come" in user.runs(hub)
    assert ("GET", SHARDS[1], "bytes=10000-") in hub.log


@pytest.mark.parametrize(
    ("status", "words"), [(500, "could not be downloaded"), (403, "could not be downloaded")]
)
def test_a_hub_in_trouble(user, hub, status, words):
    hub.status[SHARDS[2]] = status
    assert words in user.refused(hub)


def test_dry_run_downloads_no_weights(user, hub):
    said = user.runs(hub, "--dry-run")
    assert hub.downloaded == {"config.json", "model.safetensors.index.json"}
    size = sum(len(hub.files[name]) for name in SHARDS[1:])
    assert f"Would download {size / 1000:.1f} kB" in said
    assert not user.sidecar.exists()


def test_revisions(user, hub):
    user.runs(hub, "--revision", "v1")
    user.sidecar.unlink()
    assert "no revision 'v2'" in user.refused(hub, "--revision", "v2")


def test_a_repository_that_is_not_there(user, hub):
    assert "the hub has no such model" in user.refused(hub, "--source-model", "Qwen/Other")


def test_offline_with_nothing_in_the_cache(user, hub):
    assert "can't be reached" in user.refused(hub, HF_HUB_OFFLINE="1")
    assert not hub.log


@pytest.mark.full
def test_no_hub_at_all(user, hub):
    """huggingface_hub itself tries for half a minute."""
    hub.url = "http://127.0.0.1:9"
    assert "can't be reached" in user.refused(hub)


def test_a_repository_without_a_head(user, tmp_path):
    write_source(tmp_path / "none", Layout("qwen3_next", with_head=False), shards=3)
    with FakeHub.of(REPO, tmp_path / "none").serve() as hub:
        assert "has no MTP head" in user.refused(hub)
        assert not any(name.startswith("model-") for name in hub.downloaded)


def test_an_index_that_names_a_file_which_is_not_there(user, hub):
    del hub.files[SHARDS[2]]
    assert f"has no {SHARDS[2]}" in user.refused(hub)


@pytest.mark.parametrize("with_head", [True, False])
def test_a_repository_of_one_file_is_judged_by_its_header(user, tmp_path, with_head):
    write_source(tmp_path / "one", Layout("qwen3_next", with_head=with_head))
    with FakeHub.of(REPO, tmp_path / "one").serve() as hub:
        if with_head:
            user.runs(hub)
            assert user.sidecar.exists()
            return
        assert "has no MTP head" in user.refused(hub)
        ranges = [
            asked
            for method, name, asked in hub.log
            if (method, name) == ("GET", "model.safetensors")
        ]
        assert ranges == ["bytes=0-100000"]


def test_a_target_on_the_hub_gets_its_head_in_the_cache(user, hub, tmp_path):
    """Only config.json of the model is needed; its weights can come later."""
    write_checkpoint(tmp_path / "mlx", Layout("qwen3_next", with_head=False))
    with FakeHub.of("mlx-community/Tiny", tmp_path / "mlx").serve() as models:
        user.runs(models, "--source-model", str(tmp_path / "original"), model="mlx-community/Tiny")
        assert models.downloaded == {"config.json"}
    snapshot = user.cache / "models--mlx-community--Tiny" / "snapshots" / COMMIT
    assert sorted(p.name for p in snapshot.iterdir()) == ["config.json", "mtp.safetensors"]
