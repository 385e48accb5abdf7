"""Where a head comes from: a directory, or a repository on the hub."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlx_mtp.convert.console import Console
from mlx_mtp.convert.hub import HubRepo
from mlx_mtp.convert.rows import StoredTensor
from mlx_mtp.convert.safetensors_file import SafetensorsFile
from mlx_mtp.errors import CheckpointError, ConvertError
from mlx_mtp.models.head_weights import PREFIXES, SIDECAR, head_name
from mlx_mtp.models.hub import HUB_ID
from mlx_mtp.models.loader import read_json

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_FP8_BLOCK = (128, 128)


class Source(ABC):
    """A checkpoint with a head, of which nothing but names has been read.

    Attributes:
        name: what the user called it.
        revision: the commit, for a repository.
        config: config.json, empty if there is none.
        file_of: file of each of the head's tensors, by its name in the checkpoint.
        directory: where its other files are, if they are on this machine.
    """

    name: str
    revision: str | None = None
    config: dict[str, Any]
    file_of: dict[str, str]
    directory: Path | None = None

    @abstractmethod
    def fetch(self, console: Console) -> list[Path]:
        """Paths of the files that `file_of` names, downloaded if they have to be."""

    @abstractmethod
    def download_size(self) -> int:
        """Bytes that `fetch` would still have to download."""

    @property
    def head_names(self) -> list[str]:
        """The head's tensors without their prefix."""
        return [name for key in self.file_of if (name := head_name(key)) is not None]

    @property
    def fp8_block(self) -> tuple[int, int]:
        """Rows and columns that share a scale, where matrices are FP8."""
        quantization = self.config.get("quantization_config")
        block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
        if isinstance(block, list) and len(block) == 2:
            return int(block[0]), int(block[1])
        return _FP8_BLOCK

    def _no_head(self, num_tensors: int) -> ConvertError:
        return ConvertError(
            f"{self.name} has no MTP head: of its {num_tensors} tensors none has a name that "
            f"begins with {', '.join(repr(p) for p in PREFIXES)}. Some models were published "
            "without one, for example Qwen3-Coder-Next, and merged or pruned ones (REAM, REAP) "
            "lose it. Check that --source-model is the original Qwen release that the MLX model "
            f"was made from, and look for 'mtp' in its {INDEX}."
        )


class LocalSource(Source):
    """A directory.

    Raises:
        ConvertError: it has no head.
        CheckpointError: a file is damaged, or is named by the index and missing.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path.resolve())
        self.directory: Path = path
        self.config = read_json(path / "config.json", default={})
        index = _read_index(path / INDEX) if (path / INDEX).is_file() else {}
        self.file_of = head_of(index)
        if not self.file_of:
            # No index, or a head that was added later.
            scanned = _scan(path, "*.safetensors")
            self.file_of = head_of(scanned)
            if not self.file_of:
                raise self._no_head(max(len(index), len(scanned)))

    def fetch(self, console: Console) -> list[Path]:
        """See the base class."""
        paths = [self.directory / name for name in sorted(set(self.file_of.values()))]
        for path in paths:
            if not path.is_file():
                raise CheckpointError(
                    f"{path} is missing, though {INDEX} names it: is the download complete?"
                )
        return paths

    def download_size(self) -> int:
        """See the base class."""
        return 0


class HubSource(Source):
    """A repository on the hub, of which the index alone is downloaded at first.

    Raises:
        ConvertError: it has no head, or can't be had.
    """

    def __init__(self, repo: HubRepo) -> None:
        self._repo = repo
        self.name, self.revision = repo.repo_id, repo.commit
        config = repo.small("config.json")
        self.config = {} if config is None else read_json(config)
        index = repo.small(INDEX)
        weight_map = {} if index is None else weight_map_of(index.parent)
        self.file_of = head_of(weight_map)
        num_tensors = len(weight_map)
        for name in (SIDECAR, SINGLE_FILE):
            if self.file_of or name in weight_map.values():
                break
            # Not in the index: a head that was added later, or a model of one file.
            keys = repo.tensor_names(name)
            num_tensors += len(keys)
            self.file_of = head_of(dict.fromkeys(keys, name))
        if not self.file_of:
            raise self._no_head(num_tensors)

    def fetch(self, console: Console) -> list[Path]:
        """See the base class."""
        return self._repo.fetch(sorted(set(self.file_of.values())), console)

    def download_size(self) -> int:
        """See the base class."""
        return self._repo.download_size(sorted(set(self.file_of.values())))


def open_source(name: str, revision: str | None) -> Source:
    """The source that a name means.

    Args:
        name: an existing directory, or a hub id.
        revision: of a repository.

    Raises:
        ConvertError: there is no such source, or it has no head.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConvertError(f"--revision is for a hub id, and {name} is a directory.")
        return LocalSource(path)
    if path.exists() or not HUB_ID.fullmatch(name):
        raise ConvertError(
            f"{name!r} is neither an existing directory nor a hub id of the form organisation/name."
        )
    return HubSource(HubRepo(name, revision))


def head_tensors(
    file_of: Mapping[str, str], files: Iterable[SafetensorsFile]
) -> dict[str, StoredTensor]:
    """The head's tensors by name without prefix.

    Raises:
        CheckpointError: one is missing from its file, or there are two heads.
    """
    by_name = {file.path.name: file for file in files}
    found: dict[str, StoredTensor] = {}
    for key, file_name in file_of.items():
        file, name = by_name[file_name], head_name(key)
        if key not in file.tensors:
            raise CheckpointError(f"{file.path} has no {key}, though {INDEX} says so.")
        assert name is not None
        if name in found:
            raise CheckpointError(f"There are two heads: {found[name].info.name} and {key}.")
        found[name] = StoredTensor(file, file.tensors[key])
    return found


def trunk_file(directory: Path, ending: str) -> Path | None:
    """A file of a directory that holds a tensor of the trunk whose name has this ending."""
    for key, name in weight_map_of(directory).items():
        if key.endswith(ending) and head_name(key) is None and (directory / name).is_file():
            return directory / name
    return None


def weight_map_of(directory: Path) -> dict[str, str]:
    """File of each of a model's own tensors, by its index or the files' headers."""
    index = directory / INDEX
    return _read_index(index) if index.is_file() else _scan(directory, "model*.safetensors")


def head_of(weight_map: Mapping[str, str]) -> dict[str, str]:
    """The part of a map that is about the head."""
    return {key: file for key, file in weight_map.items() if head_name(key) is not None}


def _scan(directory: Path, pattern: str) -> dict[str, str]:
    found = {}
    for path in sorted(directory.glob(pattern)):
        with SafetensorsFile(path) as file:
            found.update(dict.fromkeys(file.tensors, path.name))
    return found


def _read_index(path: Path) -> dict[str, str]:
    """Of an index: file of each tensor. Only names, as an index must not lead elsewhere."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        found = {str(key): Path(str(file)).name for key, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {error!r}") from error
    for key, file in found.items():
        if not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path} names {file[:80]!r} for {key[:80]}; only safetensors files are read."
            )
    return found
