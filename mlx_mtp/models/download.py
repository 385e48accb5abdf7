"""Downloads files into the hub's cache; an interrupted download resumes where it stopped.

huggingface_hub discards an interrupted file, and checks only sizes. Here an incomplete file stays
as HASH.incomplete among the cache's blobs, and becomes a blob when it is complete and its content
has the hash that the hub states. huggingface_hub then finds the blobs, and links a snapshot to
them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from mlx_mtp.console import say_wrapped, size_text
from mlx_mtp.errors import ModelError
from mlx_mtp.progress import Bar

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

_AT_ONCE = 4  # files downloaded in parallel
_ATTEMPTS = 5  # consecutive attempts without a new byte, after which the download fails
_CHUNK = 1 << 20  # bytes
_SILENCE_SECONDS = 10.0  # without data, after which a connection is retried
_HASHES = {40: "sha1", 64: "sha256"}  # by number of digits: for files in git, and in git LFS


def missing_bytes(repo_id: str, files: Iterable[RepoFile]) -> int:
    """Returns the bytes of the files missing in the cache; an incomplete file counts in full."""
    blobs = cache_directory(repo_id) / "blobs"
    return sum(file.size for file in files if not (blobs / hash_of(file)).exists())


def fetch(repo_id: str, commit: str, files: Iterable[RepoFile]) -> None:
    """Download the files that are missing among the cache's blobs; shows a progress bar.

    Raises ModelError if the disk has too little space or a file has another hash than the hub
    states, and whatever huggingface_hub raises. Incomplete files are kept for the next call.
    """
    from huggingface_hub import hf_hub_url

    blobs = cache_directory(repo_id) / "blobs"
    missing = {b: f for f in files if not (b := blobs / hash_of(f)).exists()}
    if not missing:
        return
    blobs.mkdir(parents=True, exist_ok=True)
    total = sum(file.size for file in missing.values())
    done = sum(min(_size(_part(b)), file.size) for b, file in missing.items())
    free = shutil.disk_usage(blobs).free
    if free < total - done:
        raise ModelError(
            f"{repo_id} takes {size_text(total - done)} more, and {blobs} has {size_text(free)} "
            "free: `mlx-mtp ls` shows what could be removed, and HF_HOME names another directory."
        )
    stop, lock = threading.Event(), threading.Lock()
    pool = ThreadPoolExecutor(_AT_ONCE)
    with Bar(desc="Downloading", total=total, initial=done) as bar:

        def advance(count: int) -> None:
            with lock:
                bar.update(count)

        try:
            downloads = []
            for blob, file in missing.items():
                url = hf_hub_url(repo_id, file.path, revision=commit)
                downloads.append(pool.submit(_download, url, blob, file, advance, stop))
            for download in as_completed(downloads):
                download.result()
        except KeyboardInterrupt:
            say_wrapped("Interrupted. The same command goes on from here.", file=sys.stderr)
            raise
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def cache_directory(repo_id: str) -> Path:
    """Returns the directory of a model in the hub's cache, which need not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}"


def hash_of(file: RepoFile) -> str:
    """Returns the hash that names a file in the hub's cache; raises ModelError if malformed."""
    text = str(file.blob_id if file.lfs is None else file.lfs.sha256)
    if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", text):  # It becomes part of a path.
        raise ModelError(f"The hub's answer about {file.path} is damaged: {text!r} is no hash.")
    return text


def check_content(path: Path, expected: str, name: str) -> None:
    """Remove a file and raise ModelError if its content does not have the hash `expected`."""
    algorithm = _HASHES.get(len(expected))
    if algorithm is None:  # A mirror may name its files in another way.
        return
    digest = hashlib.new(algorithm)
    if algorithm == "sha1":
        digest.update(b"blob %d\0" % _size(path))
    with path.open("rb") as file:
        hashlib.file_digest(file, lambda: digest)
    if digest.hexdigest() != expected:
        path.unlink()
        raise ModelError(
            f"{name} does not have the content whose hash the hub gives: it was damaged on its "
            "way, and is removed. The same command downloads it again."
        )


class _StoppedError(Exception):
    """Another file's download failed, or the user interrupted."""


def _download(
    url: str, blob: Path, file: RepoFile, advance: Callable[[int], None], stop: threading.Event
) -> None:
    part = _part(blob)
    with part.open("ab") as target:
        # Another process may be downloading the same file.
        while not _locked(target):
            if stop.wait(0.2):
                raise _StoppedError
        if blob.exists():
            part.unlink(missing_ok=True)
            return
        if target.tell() > file.size:
            target.truncate(0)
        failures = 0
        while (begin := _end(target)) < file.size:
            fault: Exception = ModelError(f"{file.path} ends too early, at {begin:,} bytes.")
            try:
                _append(url, target, advance, stop)
            except (OSError, _StoppedError):  # a disk error, or an error response of the hub
                raise
            except Exception as error:  # a lost connection; each HTTP client has its own class
                fault = error
            failures = failures + 1 if _end(target) == begin else 0
            if failures == _ATTEMPTS:
                raise fault
            if stop.wait(failures):
                raise _StoppedError
        os.fsync(target.fileno())
        check_content(part, blob.name, file.path)
        part.replace(blob)


def _append(
    url: str, target: BinaryIO, advance: Callable[[int], None], stop: threading.Event
) -> None:
    """Append the rest of a file to the incomplete file `target`, until the connection ends."""
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    begin = _end(target)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if begin:
        headers["Range"] = f"bytes={begin}-"
    with http_stream_backoff(
        "GET",
        url,
        headers=headers,
        timeout=_SILENCE_SECONDS,
        retry_on_exceptions=(),
        retry_on_status_codes=429,
    ) as response:
        hf_raise_for_status(response)
        if begin and response.status_code != 206:  # The server sends the whole file.
            target.truncate(0)
            advance(-begin)
        for chunk in response.iter_bytes(_CHUNK):
            if stop.is_set():
                raise _StoppedError
            target.write(chunk)
            advance(len(chunk))


def _locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # The file system has no locks.
        pass
    return True


def _part(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _end(file: BinaryIO) -> int:
    return file.seek(0, os.SEEK_END)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
