"""Copies of the trunk's matrices that some heads carry: are they what the trunk has?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_mtp.convert.layout import Layout
from mlx_mtp.convert.rows import Rows, StoredTensor
from mlx_mtp.convert.safetensors_file import SafetensorsFile
from mlx_mtp.convert.source import Source, trunk_file
from mlx_mtp.models.head_weights import head_name

_PIECE_BYTES = 16 << 20
# How much farther than a fresh quantization of the copy the trunk may lie from it.
_MAX_ERROR_RATIO = 1.5
# What a copy may be a copy of; a model with tied embeddings has no lm_head.
_TRUNK_NAMES = {"embed_tokens.weight": ("embed_tokens.weight",)}
_LM_HEAD = ("lm_head.weight", "embed_tokens.weight")


def compare_tied(
    tied: Mapping[str, StoredTensor], target: Path, source: Source
) -> dict[str, tuple[bool, str]]:
    """Compare each copy with the target's trunk, or with the source's where that isn't at hand.

    Against a quantized trunk a copy can't be equal to the bit: it counts as equal when the trunk is
    hardly farther from it than the copy's own quantization is.

    Returns:
        By the copy's name: False if the trunk's is another matrix, and what was found.
    """
    found: dict[str, tuple[bool, str]] = {}
    directories = [target] + ([source.directory] if source.directory else [])
    for name, copy in tied.items():
        found[name] = (True, "not compared: the trunk's weights are not on this machine")
        where = _find_trunk(name, directories)
        if where is not None:
            path, ending = where
            # From a file of its own: the checksums are of what the head takes over.
            with SafetensorsFile(copy.file.path) as file, SafetensorsFile(path) as beside:
                ours = _rows(StoredTensor(file, copy.info), {}, copy.shape)
                found[name] = _compare(ours, _trunk_rows(beside, ending, copy.shape))
    return found


def _find_trunk(name: str, directories: Sequence[Path]) -> tuple[Path, str] | None:
    """The file that has what a copy should be a copy of, and how its name ends there."""
    for directory in directories:
        for ending in _TRUNK_NAMES.get(name, _LM_HEAD):
            path = trunk_file(directory, ending)
            if path is not None:
                return path, ending
    return None


def _trunk_rows(file: SafetensorsFile, ending: str, shape: tuple[int, ...]) -> Rows:
    by_name = {key: StoredTensor(file, info) for key, info in file.tensors.items()}
    key = next(k for k in by_name if k.endswith(ending) and head_name(k) is None)
    return _rows(by_name[key], by_name, shape)


def _rows(tensor: StoredTensor, beside: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> Rows:
    """A matrix of this shape as rows, with its scales if it is quantized."""
    stem = tensor.info.name.removesuffix(".weight")
    tensors = {"matrix.weight": tensor}
    for part in ("scales", "biases"):
        if f"{stem}.{part}" in beside:
            tensors[f"matrix.{part}"] = beside[f"{stem}.{part}"]
    layout = Layout(tensors, {"matrix": nn.Linear(shape[-1], shape[0], bias=False)}, (128, 128))
    return layout.weights["matrix.weight"].rows


def _compare(copy: Rows, trunk: Rows) -> tuple[bool, str]:
    """Whether two matrices are the same, and in which words."""
    if trunk.shape != copy.shape:
        return False, f"of shape {copy.shape}, the trunk's of {trunk.shape}"
    step = max(_PIECE_BYTES // (4 * copy.shape[-1]), 1)
    difference = own_error = norm = 0.0
    with mx.stream(mx.cpu):
        for start in range(0, copy.shape[0], step):
            stop = min(start + step, copy.shape[0])
            ours, theirs = copy.read(start, stop), trunk.read(start, stop)
            difference += _distance(ours, theirs)
            norm += _distance(ours, mx.zeros_like(ours))
            if trunk.setting is not None:
                again = trunk.setting.dequantize(trunk.setting.quantize(ours), trunk.dtype)
                own_error += _distance(ours, again)
    if difference == 0:
        return True, "equal to the trunk's"
    if trunk.setting is not None and difference <= _MAX_ERROR_RATIO**2 * own_error:
        return True, f"equal to the trunk's as far as {trunk.setting} can tell"
    relative = (difference / norm) ** 0.5 if norm else float("inf")
    return False, f"different from the trunk's (relative error {relative:.1%})"


def _distance(one: mx.array, other: mx.array) -> float:
    return float(np.array(mx.square(one.astype(mx.float32) - other.astype(mx.float32)).sum()))
