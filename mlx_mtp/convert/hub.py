"""Where a checkpoint's files are: in a directory, or in a repository on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

from huggingface_hub import (
    HfApi,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import RemoteEntryNotFoundError
from huggingface_hub.file_download import HfFileMetadata

from mlx_mtp.convert.tensors import SafetensorsFile
from mlx_mtp.errors import CheckpointError, ConvertError
from mlx_mtp.models.hub import explained
from mlx_mtp.units import size_text

INDEX = "model.safetensors.index.json"


class LocalRepo:
    """A directory, with the methods of `HubRepo`."""

    commit = None

    def __init__(self, path: Path) -> None:
        self.path, self.repo_id = path, str(path.resolve())

    def small(self, name: str) -> Path | None:
        return self.path / name if (self.path / name).is_file() else None

    def names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir())

    def tensor_names(self, name: str) -> list[str]:
        return list(SafetensorsFile(self.path / name).tensors)

    def download_size(self, names: Sequence[str]) -> int:
        return 0

    def fetch(self, names: Sequence[str]) -> list[Path]:
        for name in names:
            if not self.small(name):
                raise CheckpointError(
                    f"{self.path / name} is missing, though {INDEX} names it: is the download "
                    "complete?"
                )
        return [self.path / name for name in names]


class HubRepo:
    """A model repository at one revision, in the usual cache; ConvertError where the hub fails.

    Args:
        revision: a branch, tag or commit; None for the main branch.
    """

    def __init__(self, repo_id: str, revision: str | None) -> None:
        self.repo_id, self._revision = repo_id, revision

    @cached_property
    def commit(self) -> str:
        path = self.small("config.json")
        if path is not None:
            return path.parent.name
        with self._explained("the list of files"):
            found = HfApi().model_info(self.repo_id, revision=self._revision or "main")
        return _checked(found.sha, self.repo_id)

    def small(self, name: str) -> Path | None:
        """A file of no great size, downloaded or from the cache; None if there is no such file."""
        revision = self._revision if name == "config.json" else self.commit
        with self._explained(name):
            try:
                return Path(hf_hub_download(self.repo_id, name, revision=revision))
            except RemoteEntryNotFoundError:
                return None

    def names(self) -> list[str]:
        with self._explained("the list of files"):
            return HfApi().list_repo_files(self.repo_id, revision=self.commit)

    def tensor_names(self, name: str) -> list[str]:
        """What a safetensors file holds, by its header alone."""
        with self._explained(name):
            read_header = HfApi().parse_safetensors_file_metadata
            return list(read_header(self.repo_id, name, revision=self.commit).tensors)

    def remote(self, name: str) -> HfFileMetadata | None:
        """What the hub says of a file without sending it; None if there is no such file."""
        with self._explained(name):
            try:
                url = hf_hub_url(self.repo_id, name, revision=self.commit)
                found = get_hf_file_metadata(url)
            except RemoteEntryNotFoundError:
                return None
        # huggingface_hub makes paths of these two.
        _checked(found.etag, name)
        _checked(found.commit_hash, name)
        if found.size is None:
            raise ConvertError(f"The hub does not report the size of {name} in {self.repo_id}.")
        return found

    def download_size(self, names: Sequence[str]) -> int:
        """Bytes that `fetch` would have to download."""
        return sum(self._missing(names).values())

    def fetch(self, names: Sequence[str]) -> list[Path]:
        """Files of any size, downloaded unless they are in the cache."""
        missing = self._missing(names)
        if missing:
            which = f"{len(missing)} of {len(names)} files from {self.repo_id}"
            size = size_text(sum(missing.values()))
            print(f"Downloading {which} at {self.commit[:12]}: {size}.", flush=True)
        paths = []
        for name in names:
            with self._explained(name):
                paths.append(Path(hf_hub_download(self.repo_id, name, revision=self.commit)))
        return paths

    def _missing(self, names: Sequence[str]) -> dict[str, int]:
        sizes = {}
        for name in names:
            if isinstance(try_to_load_from_cache(self.repo_id, name, revision=self.commit), str):
                continue
            found = self.remote(name)
            if found is None:
                raise ConvertError(f"{self.repo_id} has no {name}, which its {INDEX} names.")
            sizes[name] = found.size
        return sizes

    def _explained(self, name: str) -> AbstractContextManager[None]:
        at = f" at revision {self._revision}" if self._revision else ""
        what = f"{name} of {self.repo_id}{at}"
        return explained(self.repo_id, what, ConvertError, revision=self._revision)


Repo = LocalRepo | HubRepo


def _checked(text: str | None, of: str) -> str:
    if text is None or not re.fullmatch(r"[\w-]+", text, re.ASCII):
        raise ConvertError(f"The hub's answer about {of} is damaged: {text!r} names no version.")
    return text
