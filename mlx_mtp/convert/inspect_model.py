"""What a model is, whether it has its MTP head, and what to do next, by its headers alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_mtp.convert.hub import HubRepo
from mlx_mtp.convert.memory import memory_rows, weights_in_memory, weights_on_disk
from mlx_mtp.convert.metadata import FORMAT_VERSION_KEY, Existing
from mlx_mtp.convert.safetensors_file import SafetensorsFile
from mlx_mtp.convert.source import INDEX, SINGLE_FILE, head_of, weight_map_of
from mlx_mtp.convert.target import Target
from mlx_mtp.errors import ModelError
from mlx_mtp.models.head_weights import SIDECAR
from mlx_mtp.models.hub import HUB_ID, resolve_model
from mlx_mtp.units import size_text

_BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?([\w./-]+)", re.MULTILINE)


@dataclass(frozen=True)
class _Found:
    """What there is of a model.

    Args:
        target: its config.json.
        trunk: bytes of its own files, and in how many; None if that can't be known.
        head: in words; None without one.
        head_bytes: that come on top of the trunk's.
        base: the model it was converted from, as far as it says.
        directory: that holds its weights; None if they are elsewhere.
    """

    target: Target
    trunk: tuple[int, int] | None
    head: str | None
    head_bytes: int = 0
    base: str | None = None
    directory: Path | None = None


def inspect_model(name: str | None, dtype: str = "auto") -> list[str]:
    """Lines to print.

    Args:
        name: a directory or a hub id; None for the bundled model.
        dtype: that it would be served in; see `load_model`.

    Raises:
        ModelError: there is no such model, or no family serves it.
    """
    if name is None or Path(name).expanduser().is_dir() or not HUB_ID.fullmatch(name):
        path = resolve_model(name)
        name, found = str(path), _local(path)
    else:
        found = _remote(HubRepo(name, None))
    config, args = found.target.config, found.target.args
    attention = args.num_hidden_layers // args.full_attention_interval
    experts = getattr(args, "num_experts", 0)
    rows = {
        "model": name,
        "family": f"{config['model_type']}: {args.num_hidden_layers} layers, {attention} of them "
        f"with attention; hidden size {args.hidden_size}, vocabulary {args.vocab_size:,}, "
        + (f"{experts} experts" if experts else "dense"),
        "quantization": _quantization(config),
        "weights": _size(found.trunk),
        "MTP head": found.head or "none",
        **_memory(found, dtype),
        "next": _next(name, found),
    }
    return [f"{label:<14}{text}" for label, text in rows.items()]


def _local(path: Path) -> _Found:
    target = Target.open(path)
    files = sorted(path.glob("model*.safetensors"))
    existing = Existing.find(path)
    base = None
    if (path / "README.md").is_file():
        match = _BASE_MODEL.search((path / "README.md").read_text(encoding="utf-8"))
        base = match[1] if match else None
    trunk = (sum(f.stat().st_size for f in files), len(files))
    if existing is not None:
        size = sum(file.stat().st_size for file in existing.files)
        return _Found(target, trunk, _sidecar(existing, size), size, base, path)
    head = head_of(weight_map_of(path))
    if not head:
        return _Found(target, trunk, None, 0, base, path)
    size = 0
    for file_name in set(head.values()):
        with SafetensorsFile(path / file_name) as file:
            size += sum(tensor.nbytes for key, tensor in file.tensors.items() if key in head)
    where = ", ".join(sorted(set(head.values())))
    return _Found(target, trunk, f"in {where}: {size_text(size)} of the weights", 0, base, path)


def _sidecar(existing: Existing, size: int) -> str:
    if not existing.files:
        return "a sidecar that can't be read: make it anew with --force"
    told = existing.metadata
    names = ", ".join(file.name for file in existing.files)
    if FORMAT_VERSION_KEY not in told:
        return f"in {names}: {size_text(size)}, not made by this program"
    bits = "unquantized" if told["mode"] == "none" else f"{told['bits']} bits, {told['mode']}"
    revision = f" at {told['source_revision'][:12]}" if told["source_revision"] else ""
    return (
        f"in {names}: {size_text(size)}, {bits}; from {told['source']}{revision}, "
        f"by {told['created_by']}"
    )


def _remote(repo: HubRepo) -> _Found:
    config = repo.small("config.json")
    if config is None:
        raise ModelError(f"{repo.repo_id} has no config.json: it is no model.")
    target = Target.open(config.parent)
    index = repo.small(INDEX)
    if index is None:
        single = repo.remote(SINGLE_FILE)
        trunk = (single.size, 1) if single else None
        names: Mapping[str, str] = dict.fromkeys(repo.tensor_names(SINGLE_FILE), SINGLE_FILE)
    else:
        names = weight_map_of(index.parent)
        sizes = [file.size for f in set(names.values()) if (file := repo.remote(f))]
        trunk = (sum(sizes), len(sizes))
    sidecar = repo.remote(SIDECAR)
    if sidecar is not None and SIDECAR not in names.values():
        size = sidecar.size
        return _Found(target, trunk, f"in {SIDECAR}: {size_text(size)}", size)
    head = head_of(names)
    return _Found(target, trunk, f"in {', '.join(sorted(set(head.values())))}" if head else None)


def _quantization(config: Mapping[str, Any]) -> str:
    table = config.get("quantization") or config.get("quantization_config")
    if not isinstance(table, dict):
        return "none"
    if "quant_method" in table and "bits" not in table:
        return str(table["quant_method"])
    others = sum(isinstance(value, (dict, bool)) for value in table.values())
    own = f"; {others} matrices have their own" if others else ""
    return (
        f"{table.get('bits')} bits, groups of {table.get('group_size')}, "
        f"{table.get('mode', 'affine')}{own}"
    )


def _size(trunk: tuple[int, int] | None) -> str:
    return f"{size_text(trunk[0])} in {trunk[1]} file(s)" if trunk else "none found"


def _memory(found: _Found, dtype: str) -> dict[str, str]:
    has_head = found.head is not None
    weights = None
    if found.directory is not None:
        weights = weights_in_memory(found.directory, has_head=has_head, dtype=dtype)
    if weights is None:
        stored = (found.trunk[0] if found.trunk else 0) + found.head_bytes
        weights = weights_on_disk(stored, found.target.config, dtype)
    return memory_rows(found.target.args, weights, has_head=has_head)


def _next(name: str, found: _Found) -> str:
    if found.head:
        return f"mlx-mtp serve {name} --enable-mtp"
    base = found.base or "<the original Hugging Face model>"
    return (
        f"python scripts/add_mtp_weights.py --mlx-model-path {name} --source-model {base}; "
        f"or without a head: mlx-mtp serve {name}"
    )
