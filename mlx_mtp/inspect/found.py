"""What a model is and whether it has its MTP head, by its headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_mtp.convert.hub import HubRepo
from mlx_mtp.convert.hub_head import base_model, cached_sidecar, remote_sidecar
from mlx_mtp.convert.sidecar import FORMAT_VERSION_KEY, Existing
from mlx_mtp.convert.source import LocalRepo, head_of, weight_map_of
from mlx_mtp.convert.target import Target
from mlx_mtp.convert.tensors import SafetensorsFile
from mlx_mtp.errors import ModelError
from mlx_mtp.models.hub import HUB_ID, resolve_model
from mlx_mtp.units import size_text


@dataclass(frozen=True)
class Found:
    """What there is of a model.

    Args:
        name: a directory or a hub id.
        target: its config.json.
        trunk: bytes of its own files, and how many files.
        head: in words; None without one.
        head_bytes: that come on top of the trunk's.
        base: the model it was converted from, as far as it says.
        directory: that holds its weights; None if they are elsewhere.
    """

    name: str
    target: Target
    trunk: tuple[int, int]
    head: str | None
    head_bytes: int = 0
    base: str | None = None
    directory: Path | None = None


def find(name: str | None) -> Found:
    """Look at a model. No weight is read, nor downloaded.

    Args:
        name: a directory or a hub id; None for the bundled model.

    Raises:
        ModelError: there is no such model, or no family serves it.
    """
    if name is None or Path(name).expanduser().is_dir() or not HUB_ID.fullmatch(name):
        return _local(resolve_model(name))
    return _remote(HubRepo(name, None))


def _local(path: Path) -> Found:
    target = Target(path)
    files = sorted(path.glob("model*.safetensors"))
    existing = Existing.find(path)
    base = base_model(path / "README.md")
    trunk = (sum(f.stat().st_size for f in files), len(files))
    if existing is not None:
        size = sum(file.stat().st_size for file in existing.files)
        return Found(str(path), target, trunk, _sidecar(existing, size), size, base, path)
    head = head_of(weight_map_of(LocalRepo(path)))
    if not head:
        return Found(str(path), target, trunk, None, 0, base, path)
    size = 0
    for file_name in set(head.values()):
        tensors = SafetensorsFile(path / file_name).tensors
        size += sum(tensor.nbytes for key, tensor in tensors.items() if key in head)
    text = f"in {_names(head.values())}: {size_text(size)} of the weights"
    return Found(str(path), target, trunk, text, 0, base, path)


def _sidecar(existing: Existing, size: int) -> str:
    if not existing.files:
        return "can't be read: write it again with `mlx-mtp add-mtp-weights --force`"
    metadata = existing.metadata
    names = ", ".join(file.name for file in existing.files)
    if FORMAT_VERSION_KEY not in metadata:
        return f"in {names}: {size_text(size)}, not made by this program"
    unquantized = metadata["mode"] == "none"
    bits = "unquantized" if unquantized else f"{metadata['bits']} bits, {metadata['mode']}"
    revision = f" at {metadata['source_revision'][:12]}" if metadata["source_revision"] else ""
    return (
        f"in {names}: {size_text(size)}, {bits}; from {metadata['source']}{revision}, "
        f"by {metadata['created_by']}"
    )


def _remote(repo: HubRepo) -> Found:
    config = repo.small("config.json")
    if config is None:
        raise ModelError(f"{repo.repo_id} has no config.json, so it is not a model.")
    target = Target(config.parent)
    names = weight_map_of(repo)
    trunk = _sizes(repo, set(names.values()))
    base = base_model(repo.small("README.md"))
    head = head_of(names)
    if head:
        return Found(repo.repo_id, target, trunk, f"in {_names(head.values())}", 0, base)
    added = cached_sidecar(repo)
    if added:
        size = sum(file.stat().st_size for file in added)
        text = f"in {_names(f.name for f in added)} of the local cache: {size_text(size)}"
        return Found(repo.repo_id, target, trunk, text, size, base)
    beside = remote_sidecar(repo)
    if beside:
        size, _ = _sizes(repo, beside)
        text = f"in {_names(beside)}: {size_text(size)}"
        return Found(repo.repo_id, target, trunk, text, size, base)
    return Found(repo.repo_id, target, trunk, None, 0, base)


def _sizes(repo: HubRepo, names: Any) -> tuple[int, int]:
    sizes = [file.size for name in names if (file := repo.remote(name))]
    return sum(sizes), len(sizes)


def _names(files: Any) -> str:
    return ", ".join(sorted(set(files)))


def quantization(config: Mapping[str, Any]) -> str:
    """How a model is quantized, in words."""
    table = config.get("quantization") or config.get("quantization_config")
    if not isinstance(table, dict):
        return "none"
    if "quant_method" in table and "bits" not in table:
        return str(table["quant_method"])
    others = sum(isinstance(value, (dict, bool)) for value in table.values())
    own = f"; {others} matrices differ" if others else ""
    return (
        f"{table.get('bits')} bits, groups of {table.get('group_size')}, "
        f"{table.get('mode', 'affine')}{own}"
    )
