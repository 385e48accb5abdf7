"""Downloads of files into the hub's cache: they go on where they were interrupted.

huggingface_hub throws an interrupted file away and compares sizes alone. Here a part of a file
stays as HASH.incomplete beside the cache's blobs, and becomes a blob when its content has the hash
that the hub gives. The library then finds the blobs, and makes its snapshot of them.
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

_AT_ONCE = 4  # files
_ATTEMPTS = 5  # without a byte, after which a file is given up
_CHUNK = 1 << 20
_SILENCE_SECONDS = 10.0  # of a connection, after which it is tried again
_HASHES = {40: "sha1", 64: "sha256"}  # of a file in git, and of one beside it


def missing_bytes(repo_id: str, files: Iterable[RepoFile]) -> int:
    """How much of a repository's files is not in the cache, without parts of files."""
    blobs = cache_directory(repo_id) / "blobs"
    return sum(file.size for file in files if not (blobs / hash_of(file)).exists())


def fetch(repo_id: str, commit: str, files: Iterable[RepoFile]) -> None:
    """Bring what is missing of a repository's files into the cache's blobs; shows a bar.

    Raises ModelError if there is no room, or if a content is not what the hub says, and whatever
    the hub's client raises. What has arrived of a file is kept for the next time.
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
    """The directory of a model in the hub's cache, which need not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}"


def hash_of(file: RepoFile) -> str:
    """The hash by which the hub's cache names a file; ModelError if the hub gives none."""
    text = str(file.blob_id if file.lfs is None else file.lfs.sha256)
    if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", text):  # A path is made of it.
        raise ModelError(f"The hub's answer about {file.path} is damaged: {text!r} is no hash.")
    return text


def check_content(path: Path, expected: str, name: str) -> None:
    """ModelError if a file's content does not have this hash; the file is removed."""
    algorithm = _HASHES.get(len(expected))
    if algorithm is None:  # A mirror may name its files otherwise.
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
    """Another file failed, or the user wants to stop."""


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
            except (OSError, _StoppedError):  # the disk's, or an answer of the hub
                raise
            except Exception as error:  # the connection's, of any HTTP client
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
    """Append the rest of a file to its part, until the connection ends."""
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
        if begin and response.status_code != 206:  # It sends all of the file.
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
