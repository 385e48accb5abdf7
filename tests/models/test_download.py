"""Interrupted and damaged downloads: no partial file is used, and the next start continues."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_mtp.errors import ModelError
from mlx_mtp.models import download
from mlx_mtp.models.hub import cached_model, download_model, resolve_model
from tests.support.fake_hub import COMMIT, FakeHub, content_hash

REPO, SHARD = "org/model", "model-00002-of-00003.safetensors"
SIZE = 3_000_000
FILES = {f"model-0000{n}-of-00003.safetensors": os.urandom(SIZE) for n in (1, 2, 3)}
FILES |= {"config.json": b"{}", "tokenizer.json": b"[]" * 1000}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub(REPO, {**FILES, "README.md": b"#"}).serve_here(tmp_path / "hub") as hub:
        yield hub


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "hub" / "models--org--model"


def part_of(repository: Path, name: str) -> Path:
    return repository / "blobs" / f"{content_hash(name, FILES[name])}.incomplete"


def goes_on(hub: FakeHub, repository: Path, asked: dict[str, str | None]) -> None:
    """Check that the next start requests `asked`, ranges by file, and the one after it nothing."""
    assert cached_model(REPO) is None
    hub.log.clear()
    path = resolve_model(REPO)
    assert {name: part for method, name, part in hub.log if method == "GET"} == asked
    assert {file.name: file.read_bytes() for file in path.iterdir()} == FILES
    assert not list(repository.glob("blobs/*.incomplete"))
    hub.num_requests = 0
    assert resolve_model(REPO) == path == repository / "snapshots" / COMMIT
    assert hub.num_requests == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_process(hub: FakeHub, repository: Path, number: signal.Signals) -> None:
    gone = threading.Event()

    def pieces(name: str, content: bytes) -> Iterator[bytes]:
        yield content[: SIZE // 2] if name == SHARD else content
        if name == SHARD:
            gone.wait()

    hub.pieces = pieces
    # A shell's background jobs ignore SIGINT, and so would their children.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"from mlx_mtp.models.hub import resolve_model; resolve_model({REPO!r})"
    )
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(repository.parent)}
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL) as process:
        part, others = part_of(repository, SHARD), repository / "blobs"
        deadline = time.monotonic() + 60
        while not part.exists() or part.stat().st_size < SIZE // 2 - (1 << 20):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        while sum(not each.name.endswith(".incomplete") for each in others.iterdir()) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        # The process can wait for the stalled connection, which ends after a second here.
        gone.set() if number == signal.SIGKILL else threading.Timer(1.0, gone.set).start()
        assert process.wait(60) != 0
    hub.pieces = lambda _, content: (content,)
    assert not (repository / "snapshots" / COMMIT / SHARD).exists()
    goes_on(hub, repository, {SHARD: f"bytes={part.stat().st_size}-"})


def test_connections_that_end_early_and_a_hub_that_has_no_ranges(
    hub: FakeHub, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_ATTEMPTS", 1)
    hub.pieces = lambda name, content: (content[:0] if name == SHARD else content,)
    with pytest.raises(ModelError, match="could not be downloaded"):
        resolve_model(REPO)
    hub.pieces = lambda name, content: (content[: 1 << 20],)
    hub.log.clear()
    assert (resolve_model(REPO) / SHARD).read_bytes() == FILES[SHARD]
    assert [part for _, name, part in hub.log if name == SHARD and part] == [
        f"bytes={n << 20}-" for n in (1, 2)
    ]
    shutil.rmtree(repository)
    part = part_of(repository, SHARD)
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * (SIZE + 1))  # longer than the file
    hub.pieces = lambda _, content: (content,)
    goes_on(hub, repository, dict.fromkeys(FILES))


@pytest.mark.parametrize("name", [SHARD, "config.json"])
def test_a_content_without_its_hash(hub: FakeHub, repository: Path, name: str) -> None:
    hub.damaged[name] = FILES[name][:-1] + b"!"
    with pytest.raises(ModelError, match=f"{name} does not have the content whose hash"):
        resolve_model(REPO)
    assert not part_of(repository, name).exists()
    assert not list(repository.glob(f"snapshots/*/{SHARD}"))
    # A partial file that was damaged on the disk is noticed, too.
    hub.damaged.clear()
    part = part_of(repository, SHARD)
    part.write_bytes(b"!" * 10)
    with pytest.raises(ModelError, match=f"{SHARD} does not have the content whose hash"):
        resolve_model(REPO)
    assert (resolve_model(REPO) / SHARD).read_bytes() == FILES[SHARD]


def test_a_full_disk(
    hub: FakeHub, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(10, 10, SIZE)
    with monkeypatch.context() as full:
        full.setattr("mlx_mtp.models.download.shutil.disk_usage", lambda _: usage)
        with pytest.raises(
            ModelError, match=r"takes 9.0 MB more, .* has 3.0 MB free: `mlx-mtp ls`"
        ):
            resolve_model(REPO)
    assert SHARD not in hub.downloaded
    part = part_of(repository, SHARD)
    part.symlink_to("/dev/full")
    with pytest.raises(ModelError, match="No space left on device"):
        resolve_model(REPO)
    part.unlink()
    assert cached_model(REPO) is None
    assert (resolve_model(REPO) / SHARD).read_bytes() == FILES[SHARD]


def test_two_starts_at_once_download_once(hub: FakeHub, repository: Path) -> None:
    both = threading.Barrier(2)

    def pieces(name: str, content: bytes) -> Iterator[bytes]:
        yield content[:1000]
        if name == SHARD:  # One start has the lock while the other waits.
            time.sleep(0.5)
        yield content[1000:]

    def start() -> Path:
        both.wait()
        return resolve_model(REPO)

    hub.pieces = pieces
    with ThreadPoolExecutor(2) as pool:
        paths = {started.result() for started in [pool.submit(start), pool.submit(start)]}
    (path,) = paths
    assert {file.name: file.read_bytes() for file in path.iterdir()} == FILES
    asked = [name for method, name, _ in hub.log if method == "GET"]
    assert asked.count(SHARD) == 1
    assert not list(repository.glob("blobs/*.incomplete"))


def test_a_newer_version_is_downloaded_when_asked_for(hub: FakeHub, repository: Path) -> None:
    path = download_model(REPO)
    hub.files["config.json"] = b'{"newer": true}'
    hub.commit = "f" * 40
    assert resolve_model(REPO) == path
    hub.log.clear()
    newer = download_model(REPO)
    assert newer != path and (newer / "config.json").read_bytes() == hub.files["config.json"]
    assert hub.downloaded == {"config.json"} and resolve_model(REPO) == newer
