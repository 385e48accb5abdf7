"""Checkpoints: which file holds which tensor, which tensors are the head, and how its norms are."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_mtp.convert.hub import INDEX, HubRepo, LocalRepo, Repo
from mlx_mtp.convert.tensors import FP8, SafetensorsFile, StoredTensor
from mlx_mtp.errors import CheckpointError, ConvertError
from mlx_mtp.models.head_weights import (
    NORM_CONVENTION_KEY,
    PREFIXES,
    SIDECAR_PATTERN,
    Convention,
    has_router,
    head_name,
)
from mlx_mtp.models.hub import HUB_ID
from mlx_mtp.models.loader import missing_head, read_json

_CONVOLUTION = "conv1d.weight"
_BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?([\w./-]+)", re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """A checkpoint with a head, of which nothing but names has been read."""

    name: str
    repo: Repo
    config: dict[str, Any]  # Empty if there is no config.json.
    file_of: dict[str, str]  # File of each of the head's tensors, by its name in the checkpoint.

    @property
    def files(self) -> list[str]:
        return sorted(set(self.file_of.values()))

    @property
    def is_moe(self) -> bool:
        return has_router(head_name(key) or "" for key in self.file_of)

    def tensors(self, files: Iterable[SafetensorsFile]) -> dict[str, StoredTensor]:
        """The head's tensors by name without prefix, FP8 ones with their scales."""
        by_name = {file.path.name: file for file in files}
        found: dict[str, StoredTensor] = {}
        for key, file_name in self.file_of.items():
            file, name = by_name[file_name], head_name(key) or key
            if key not in file.tensors:
                raise CheckpointError(f"{file.path} has no {key}, though {INDEX} says so.")
            if name in found:
                raise CheckpointError(f"There are two heads: {found[name].name} and {key}.")
            found[name] = file.tensors[key]
        quantization = self.config.get("quantization_config")
        block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
        for name, tensor in list(found.items()):
            if tensor.dtype == FP8:
                scales = found.pop(f"{name}_scale_inv", None)
                found[name] = tensor.with_scales(scales, tuple(block or (128, 128)))
        return found


def open_source(name: str, revision: str | None = None) -> Source:
    """Open a directory or a repository on the hub, of which only small files are downloaded.

    Raises:
        ModelError: there is no such source, it can't be had or is damaged, or it has no head.
    """
    path = Path(name).expanduser()
    if path.is_dir() and revision is not None:
        raise ConvertError(f"--revision is for a hub id, and {name} is a directory.")
    if not path.is_dir() and (path.exists() or not HUB_ID.fullmatch(name)):
        raise ConvertError(
            f"{name!r} is neither an existing directory nor a hub id of the form organisation/name."
        )
    repo = LocalRepo(path) if path.is_dir() else HubRepo(name, revision)
    config = repo.small("config.json")
    names = _indexed(repo)
    if not head_of(names):
        # A head that was added later, or a model without an index.
        names |= _scan(repo, r"[^/]+\.safetensors", but=set(names.values()))
    if not head_of(names):
        raise ConvertError(
            f"{name} has no MTP head: of its {len(names)} tensors none has a name that begins "
            f"with {', '.join(repr(p) for p in PREFIXES)}. Some models were published without "
            "one, for example Qwen3-Coder-Next, and merged or pruned ones (REAM, REAP) lose it. "
            "Check that --source-model is the original Qwen release that the MLX model was made "
            f"from, and look for 'mtp' in its {INDEX}."
        )
    return Source(repo.repo_id, repo, read_json(config) if config else {}, head_of(names))


def check_head_on_hub(name: str | None) -> None:
    """Refuse a repository without a head before its weights are downloaded.

    A directory is left to the loader. A gated repository, or a hub that can't be reached, is left
    to the download: either it explains the failure, or the model is in the cache.

    Raises:
        MissingHeadError: names the command that adds the head.
    """
    if name is None or Path(name).expanduser().exists() or not HUB_ID.fullmatch(name):
        return
    repo = HubRepo(name, None)
    try:
        # add-mtp-weights puts a head into the cache, beside what the hub has.
        if cached_sidecar(repo) or remote_sidecar(repo) or head_of(weight_map_of(repo)):
            return
        base = base_model(repo.small("README.md"))
    except ConvertError:
        return
    raise missing_head(name, base, "Its weights were not downloaded.")


def cached_sidecar(repo: HubRepo) -> list[Path]:
    """The files of a head that was added to the cached copy."""
    config = repo.small("config.json")
    return [] if config is None else sorted(config.parent.glob(SIDECAR_PATTERN))


def remote_sidecar(repo: HubRepo) -> list[str]:
    """The files of a head beside the model."""
    return sorted(fnmatch.filter(repo.names(), SIDECAR_PATTERN))


def base_model(readme: Path | None) -> str | None:
    """The model that a model card says it was converted from."""
    if readme is None or not readme.is_file():
        return None
    found = _BASE_MODEL.search(readme.read_text(encoding="utf-8", errors="replace"))
    return found[1] if found else None


def weight_map_of(repo: Repo) -> dict[str, str]:
    """File of each of a model's own tensors, by its index or the files' headers."""
    return _indexed(repo) or _scan(repo, r"model[^/]*\.safetensors")


def head_of(weight_map: Mapping[str, str]) -> dict[str, str]:
    """The part of a map that is about the head."""
    return {key: file for key, file in weight_map.items() if head_name(key) is not None}


def trunk_tensor(repo: Repo, ending: str) -> StoredTensor | None:
    """The first tensor of a directory's trunk with this ending of its name."""
    for key, file in weight_map_of(repo).items() if isinstance(repo, LocalRepo) else ():
        if key.endswith(ending) and head_name(key) is None and (path := repo.small(file)):
            return SafetensorsFile(path).tensors.get(key)
    return None


def norm_convention(
    files: Sequence[SafetensorsFile], source: Source, asked: Convention | None
) -> Convention:
    """Whether the norms in a head's files are zero-centred ("hf"); their values never decide.

    In this order: what a header says in so many words; the flag; the layout of a convolution in the
    same file, which whoever wrote it must have treated alike ([C, 1, K] in HF files, [C, K, 1] in
    MLX ones); PyTorch's mark in the header; a convolution elsewhere in the source, if it is HF's.
    ConvertError if none of these says it, or they contradict each other.
    """
    stated = {f.metadata.get(NORM_CONVENTION_KEY) for f in files} - {None}
    if asked and stated - {asked}:
        raise ConvertError(
            f"--mtp-norms says {asked}, but the header of {files[0].path} says "
            f"{NORM_CONVENTION_KEY} {', '.join(map(str, stated))}."
        )
    found = {asked} if asked else {_convention_of(file, source) for file in files}
    if len(found) == 1 and (convention := found.pop()) is not None:
        return convention
    names = ", ".join(str(file.path) for file in files)
    raise ConvertError(
        f"Whether the norms in {names} are zero-centred can't be determined from the headers or "
        "from a convolution's layout, and guessing would give a head that drafts badly. Say "
        "where the head comes from: --mtp-norms hf for tensors as Hugging Face stores them (w), "
        "--mtp-norms mlx where the 1 has been added (1 + w)."
    )


def _convention_of(file: SafetensorsFile, source: Source) -> Convention | None:
    stated = file.metadata.get(NORM_CONVENTION_KEY)
    if stated is not None:
        return "hf" if stated == "hf" else "mlx" if stated == "mlx" else None
    for name, tensor in file.tensors.items():
        if name.endswith(_CONVOLUTION) and head_name(name) is None:
            return "mlx" if tensor.shape[-1] == 1 else "hf"
    if file.metadata.get("format") == "pt":
        return "hf"
    elsewhere = trunk_tensor(source.repo, _CONVOLUTION)
    # An MLX trunk proves nothing: a raw head is easily put beside a converted one.
    return "hf" if elsewhere and elsewhere.shape[-1] != 1 else None


def _scan(repo: Repo, pattern: str, but: Iterable[str] = ()) -> dict[str, str]:
    files = [name for name in repo.names() if re.fullmatch(pattern, name) and name not in but]
    return {name: file for file in sorted(files) for name in repo.tensor_names(file)}


def _indexed(repo: Repo) -> dict[str, str]:
    """File of each tensor by the index; only names, as an index must not lead elsewhere."""
    path = repo.small(INDEX)
    if path is None:
        return {}
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
