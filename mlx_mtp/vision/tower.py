"""The vision tower of Qwen3.5, 3.6 and 3.8: patches of one image to rows beside embeddings.

A pre-norm transformer over all patches of the image, with learned positions (interpolated to its
grid) and 2-D rotary ones; then a merger joins 2 x 2 patches to a token. Patches are in the order of
the merged tokens, so the four of a token are consecutive.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_mtp.errors import CheckpointError, UnsupportedModelError

SIDECAR = "vision_tower.safetensors"
"""A tower beside a model whose own files have none; its header has the `CONFIG_KEYS` that mlx-lm
drops from config.json."""
CONFIG_KEYS = (
    *("vision_config", "image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id", "preprocessor_config"),
)
PREFIXES = ("vision_tower.", "model.visual.", "visual.")
_QUERIES = 512  # attended at once: mlx may have no fused operation, and then makes all scores
_HEAD_MULTIPLE = 16  # 72 becomes 80, for which mlx has a fused operation on Metal
_THETA = 10000.0
_EPS = 1e-6
_MEAN = _DEVIATION = 0.5
_MOST = 1 << 16  # of any size in the configuration


@dataclass(frozen=True)
class TowerShape:
    """The sizes in a config.json's `vision_config`, under its names."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    num_position_embeddings: int
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    in_channels: int = 3

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TowerShape:
        """UnsupportedModelError for a tower that is none of Qwen3.5's."""
        given = {f.name: config[f.name] for f in fields(cls) if f.name in config}
        try:
            shape = cls(**given)
        except TypeError as error:
            raise UnsupportedModelError(f"config.json: vision_config: {error}.") from None
        wrong = [f"{k} is {v!r:.40}" for k, v in vars(shape).items() if not _is_size(v)]
        if not wrong and shape.hidden_size % (4 * shape.num_heads):
            wrong = ["hidden_size does not divide into heads of a multiple of 4"]
        if round(float(shape.num_position_embeddings) ** 0.5) ** 2 != shape.num_position_embeddings:
            wrong += ["num_position_embeddings is no square"]
        if config.get("deepstack_visual_indexes"):
            wrong += ["deepstack_visual_indexes is not empty, which Qwen3.5's towers never have"]
        if wrong:
            raise UnsupportedModelError(f"config.json: vision_config: {', '.join(wrong)}.")
        return shape

    @property
    def patch_numbers(self) -> int:
        return self.temporal_patch_size * self.patch_size**2 * self.in_channels

    def scratch(self, tokens: int, itemsize: int) -> int:
        """Most bytes that an image of so many tokens takes beside the weights."""
        patches, size = tokens * self.spatial_merge_size**2, self.hidden_size
        block = 16 * size + 3 * self.intermediate_size + self.patch_numbers
        scores = self.num_heads * min(_QUERIES, patches)
        return patches * (block + scores) * max(itemsize, 4)


class Patches(NamedTuple):
    """An image on its way through the tower: states [N, H], and cos and sin [N, 1, head size]."""

    states: mx.array
    rotation: tuple[mx.array, mx.array]


class _PatchEmbed(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        sizes = shape.temporal_patch_size, shape.patch_size, shape.patch_size, shape.in_channels
        self.proj = nn.Linear(shape.patch_numbers, shape.hidden_size)
        self.proj.weight = mx.zeros((shape.hidden_size, *sizes))

    def __call__(self, patches: mx.array) -> mx.array:
        return patches @ self.proj.weight.reshape(len(self.proj.weight), -1).T + self.proj.bias


class _Attention(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.heads, self.dim = shape.num_heads, shape.hidden_size // shape.num_heads
        self.qkv = nn.Linear(shape.hidden_size, 3 * shape.hidden_size)
        self.proj = nn.Linear(shape.hidden_size, shape.hidden_size)

    def __call__(self, x: mx.array, rotation: tuple[mx.array, mx.array]) -> mx.array:
        q, k, v = self.qkv(x).reshape(len(x), 3, self.heads, self.dim).swapaxes(0, 1)
        more = [(0, 0), (0, 0), (0, -self.dim % _HEAD_MULTIPLE)]
        parts = (mx.pad(each, more) for each in (_turned(q, *rotation), _turned(k, *rotation), v))
        q, k, v = (each.swapaxes(0, 1)[None] for each in parts)
        outputs = [
            mx.fast.scaled_dot_product_attention(
                q[:, :, at : at + _QUERIES], k, v, scale=self.dim**-0.5
            )
            for at in range(0, len(x), _QUERIES)
        ]
        attended = mx.concatenate(outputs, axis=2)[0, :, :, : self.dim]
        return self.proj(attended.swapaxes(0, 1).reshape(len(x), -1))


class _MLP(nn.Module):
    def __init__(self, size: int, inner: int, out: int, approx: str) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(size, inner), nn.Linear(inner, out)
        self.act = nn.GELU(approx=approx)

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear_fc2(self.act(self.linear_fc1(x)))


class _Block(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        size = shape.hidden_size
        self.norm1, self.norm2 = nn.LayerNorm(size, eps=_EPS), nn.LayerNorm(size, eps=_EPS)
        self.attn = _Attention(shape)
        self.mlp = _MLP(size, shape.intermediate_size, size, "tanh")

    def __call__(self, x: mx.array, rotation: tuple[mx.array, mx.array]) -> mx.array:
        x = x + self.attn(self.norm1(x), rotation)
        return x + self.mlp(self.norm2(x))


class _Merger(_MLP):
    def __init__(self, shape: TowerShape) -> None:
        size = shape.hidden_size * shape.spatial_merge_size**2
        super().__init__(size, size, shape.out_hidden_size, "none")
        self.norm = nn.LayerNorm(shape.hidden_size, eps=_EPS)

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(self.norm(x).reshape(-1, self.linear_fc1.bias.size))


class VisionTower(nn.Module):
    """One image at a time: `begin`, each of `blocks`, `end`; a caller may pause in between."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = _PatchEmbed(shape)
        self.pos_embed = nn.Embedding(shape.num_position_embeddings, shape.hidden_size)
        self.blocks = [_Block(shape) for _ in range(shape.depth)]
        self.merger = _Merger(shape)

    def __call__(self, rgb: np.ndarray) -> mx.array:
        """Rows [tokens, out_hidden_size] of an image, uint8 [height, width, 3]."""
        patches = self.begin(rgb)
        for number in range(self.shape.depth):
            patches = self.run_block(number, patches)
        return self.end(patches)

    def begin(self, rgb: np.ndarray) -> Patches:
        shape, dtype = self.shape, self.merger.norm.weight.dtype
        embedded = self.patch_embed(patches_of(mx.array(rgb), shape).astype(dtype))
        rows, columns = (n // shape.patch_size for n in rgb.shape[:2])
        places, shares = _interpolation(rows, columns, shape)
        learned = self.pos_embed(mx.array(places)) * mx.array(shares).astype(dtype)[..., None]
        angles = mx.array(_angles(rows, columns, shape))
        rotation = mx.cos(angles)[:, None], mx.sin(angles)[:, None]
        return Patches(embedded + learned.sum(axis=0), rotation)

    def run_block(self, number: int, patches: Patches) -> Patches:
        return patches._replace(states=self.blocks[number](*patches))

    def end(self, patches: Patches) -> mx.array:
        return self.merger(patches.states)


def patches_of(rgb: mx.array, shape: TowerShape) -> mx.array:
    """uint8 [height, width, 3] as patches float32 [N, frames * side * side * 3], -1 to 1.

    A still image is all frames of a patch.
    """
    side, merge = shape.patch_size, shape.spatial_merge_size
    scaled = (rgb.astype(mx.float32) * (1 / 255) - _MEAN) / _DEVIATION
    rows, columns = (n // (side * merge) for n in rgb.shape[:2])
    grid = scaled.reshape(rows, merge, side, columns, merge, side, -1)
    patches = grid.transpose(0, 3, 1, 4, 2, 5, 6).reshape(-1, 1, side * side * rgb.shape[2])
    return mx.repeat(patches, shape.temporal_patch_size, axis=1).reshape(len(patches), -1)


def load_tower(
    config: Mapping[str, Any], weights: Mapping[str, mx.array], hidden_size: int
) -> VisionTower:
    """The tower of a config.json from its tensors, lazy, with any of `PREFIXES`.

    Raises UnsupportedModelError, or CheckpointError if tensors are missing or of other shapes.
    """
    if type(config.get("image_token_id")) is not int:
        raise UnsupportedModelError("config.json has a vision_config, but no image_token_id.")
    tower = VisionTower(TowerShape.of(config["vision_config"]))
    if tower.shape.out_hidden_size != hidden_size:
        raise CheckpointError(
            f"The vision tower gives rows of {tower.shape.out_hidden_size} numbers; the model's "
            f"hidden_size is {hidden_size}."
        )
    named = {tower_name(key): value for key, value in weights.items()}
    modules, mode = dict(tower.named_modules()), _quantization_mode(config)
    for name in [key.removesuffix(".scales") for key in named if key.endswith(".scales")]:
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear | nn.Embedding):
            raise CheckpointError(f"The vision tower has no layer {name} that can be quantized.")
        packed, scales = named[f"{name}.weight"], named[f"{name}.scales"]
        inputs = layer.weight.shape[-1]
        bits, group = packed.shape[-1] * 32 // inputs, inputs // scales.shape[-1]
        kind = "affine" if f"{name}.biases" in named else mode
        if isinstance(layer, nn.Embedding):
            biases = named.pop(f"{name}.biases", None)
            whole = mx.dequantize(packed, scales, biases, group_size=group, bits=bits, mode=kind)
            named[f"{name}.weight"] = whole
            del named[f"{name}.scales"]
            continue
        parent, _, last = name.rpartition(".")
        modules[parent][last] = layer.to_quantized(group, bits, mode=kind)
    embed = "patch_embed.proj.weight"
    if embed in named and named[embed].shape != tower.patch_embed.proj.weight.shape:
        named[embed] = named[embed].transpose(0, 2, 3, 4, 1)  # as PyTorch has it: channels first
    try:
        tower.load_weights(list(named.items()))
    except ValueError as error:
        raise CheckpointError(f"The vision tower's tensors: {error!s:.300}") from None
    return tower


def read_tower(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """The tensors of a tower beside a model, lazy, and the part of its configuration."""
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        tensors, header = loaded
        return tensors, dict(json.loads(header["vision"]))
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{path} can't be read: {error!r:.300}") from error


def is_of_tower(key: str) -> bool:
    """Whether a tensor of a checkpoint is the tower's."""
    return key.startswith(PREFIXES)


def tower_name(key: str) -> str:
    """The name of a tower's tensor in `VisionTower`."""
    return key.removeprefix(next(prefix for prefix in PREFIXES if key.startswith(prefix)))


def _quantization_mode(config: Mapping[str, Any]) -> str:
    for key in ("quantization", "quantization_config"):
        if isinstance(given := config.get(key), dict) and "mode" in given:
            return str(given["mode"])
    return "affine"


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value <= _MOST


def _turned(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """[N, heads, dim] rotated in float32; dimensions i and i + dim / 2 are a pair."""
    one, two = mx.split(x.astype(mx.float32), 2, axis=-1)
    return mx.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1).astype(x.dtype)


def _merged(grid: np.ndarray, merge: int) -> np.ndarray:
    """[.., rows, columns] as [.., N] in the order of patches."""
    *before, rows, columns = grid.shape
    blocks = grid.reshape(*before, rows // merge, merge, columns // merge, merge)
    return np.ascontiguousarray(blocks.swapaxes(-3, -2)).reshape(*before, -1)


def _angles(rows: int, columns: int, shape: TowerShape) -> np.ndarray:
    """float32 [N, head size / 2]: half of them turn with a patch's row, half with its column."""
    dim = shape.hidden_size // shape.num_heads // 2
    speeds = np.float32(1) / np.float32(_THETA) ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    places = _merged(np.indices((rows, columns), np.float32), shape.spatial_merge_size)
    return np.concatenate([place[:, None] * speeds for place in places], axis=1)


def _interpolation(rows: int, columns: int, shape: TowerShape) -> tuple[np.ndarray, np.ndarray]:
    """Which four learned positions each patch takes, int32 [4, N], and float32 shares of them."""
    side = round(shape.num_position_embeddings**0.5)
    tables = []
    for count in (rows, columns):
        at = np.linspace(0, side - 1, count, dtype=np.float32)
        low = at.astype(np.int32)
        high, share = np.minimum(low + 1, side - 1), at - low
        tables.append(((low, 1 - share), (high, share)))
    pairs = [(row, column) for row in tables[0] for column in tables[1]]
    places = np.stack([row[0][:, None] * side + column[0] for row, column in pairs])
    shares = np.stack([row[1][:, None] * column[1] for row, column in pairs])
    merge = shape.spatial_merge_size
    return _merged(places.astype(np.int32), merge), _merged(shares.astype(np.float32), merge)
