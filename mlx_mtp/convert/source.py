"""Checkpoints in a directory or on the hub: which file holds which tensor of the head."""

import contextlib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import huggingface_hub as hub
from huggingface_hub import get_hf_file_metadata
from huggingface_hub.errors import RemoteEntryNotFoundError
from huggingface_hub.file_download import HfFileMetadata

from mlx_mtp.console import say_wrapped
from mlx_mtp.convert.files import FP8, SafetensorsFile, StoredTensor
from mlx_mtp.errors import CheckpointError, ConvertError
from mlx_mtp.models.files import check_directory, read_index, read_json
from mlx_mtp.models.head_weights import (
    CONVOLUTION,
    FP8_SCALES,
    NESTED_SIDECAR,
    NORM_CONVENTION_KEY,
    PREFIXES,
    SIDECAR_PATTERN,
    Convention,
    has_router,
    head_names,
    stated_convention,
)
from mlx_mtp.models.hub import (
    HUB_ID,
    cached_file,
    cached_model,
    explained,
    fetch_files,
    use_cache_if_offline,
)
from mlx_mtp.models.loader import family_of, refuse_fp8
from mlx_mtp.models.published import head_repo_of, source_of

INDEX = "model.safetensors.index.json"
_CARD_CHARACTERS = 1 << 20  # maximum to read of a model's card
_BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?([\w./-]+)", re.MULTILINE)


class LocalRepo:
    """A model's directory, with the methods of `HubRepo`."""

    commit_hash = None

    def __init__(self, path: Path) -> None:
        self.path, self.repo_id = check_directory(path), str(path.resolve())

    def file(self, name: str) -> Path | None:
        return self.path / name if (self.path / name).is_file() else None

    def names(self) -> list[str]:
        nested = [NESTED_SIDECAR] if self.file(NESTED_SIDECAR) else []
        return sorted(path.name for path in self.path.iterdir()) + nested

    def tensor_names(self, name: str) -> list[str]:
        return list(SafetensorsFile(self.path / name).tensors)

    def missing(self, names: Sequence[str]) -> dict[str, int]:
        for name in names:
            if not self.file(name):
                fault = f"is missing, though {INDEX} names it: is the download complete?"
                raise CheckpointError(f"{self.path / name} {fault}")
        return {}


class HubRepo:
    """A model repository at one revision, in the hub's cache; ConvertError if the hub fails."""

    def __init__(self, repo_id: str, revision: str | None) -> None:
        self.repo_id, self._revision = repo_id, revision  # None: the main branch
        use_cache_if_offline()

    @cached_property
    def commit_hash(self) -> str:
        if (path := self.file("config.json")) is not None:
            return path.parent.name
        with self._explained("the list of files"):
            info = hub.HfApi().model_info(self.repo_id, revision=self._revision or "main")
        return _checked_version(info.sha, self.repo_id)

    @property
    def directory(self) -> Path:
        """The cache's directory with config.json; ConvertError if the model has none."""
        if (config := self.file("config.json")) is None:
            raise ConvertError(f"{self.repo_id} has no config.json, so it is not a model.")
        return config.parent

    def file(self, name: str) -> Path | None:
        revision = self._revision if name == "config.json" else self.commit_hash
        with self._explained(name), contextlib.suppress(RemoteEntryNotFoundError):
            return cached_file(self.repo_id, name, revision)
        return None

    def fetch(self, names: Sequence[str]) -> None:
        """Download files in one call."""
        with self._explained(", ".join(names)):
            fetch_files(self.repo_id, self.commit_hash, names)

    def names(self) -> list[str]:
        with self._explained("the list of files"):
            return hub.HfApi().list_repo_files(self.repo_id, revision=self.commit_hash)

    def tensor_names(self, name: str) -> list[str]:
        with self._explained(name):
            read_header = hub.HfApi().parse_safetensors_file_metadata
            return list(read_header(self.repo_id, name, revision=self.commit_hash).tensors)

    def remote(self, name: str) -> HfFileMetadata | None:
        with self._explained(name), contextlib.suppress(RemoteEntryNotFoundError):
            url = hub.hf_hub_url(self.repo_id, name, revision=self.commit_hash)
            metadata = get_hf_file_metadata(url)
            # huggingface_hub builds paths from these two values.
            _checked_version(metadata.etag, name)
            _checked_version(metadata.commit_hash, name)
            if metadata.size is None:
                raise ConvertError(f"The hub does not report the size of {name} in {self.repo_id}.")
            return metadata
        return None

    def missing(self, names: Sequence[str]) -> dict[str, int]:
        """Returns the bytes of each file that is not cached; ConvertError if the hub lacks one."""
        sizes = {}
        for name in names:
            cached = hub.try_to_load_from_cache(self.repo_id, name, revision=self.commit_hash)
            if isinstance(cached, str):
                continue
            if (metadata := self.remote(name)) is None:
                raise ConvertError(f"{self.repo_id} has no {name}, which its {INDEX} names.")
            sizes[name] = metadata.size
        return sizes

    def _explained(self, name: str) -> AbstractContextManager[None]:
        of = f" of {self.repo_id}" + (f" at revision {self._revision}" if self._revision else "")
        return explained(self.repo_id, name + of, ConvertError, self._revision)


@dataclass(frozen=True)
class Source:
    """A checkpoint with a head; only the tensors' names have been read."""

    name: str
    repo: LocalRepo | HubRepo
    config: dict[str, Any]  # empty if there is no config.json
    file_of: dict[str, str]  # files of the head's tensors, by the tensor's name in the checkpoint

    @property
    def files(self) -> list[str]:
        return sorted(set(self.file_of.values()))

    @property
    def is_moe(self) -> bool:
        return has_router(head_names(self.file_of).values())

    def tensors(self, files: Iterable[SafetensorsFile]) -> dict[str, StoredTensor]:
        """Returns the head's tensors by name without prefix, FP8 tensors with their scales.

        Raises CheckpointError if a tensor is missing or occurs twice, or scales don't fit.
        """
        by_name = {file.path.name: file for file in files}
        tensors: dict[str, StoredTensor] = {}
        for key, name in head_names(self.file_of).items():
            file = by_name[Path(self.file_of[key]).name]
            if key not in file.tensors:
                raise CheckpointError(f"{file.path} has no {key}, though {INDEX} says so.")
            if name in tensors:
                raise CheckpointError(f"There are two heads: {tensors[name].name} and {key}.")
            tensors[name] = file.tensors[key]
        return with_scales(tensors, self.config)


def with_scales(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """Join FP8 tensors with their scales; CheckpointError if scales are missing or don't fit."""
    quantization = config.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    joined = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype == FP8:
            scales = joined.pop(f"{name}{FP8_SCALES}", None)
            joined[name] = tensor.with_scales(scales, tuple(block or (128, 128)))
    return joined


def on_hub(name: str | None) -> TypeGuard[str]:
    """Returns True if a model's name is a hub id, False for a path or None (the bundled model)."""
    return bool(name and HUB_ID.fullmatch(name) and not Path(name).expanduser().exists())


def open_source(name: str, revision: str | None = None) -> Source:
    """Open a checkpoint; if it is on the hub, only small files are downloaded.

    Raises ConvertError if there is no such checkpoint, or if it has no head.
    """
    path = Path(name).expanduser()
    if path.is_dir() and revision is not None:
        raise ConvertError(f"--revision is for a hub id, and {name} is a directory.")
    if not path.is_dir() and not on_hub(name):
        raise ConvertError(
            f"{name!r} is neither an existing directory nor a hub id of the form organisation/name."
        )
    repo = LocalRepo(path) if path.is_dir() else HubRepo(name, revision)
    config = repo.file("config.json")
    names = _indexed(repo)
    if not head_of(names):
        # The head was added later, or there is no index.
        pattern = rf"[^/.][^/]*\.safetensors|{re.escape(NESTED_SIDECAR)}"
        names |= _scan(repo, pattern, but=set(names.values()))
    if not head_of(names):
        raise ConvertError(
            f"{name} has no MTP head: of its {len(names)} tensors none has a name that begins "
            f"with {', '.join(repr(p) for p in PREFIXES)}. Some models were published without "
            "one, for example Qwen3-Coder-Next, and merged or pruned ones (REAM, REAP) lose it. "
            "Check that --source-model is the original Qwen release that the MLX model was made "
            f"from, and look for 'mtp' in its {INDEX}. Without a head, "
            "`mlx_lm.convert --hf-path ORIGINAL -q` and `mlx-mtp serve mlx_model` work too."
        )
    return Source(repo.repo_id, repo, read_json(config) if config else {}, head_of(names))


def find_source(model_name: str, revision: str | None = None) -> Source:
    """Open the checkpoint that has a model's head, if the user doesn't name one.

    This is a repository with only the head, if one is known and exists (the smallest download), or
    else the original, as in the table of published models or the model's card. Raises ConvertError
    if none is found.
    """
    if revision is None and (alone := head_repo_of(model_name)):
        with contextlib.suppress(ConvertError):
            source = open_source(alone)
            say_wrapped(f"The source is {alone}, the head alone (--source-model names another).")
            return source
    original = source_of(model_name)
    if original is None:
        is_remote = on_hub(model_name)
        repo = HubRepo(model_name, None) if is_remote else LocalRepo(Path(model_name).expanduser())
        original = base_model(repo.file("README.md"))
    if original is None:
        raise ConvertError(
            f"{model_name} does not say what it was made from: name the original Hugging Face "
            "checkpoint with --source-model."
        )
    say_wrapped(f"The source is {original} (--source-model names another).")
    return open_source(original, revision)


def check_format_on_hub(name: str | None) -> None:
    """Raise UnsupportedModelError for a model on the hub that can't be served, before its download.

    These are models of an unknown family, FP8 releases, and repositories with only a head.
    """
    if not on_hub(name) or cached_model(name):
        return
    with contextlib.suppress(ConvertError):  # The download will report it.
        config = read_json(HubRepo(name, None).directory / "config.json")
        family_of(config, name)
        refuse_fp8(config, name)


def cached_sidecar(repo: HubRepo) -> list[Path]:
    """Returns the files of a head that was added to the cached copy of a model."""
    patterns = SIDECAR_PATTERN, NESTED_SIDECAR
    return sorted(path for pattern in patterns for path in repo.directory.glob(pattern))


def remote_sidecar(repo: HubRepo) -> list[str]:
    """Returns the names of the files of a head beside a model on the hub."""
    return sorted(fnmatch.filter(repo.names(), SIDECAR_PATTERN))


def base_model(readme: Path | None) -> str | None:
    """Returns the `base_model` of a model card; None if it has none, or there is no card."""
    if readme is None or not readme.is_file():
        return None
    with readme.open(encoding="utf-8", errors="replace") as file:
        match = _BASE_MODEL.search(file.read(_CARD_CHARACTERS))
    return match[1] if match else None


def weight_map_of(repo: LocalRepo | HubRepo) -> dict[str, str]:
    """Returns the file of each tensor in a model's own files, by the index or the files' headers.

    A head that was added later can be in a file that the index doesn't name.
    """
    names = _indexed(repo)
    if head_of(names):
        return names
    pattern = r"model[^/]*mtp[^/]*\.safetensors" if names else r"model[^/]*\.safetensors"
    return names | _scan(repo, pattern, but=set(names.values()))


def head_of(weight_map: Mapping[str, str]) -> dict[str, str]:
    """Returns the head's part of a map from tensors to files."""
    return {key: weight_map[key] for key in head_names(weight_map)}


def norm_convention(
    files: Sequence[SafetensorsFile], source: Source, flag: Convention | None
) -> Convention:
    """Returns "hf" if the norms in a head's files are zero-centred, "mlx" if they are not.

    The first of these decides: the file's header, `flag` (the value of --mtp-norms), the file's
    origin (`stated_convention`), and a convolution elsewhere in the source, if it has HF's layout.
    The norms' values are never used. Raises ConvertError if none of these decides, or if the files
    or the flag disagree.
    """
    names = ", ".join(str(file.path) for file in files)
    stated = {f.metadata.get(NORM_CONVENTION_KEY) for f in files} - {None}
    if flag and stated - {flag}:
        raise ConvertError(
            f"--mtp-norms says {flag}, but the header of {names} says {NORM_CONVENTION_KEY} "
            f"{', '.join(map(str, stated))}."
        )
    conventions = {flag or _convention_of(file, source) for file in files}
    if len(conventions) == 1 and (convention := conventions.pop()) is not None:
        return convention
    raise ConvertError(
        f"Whether the norms in {names} are zero-centred can't be determined from the headers or "
        "from a convolution's layout, and guessing would give a head that drafts badly. Say "
        "where the head comes from: --mtp-norms hf for tensors as Hugging Face stores them (w), "
        "--mtp-norms mlx where the 1 has been added (1 + w)."
    )


def _convention_of(file: SafetensorsFile, source: Source) -> Convention | None:
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    stated = stated_convention(file.path, file.metadata, shapes)
    if stated or NORM_CONVENTION_KEY in file.metadata or source.repo.commit_hash:
        return stated
    for name, other in weight_map_of(source.repo).items():
        if name.endswith(CONVOLUTION) and (path := source.repo.file(other)):
            # MLX's layout proves nothing: an unconverted head can be beside a converted trunk.
            return "hf" if SafetensorsFile(path).tensors[name].shape[-1] != 1 else None
    return None


def _scan(repo: LocalRepo | HubRepo, pattern: str, but: Iterable[str] = ()) -> dict[str, str]:
    files = [name for name in repo.names() if re.fullmatch(pattern, name) and name not in but]
    return {name: file for file in sorted(files) for name in repo.tensor_names(file)}


def _indexed(repo: LocalRepo | HubRepo) -> dict[str, str]:
    path = repo.file(INDEX)
    return {} if path is None else read_index(path)


def _checked_version(text: str | None, of: str) -> str:
    if text is None or not re.fullmatch(r"[\w-]+", text, re.ASCII):
        raise ConvertError(f"The hub's answer about {of} is damaged: {text!r} names no version.")
    return text
