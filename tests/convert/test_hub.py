"""Sources and targets on a hub: only the needed files are downloaded, and errors are clear."""

import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from huggingface_hub import constants

from mlx_mtp.cli import main as cli
from mlx_mtp.convert.convert import add_head
from mlx_mtp.convert.provide import check_head_on_hub
from mlx_mtp.errors import ConvertError
from tests.support.checkpoints import read_file, write_source
from tests.support.fake_hub import COMMIT, FakeHub
from tests.support.tiny_models import Layout, write_checkpoint

REPO = "Qwen/Tiny-Next"
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
SNAPSHOT = f"hub/models--Qwen--Tiny-Next/snapshots/{COMMIT}"


@pytest.fixture
def hub(tmp_path):
    """A hub without files, and an empty cache."""
    with FakeHub(REPO, {}).serve_here(tmp_path / "hub") as hub:
        yield hub


@pytest.fixture
def user(hub, pair):
    """The pair, with its source on the hub."""
    put(hub, pair.source)
    pair.local, pair.source = pair.source, REPO
    return pair


def put(hub: FakeHub, directory: Path) -> None:
    """Replace the hub's files with a directory's files and a model card."""
    hub.files = {path.name: path.read_bytes() for path in directory.iterdir()}
    hub.files["README.md"] = b"---\nbase_model: Qwen/Original\n---\n"


def test_exactly_the_needed_files_are_asked_for_once(hub, user, tmp_path, monkeypatch):
    needed = {"config.json", INDEX}
    size = f"{sum(len(hub.files[name]) for name in SHARDS[1:]) / 1000:.1f} kB"
    assert f"Would download {size}" in user.run(dry_run=True)
    assert hub.downloaded == needed
    assert not user.sidecar.exists()
    said = user.run(revision="v1")
    assert hub.downloaded == {name for _, name, _ in hub.log} == needed | set(SHARDS[1:])
    assert f"Downloading 2 of 2 files from {REPO} at {COMMIT[:12]}: {size}" in said
    tensors, metadata = read_file(user.sidecar)
    assert (metadata["source"], metadata["source_revision"]) == (REPO, COMMIT)
    # The files are in the usual cache.
    assert (tmp_path / SNAPSHOT / SHARDS[2]).read_bytes() == hub.files[SHARDS[2]]
    add_head(str(user.target), str(user.local), force=True)
    assert user.metadata()["source_files"] == metadata["source_files"]
    local, _ = read_file(user.sidecar)
    assert all(mx.array_equal(local[name], value) for name, value in tensors.items())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "Downloading" not in user.run(revision="v1", force=True)


def test_the_source_is_what_the_models_card_names(hub, user):
    with pytest.raises(ConvertError, match=r"name the original .* with --source-model"):
        add_head(str(user.target), None)
    (user.target / "README.md").write_text(f"---\nbase_model:\n- {REPO}\n---\n")
    add_head(str(user.target), None)
    assert user.metadata()["source"] == REPO


def test_the_head_of_a_commit_is_known_without_its_files(hub, user, tmp_path):
    user.run()
    shutil.rmtree(tmp_path / "hub")
    hub.log.clear()
    assert "nothing to do" in user.run()
    assert hub.downloaded == {"config.json", INDEX}
    user.refused(ConvertError, "bits 4, not 8", flags={"bits": 8})


def test_what_goes_wrong_is_explained(hub, user, monkeypatch):
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        user.refused(ConvertError, "can't be reached")
    for status in (403, 500):
        hub.trouble[SHARDS[2]] = status, "Trouble"
        user.refused(ConvertError, "could not be downloaded")
    user.refused(ConvertError, "no revision 'v2'", revision="v2")
    del hub.files[SHARDS[2]]
    user.refused(ConvertError, f"has no {SHARDS[2]}")
    user.source = "Qwen/Other"
    user.refused(ConvertError, "the hub has no such model")
    assert SHARDS[0] not in hub.downloaded


def test_without_a_network_the_cache_is_used_and_nothing_is_tried_again(
    hub, user, monkeypatch, caplog, tmp_path
):
    user.run()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    template = "http://127.0.0.1:1/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    assert "Downloading" not in user.run(force=True)
    user.source = "Qwen/Other"
    user.refused(ConvertError, "the hub can't be reached: http://127.0.0.1:1: .*refused")
    assert "Retrying" not in caplog.text


def test_a_repository_of_one_file_is_judged_by_its_header(hub, user):
    for with_head in (False, True):
        write_source(user.local / "one", Layout("qwen3_next", with_head=with_head))
        put(hub, user.local / "one")
        del hub.files["config.json"]
        if not with_head:
            user.refused(ConvertError, "has no MTP head")
            asked = [part for m, name, part in hub.log if (m, name) == ("GET", "model.safetensors")]
            assert asked == ["bytes=0-100000"]
    user.run()
    assert user.metadata()["source_revision"] == COMMIT


def test_a_target_on_the_hub_gets_its_head_in_the_cache(hub, pair, tmp_path):
    """Only the target's config.json is downloaded; its weights can come later."""
    write_checkpoint(tmp_path / "mlx", Layout("qwen3_next", with_head=False))
    put(hub, tmp_path / "mlx")
    add_head(REPO, str(pair.source))
    assert hub.downloaded == {"config.json"}
    found = sorted(path.name for path in (tmp_path / SNAPSHOT).iterdir())
    assert found == ["config.json", "mtp.safetensors"]
    check_head_on_hub(REPO)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_missing_head_is_noticed_before_the_weights_are_downloaded(hub, tmp_path, shards, capsys):
    write_source(tmp_path / "none", Layout("qwen3_next", with_head=False), shards=shards)
    put(hub, tmp_path / "none")
    assert cli.main(["serve", REPO, "--enable-mtp"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"mlx-mtp: {REPO} has no MTP head")
    assert "weights were not downloaded" in said
    assert f"`mlx-mtp add-mtp-weights {REPO}`" in said
    assert not [name for name in hub.downloaded if name.startswith("model-")]
    for name in ("mtp.safetensors", "mtp-00001-of-00001.safetensors"):
        hub.files[name] = b""
        check_head_on_hub(REPO)
        del hub.files[name]
    # If the hub can't tell, the download reports the error.
    check_head_on_hub("Other/Model")
