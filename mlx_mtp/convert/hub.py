"""Single files of a repository on the Hugging Face hub, into its usual cache.

`hf_hub_download` names what it has received anew in each run, so that an interrupted download of
gigabytes begins from nothing. Here it goes on where it broke off, also in another run.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    get_session,
    hf_hub_download,
    hf_hub_url,
)
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
    hf_raise_for_status,
)

from mlx_mtp.convert.console import Console
from mlx_mtp.errors import ConvertError
from mlx_mtp.models.hub import explained
from mlx_mtp.units import size_text

_MAX_ATTEMPTS = 5
_SECONDS_BEFORE_RETRY = 1.0


@dataclass(frozen=True)
class RemoteFile:
    """What the hub says of a file without sending it.

    Args:
        name: in the repository.
        size: in bytes.
        etag: for a large file its SHA-256.
        commit: of the revision asked for.
    """

    name: str
    size: int
    etag: str
    commit: str


class HubRepo:
    """A model repository at one revision.

    Args:
        repo_id: like `Qwen/Qwen3-Next-80B-A3B-Instruct`.
        revision: a branch, tag or commit; None for the main branch.
        retry_seconds: pause after a broken connection.
    """

    def __init__(
        self, repo_id: str, revision: str | None, retry_seconds: float = _SECONDS_BEFORE_RETRY
    ) -> None:
        self.repo_id, self._revision = repo_id, revision
        self._retry_seconds = retry_seconds

    @cached_property
    def commit(self) -> str:
        """What the revision stands for."""
        path = self.small("config.json")
        if path is not None:
            return path.parent.name
        for name in ("model.safetensors.index.json", "mtp.safetensors", "model.safetensors"):
            found = self._head(name, self._revision)
            if found is not None:
                return found.commit
        raise ConvertError(
            f"{self.repo_id} has neither a config.json nor a safetensors file, so it is "
            "not a model."
        )

    def small(self, name: str) -> Path | None:
        """A file of no great size, downloaded or from the cache; None if there is no such file."""
        revision = self._revision if name == "config.json" else self.commit
        with self._explained(name), _quiet():
            try:
                return Path(hf_hub_download(self.repo_id, name, revision=revision))
            except hub_errors.RemoteEntryNotFoundError:
                return None

    def remote(self, name: str) -> RemoteFile | None:
        """Size of a file; None if there is no such file."""
        return self._head(name, self.commit)

    def tensor_names(self, name: str) -> list[str]:
        """What a safetensors file holds, by its header alone; nothing if there is no such file."""
        if self.remote(name) is None:
            return []
        with self._explained(name):
            header = HfApi().parse_safetensors_file_metadata(
                self.repo_id, name, revision=self.commit
            )
        return list(header.tensors)

    def names(self) -> list[str]:
        """All files."""
        with self._explained("the list of files"):
            return HfApi().list_repo_files(self.repo_id, revision=self.commit)

    def cached(self, name: str) -> Path | None:
        """A file that has been downloaded already."""
        path = self._storage / "snapshots" / self.commit / name
        return path if path.exists() else None

    def fetch(self, names: Sequence[str], console: Console) -> list[Path]:
        """Files of any size, downloaded in turn unless they are in the cache.

        A download that breaks off goes on where it stopped, now or in a later run.

        Raises:
            ConvertError: it doesn't come to an end, or the disk is too small.
        """
        missing = self._missing(names)
        if missing:
            self._announce(missing, len(names), console)
        for file in missing:
            self._download(file, console)
        paths = [self.cached(name) for name in names]
        return [path for path in paths if path is not None]

    def download_size(self, names: Sequence[str]) -> int:
        """Bytes that `fetch` would have to download."""
        return sum(f.size - _size(self._partial(f)) for f in self._missing(names))

    def _missing(self, names: Sequence[str]) -> list[RemoteFile]:
        return [self._known(name) for name in names if self.cached(name) is None]

    def _announce(self, missing: Sequence[RemoteFile], num_files: int, console: Console) -> None:
        total = sum(file.size for file in missing)
        left = total - sum(_size(self._partial(file)) for file in missing)
        here = "" if len(missing) == num_files else f" of {num_files}, the others are cached"
        begun = "" if left == total else f", {size_text(left)} of them still to come"
        console.say(
            f"Downloading {len(missing)} file(s){here} from {self.repo_id} at {self.commit[:12]}: "
            f"{size_text(total)}{begun}."
        )
        self._storage.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._storage).free
        if left > free:
            raise ConvertError(
                f"{self._storage} has {size_text(free)} free and {size_text(left)} are to be "
                "downloaded. Make room, or set HF_HOME to a larger disk."
            )

    def _download(self, file: RemoteFile, console: Console) -> None:
        """Into the cache's folder of contents; huggingface_hub then gives it its name there."""
        partial = self._partial(file)
        partial.parent.mkdir(parents=True, exist_ok=True)
        done = _size(partial)
        with (
            self._explained(file.name),
            partial.open("ab") as out,
            _exclusively(out, file.name),
            console.progress(f"Downloading {file.name}", file.size, done) as advance,
        ):
            self._receive(file, out, advance)
            partial.replace(partial.with_name(file.etag))
        with self._explained(file.name), _quiet():
            hf_hub_download(self.repo_id, file.name, revision=self.commit)

    def _receive(self, file: RemoteFile, out: Any, advance: Callable[[int], None]) -> None:
        attempts = 0
        while out.tell() < file.size:
            before, broken = out.tell(), None
            try:
                self._receive_once(file, out, advance)
            except hub_errors.HfHubHTTPError as error:
                if error.response.status_code < 500:
                    raise
                broken = error
            except OSError:
                # The disk's: the HTTP client that huggingface_hub brings has a tree of its own.
                raise
            except Exception as error:
                broken = error
            attempts = 1 if out.tell() > before else attempts + 1
            if attempts == _MAX_ATTEMPTS:
                raise broken or ConnectionError("the hub closed the connection too early")
            if out.tell() < file.size:
                time.sleep(self._retry_seconds)
        if out.tell() != file.size:
            out.truncate(0)
            raise ConvertError(
                f"{file.name} came with more than the {file.size:,} bytes it should have."
            )

    def _receive_once(self, file: RemoteFile, out: Any, advance: Callable[[int], None]) -> None:
        headers = {
            **build_hf_headers(),
            "Range": f"bytes={out.tell()}-",
            "Accept-Encoding": "identity",
        }
        url = hf_hub_url(self.repo_id, file.name, revision=self.commit)
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=timeout
        ) as response:
            hf_raise_for_status(response)
            if response.status_code != 206:
                advance(-out.tell())
                out.seek(0)
                out.truncate()
            # In pieces as they come: a broken connection would lose the start of larger ones.
            for chunk in response.iter_bytes():
                out.write(chunk)
                advance(len(chunk))

    def _head(self, name: str, revision: str | None) -> RemoteFile | None:
        with self._explained(name):
            try:
                found = get_hf_file_metadata(hf_hub_url(self.repo_id, name, revision=revision))
            except hub_errors.RemoteEntryNotFoundError:
                return None
        size, etag, commit = found.size, found.etag, found.commit_hash
        # Etag and commit become names of files.
        if size is None or not _is_name(etag) or not _is_name(commit):
            raise ConvertError(f"The hub does not report the size of {name} in {self.repo_id}.")
        return RemoteFile(name, size, str(etag), str(commit))

    def _known(self, name: str) -> RemoteFile:
        file = self.remote(name)
        if file is None:
            raise ConvertError(
                f"{self.repo_id} has no {name}, which its model.safetensors.index.json names."
            )
        return file

    @property
    def _storage(self) -> Path:
        return Path(constants.HF_HUB_CACHE) / f"models--{self.repo_id.replace('/', '--')}"

    def _partial(self, file: RemoteFile) -> Path:
        return self._storage / "blobs" / f"{file.etag}.mlx-mtp.incomplete"

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        at = f" at revision {self._revision}" if self._revision else ""
        kept = ". What has arrived is kept: the same command goes on from there."
        with explained(self.repo_id, f"{name} of {self.repo_id}{at}", ConvertError, kept):
            try:
                yield
            except hub_errors.RevisionNotFoundError as error:
                raise ConvertError(f"{self.repo_id} has no revision {self._revision!r}.") from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_name(text: str | None) -> bool:
    return text is not None and re.fullmatch(r"[\w-]+", text, re.ASCII) is not None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No bar for a file of a few kilobytes, nor for one that is there already."""
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextlib.contextmanager
def _exclusively(file: Any, name: str) -> Iterator[None]:
    """Keep two runs from appending to one file."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConvertError(f"Another run is downloading {name}; wait for it.") from error
    yield
