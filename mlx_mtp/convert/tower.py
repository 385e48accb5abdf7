"""Gives a model back the vision tower that mlx-lm drops, as a file beside the model."""

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_mtp.console import say_wrapped, size_text
from mlx_mtp.convert.files import SafetensorsFile
from mlx_mtp.convert.source import HubRepo, LocalRepo, Source, weight_map_of
from mlx_mtp.errors import ConvertError
from mlx_mtp.models.family import text_config
from mlx_mtp.models.files import read_json
from mlx_mtp.models.published import head_repo_of, source_of
from mlx_mtp.models.tower_weights import CONFIG_KEYS, PREFIXES, SIDECAR, load_tower, tower_name
from mlx_mtp.vision.images import PROCESSOR

_GROUP = 64


def _divides(_: str, layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and layer.weight.shape[1] % _GROUP == 0


def add_tower(
    model_name: str,
    model: Path,
    directory: Path,
    source: Source,
    *,
    bits: int | None = None,  # per weight; None: as in the source
    dry_run: bool = False,
) -> None:
    """Write a source's tower beside a model, unless the model has one or the source has none.

    A failure leaves the model unchanged. Raises ConvertError if the file can't be written.
    """
    repo = source.repo
    if source.name == head_repo_of(model_name):  # This source has only the head.
        repo = HubRepo(source_of(model_name) or "", None)
    if (directory / SIDECAR).exists() or any(map(tower_name, weight_map_of(LocalRepo(model)))):
        return
    given = {} if (path := repo.file("config.json")) is None else read_json(path)
    names = {key: file for key, file in weight_map_of(repo).items() if tower_name(key)}
    if "vision_config" not in given or not names:
        return
    if dry_run:
        say_wrapped(f"Would add the vision tower, of {len(names)} tensors.")
        return
    processor, files = repo.file(PROCESSOR), sorted({*names.values()})
    seeing = {key: given[key] for key in CONFIG_KEYS if key in given}
    seeing["preprocessor_config"] = {} if processor is None else read_json(processor)
    repo.missing(files)  # raises an error if the repository lacks a file
    tensors = {}
    for path in filter(None, map(repo.file, files)):
        for key, stored in SafetensorsFile(path).tensors.items():
            if key in names:
                stored.like()  # raises CheckpointError for a type that can't be read
                value = stored.read()
                tensors[key] = value.astype(mx.bfloat16) if value.dtype == mx.float32 else value
    config = text_config(read_json(model / "config.json"))
    tower = load_tower(seeing, tensors, int(config["hidden_size"]))
    if bits is not None:
        for each in (*tower.blocks, tower.merger):
            nn.quantize(each, _GROUP, bits, class_predicate=_divides)
    weights: Any = tree_flatten(tower.parameters())
    named = {f"{PREFIXES[0]}{name}": value for name, value in weights}
    header = {"format": "mlx", "vision": json.dumps(seeing)}
    temporary = directory / f".{SIDECAR}.{os.getpid()}.safetensors"
    try:
        mx.save_safetensors(str(temporary), named, header)
        temporary.rename(directory / SIDECAR)
    except (OSError, RuntimeError) as error:
        raise ConvertError(f"{directory / SIDECAR} can't be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    size = size_text(sum(value.nbytes for value in named.values()))
    how = "unquantized" if bits is None else f"{bits} bits, groups of {_GROUP}"
    say_wrapped(f"Wrote {SIDECAR}, the vision tower of {repo.repo_id}: {size}, {how}.")
