"""Finds a vision tower's tensors, in a checkpoint or in a file beside it, and loads them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mtp.errors import CheckpointError
from mlx_mtp.models.head_weights import load_weights
from mlx_mtp.vision.tower import TowerShape
from mlx_mtp.vision.tower import VisionTower as VisionTower

SIDECAR = "vision_tower.safetensors"
"""The file of a vision tower for a model whose own files have none; its header has the
`CONFIG_KEYS`, which mlx-lm drops from config.json."""
CONFIG_KEYS = (
    *("vision_config", "image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id", "preprocessor_config"),
)
PREFIXES = ("vision_tower.", "model.visual.", "visual.")


def tower_name(key: str) -> str | None:
    """Returns the name in `VisionTower` of a checkpoint's key; None if it isn't the tower's."""
    return next((key.removeprefix(p) for p in PREFIXES if key.startswith(p)), None)


def load_tower(
    config: Mapping[str, Any], weights: Mapping[str, mx.array], hidden_size: int
) -> VisionTower:
    """Build the lazy vision tower of a config.json from tensors whose keys have any of `PREFIXES`.

    Raises UnsupportedModelError for other towers than Qwen3.5's, and CheckpointError if tensors
    are missing or have other shapes.
    """
    tower = VisionTower(TowerShape.of(config, hidden_size))
    named = {name: value for key, value in weights.items() if (name := tower_name(key))}
    embed = "patch_embed.proj.weight"
    if embed in named and named[embed].shape != tower.patch_embed.proj.weight.shape:
        named[embed] = named[embed].transpose(0, 2, 3, 4, 1)  # PyTorch has channels first
    load_weights(tower, named, "The vision tower")
    return tower


def read_tower(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Returns the lazy tensors in a tower's file, and its part of config.json.

    Raises CheckpointError if the file can't be read.
    """
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        tensors, header = loaded
        return tensors, dict(json.loads(header["vision"]))
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{path} can't be read: {error!r:.300}") from error
