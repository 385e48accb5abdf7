"""`serve qwen3.6-35b` and the like: one name brings the model, its head and MTP."""

import argparse
import io
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_mtp import build
from mlx_mtp.cli import main as cli
from mlx_mtp.convert.convert import add_head
from mlx_mtp.errors import MissingHeadError
from mlx_mtp.inspect.needs import _need
from mlx_mtp.machine import MemoryLimit
from mlx_mtp.models.hub import resolve_model
from mlx_mtp.models.published import SIZES
from tests.conftest import DEMO
from tests.support.checkpoints import read_file, write_source
from tests.support.fake_hub import COMMIT, FakeHub
from tests.support.process import running
from tests.support.tiny_models import Layout, change_json, write_checkpoint

NAME, ORIGINAL = "qwen3.6:35B", "Qwen/Qwen3.6-35B-A3B"
REPO = "mlx-community/Qwen3.6-35B-A3B-4bit"
SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
# Room for the model in 4 bits, and in 8 bits, which the hub doesn't have.
ROOM = MemoryLimit(64 * 10**9, "of a test")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """A tiny model under a published name, and its original with the head in two of three files."""
    root, sizes = tmp_path_factory.mktemp("published"), {"vocab": 4096}
    write_checkpoint(root / "mlx", Layout("qwen3_5_moe", with_head=False, **sizes))
    change_json(root / "mlx" / "config.json", eos_token_id=1)
    write_source(root / "original", Layout("qwen3_5_moe", **sizes), shards=3)
    model = contents(root / "mlx") | {name: (DEMO / name).read_bytes() for name in TOKENIZER}
    return {REPO: model, ORIGINAL: contents(root / "original")}


@pytest.fixture
def hub(published, tmp_path):
    hub = FakeHub(REPO, published[REPO])
    hub.others[ORIGINAL] = published[ORIGINAL]
    with hub.serve_here(tmp_path / "hub"):
        yield hub


def options(**given) -> argparse.Namespace:
    return argparse.Namespace(model=REPO, dtype="float32", **given)


def test_one_name_is_enough(hub, tmp_path, monkeypatch, capsys):
    """The model is downloaded with its head and drafts; the second start sends no request."""
    monkeypatch.setattr("mlx_mtp.inspect.choose.memory_limit", lambda _: ROOM)
    for start in range(2):
        hub.num_requests, hub.log = 0, []
        flags = ("--max-tokens", "8", "--mtp-num-draft-tokens", "1", "--temperature", "0")
        assert cli.main(["generate", NAME, "A fox", *flags], {}) == 0
        said = capsys.readouterr()
        assert "drafts accepted" in said.err and "kB" not in said.out
        lines = [line for line in said.err.splitlines() if "mlx-community" in line]
        assert f"Model: {REPO}, " in lines[0]
        assert ("in the cache" if start else "the best of") in lines[0]
        if start:
            assert hub.num_requests == 0 and len(lines) == 1
            continue
        size = sum(len(hub.others[ORIGINAL][name]) for name in SHARDS[1:]) / 1000
        where, line = lines[1:]
        assert where.startswith(f"Downloading {REPO}, ")
        assert f"{ORIGINAL}, of which {size:.1f} kB are downloaded" in line
        assert "--no-enable-mtp" in line
        assert SHARDS[0] not in hub.downloaded >= {*SHARDS[1:], "model.safetensors"}
    snapshot = tmp_path / f"hub/models--mlx-community--Qwen3.6-35B-A3B-4bit/snapshots/{COMMIT}"
    fetched, metadata = read_file(snapshot / "mtp.safetensors")
    assert (metadata["source"], metadata["source_revision"]) == (ORIGINAL, COMMIT)
    # The head equals that of add-mtp-weights.
    copy = tmp_path / "copy"
    add_head(str(snapshot), ORIGINAL, output=copy)
    assert {k: v.tolist() for k, v in read_file(copy / "mtp.safetensors")[0].items()} == {
        k: v.tolist() for k, v in fetched.items()
    }


def offline(hub, patch):
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return "can't be reached"


def full_disk(hub, patch):
    usage = type("Usage", (), {"free": 100_000})
    patch.setattr("mlx_mtp.models.download.shutil.disk_usage", lambda _: usage)
    return "100.0 kB free"


def read_only(hub, patch):
    patch.setattr("mlx_mtp.convert.files._TEMPORARY", "no/such-{}")
    return "can't be written"


def not_published(hub, patch):
    hub.others.clear()
    return "no such model"


def damaged(hub, patch):
    content = hub.others[ORIGINAL][SHARDS[2]]
    hub.damaged[SHARDS[2]] = content[:-1] + bytes([content[-1] ^ 1])
    return "does not have the content"


@pytest.mark.parametrize("trouble", [offline, full_disk, read_only, not_published, damaged])
def test_without_its_head_the_model_is_served_with_one_warning(
    hub, tmp_path, monkeypatch, caplog, trouble
):
    resolve_model(REPO)
    with monkeypatch.context() as patch:
        words = trouble(hub, patch)
        with pytest.raises(MissingHeadError, match=words):
            build.load(options(), enable_mtp=True, lazy=True)
        caplog.clear()
        loaded, _ = build.load(options(), enable_mtp=None, lazy=True)
        assert loaded.head is None
        (record,) = caplog.records
        assert words in record.getMessage() and "is drafted" in record.getMessage()
    assert not list(tmp_path.glob("hub/*/snapshots/*/*mtp*"))
    # The next start can add the head.
    hub.damaged.clear()
    if trouble is not not_published:
        loaded, _ = build.load(options(), enable_mtp=None, lazy=True)
        assert loaded.head is not None and len(caplog.records) == 1


def test_no_head_is_fetched_unasked_for_or_into_the_users_directory(hub, tmp_path, capsys):
    assert cli.main(["inspect", REPO, "--memory-limit", "8GB"], {}) == 0
    assert capsys.readouterr().out.endswith(f"mlx-mtp serve {REPO} (it fetches the head)\n")
    loaded, _ = build.load(options(), enable_mtp=False, lazy=True)
    assert loaded.head is None and not hub.downloaded & set(SHARDS)
    own = tmp_path / REPO
    own.mkdir(parents=True)
    for path in loaded.path.iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    with pytest.raises(MissingHeadError, match="add-mtp-weights"):
        build.load(argparse.Namespace(model=str(own), dtype="float32"), enable_mtp=True, lazy=True)
    assert not hub.downloaded & set(SHARDS)


def test_a_head_that_will_be_fetched_counts_in_the_models_need(hub):
    def need(enable_mtp: bool | None) -> tuple[int, int]:
        fields = {"dtype": "float32", "max_model_len": 512, "prefill_step_size": None}
        found = _need(REPO, {**fields, "prefix_cache_size": 0, "enable_mtp": enable_mtp})
        return found["weights"], found["nbytes"]

    head = SIZES["Qwen3.6-35B-A3B"].head[4]
    (more, most), (less, least) = need(None), need(False)
    assert more - less == head
    assert most - least > head  # the head's keys and values count too
    build.load(options(), enable_mtp=True, lazy=True)
    assert 0 < need(None)[0] - less < head / 100  # the head is in the cache now, and tiny


def test_pull_ls_and_rm(hub, tmp_path, capsys, monkeypatch):
    run = lambda *argv: cli.main([*argv], {})  # noqa: E731
    assert run("ls") == 0 and "There are no models" in capsys.readouterr().out
    hub.trouble[SHARDS[2]] = 403, "Forbidden"
    assert run("pull", REPO) == 2
    why = capsys.readouterr().err
    assert "could not be downloaded" in why and run("ls") == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line for line in shown.splitlines() if "/" in line}
    assert REPO in rows and " no " in rows[REPO], why + shown
    assert " in part " in rows[ORIGINAL]
    hub.trouble.clear()
    assert run("pull", REPO) == 0
    assert "with an MTP head" in capsys.readouterr().out
    assert run("ls") == 0
    shown = capsys.readouterr().out
    (row,) = (line for line in shown.splitlines() if line.split()[:1] == [REPO])
    assert " yes " in row and str(tmp_path / "hub") in shown
    for name, why in (
        ("qwen3.6-27b", "not in the cache"),
        ("qwen3.6-35", "no known name"),
        (str(tmp_path), "a directory of yours"),
        (REPO, "give --yes"),
    ):
        assert run("rm", name) == 2
        assert why in capsys.readouterr().err
    other = tmp_path / "hub" / "models--mlx-community--Qwen3.6-35B-A3B-8bit"
    (tmp_path / "hub" / f"models--{REPO.replace('/', '--')}").rename(other)
    assert run("pull", REPO) == 0
    assert run("rm", "qwen3.6-35b", "--yes") == 2
    assert "may mean" in capsys.readouterr().err
    for answer, left in (("n\n", True), ("y\n", False)):
        typed = io.StringIO(answer)
        monkeypatch.setattr(typed, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdin", typed)
        assert run("rm", "qwen3.6-35b-8bit") == 0
        assert other.exists() == left and "8bit, " in capsys.readouterr().out
    # The other models stay, though all have the same commit.
    left = {path.name for path in (tmp_path / "hub").glob("models--*")}
    assert left == {f"models--{name.replace('/', '--')}" for name in (REPO, ORIGINAL)}


@pytest.mark.full
def test_the_command_as_it_is_typed(hub, tmp_path, monkeypatch):
    """`serve`, `ps` beside it, a refused `rm` and a second start work as they are typed."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    flags = ("--memory-limit", "64GB", "--mtp-num-draft-tokens", "1")
    for start in range(2):
        hub.num_requests = 0
        with running("qwen3.6-35b", *flags) as server:
            body = {"model": REPO, "prompt": "A", "max_tokens": 8, "ignore_eos": True}
            assert server.http.post("/v1/completions", json=body).json()["timings"]["draft_n"] > 0
            argv = [sys.executable, "-m", "mlx_mtp"]
            shown = subprocess.run([*argv, "ps"], capture_output=True, text=True, check=True)
            assert server.url in shown.stdout and REPO in shown.stdout
            refused = subprocess.run([*argv, "rm", REPO, "--yes"], capture_output=True, text=True)
            assert refused.returncode == 2 and "end that server first" in refused.stderr
        assert (hub.num_requests == 0) == bool(start)
