"""The vision tower of Qwen3.5, 3.6 and 3.8: patches of one image to rows beside embeddings.

A pre-norm transformer over all patches of the image, with learned positions (interpolated to its
grid) and 2-D rotary ones; then a merger joins 2 x 2 patches to a token. Patches are in the order of
the merged tokens, so the four of a token are consecutive.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
PART_TOKENS = 128  # mlx may have no fused attention, and then makes all scores of a part's patches
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
        sizes = vars(shape).items()
        wrong = [f"{k} is {v!r:.40}" for k, v in sizes if type(v) is not int or not 0 < v <= _MOST]
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
        """Most bytes, as measured, that an image of so many tokens takes beside the weights."""
        patches, size, heads = tokens * self.spatial_merge_size**2, self.hidden_size, self.num_heads
        padded = heads * (-(-size // heads // _HEAD_MULTIPLE) * _HEAD_MULTIPLE)
        some = min(PART_TOKENS * self.spatial_merge_size**2, patches)
        # Bytes of a patch in the first part, in keys, and in attention where it makes scores.
        beginning, keys = 9 * self.patch_numbers + 26 * size, 60 * size + 12 * padded
        attention = (6 * size + 6 * padded) * itemsize + 4 * heads * some
        return patches * max(beginning, keys, attention) + 20 * some * self.intermediate_size


class TowerPart(NamedTuple):
    """A part of the tower's work on an image, not evaluated yet."""

    arrays: tuple[mx.array, ...]
    work: int  # multiplications in it


class _Attention(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.heads, self.dim = shape.num_heads, shape.hidden_size // shape.num_heads
        self.qkv = nn.Linear(shape.hidden_size, 3 * shape.hidden_size)
        self.proj = nn.Linear(shape.hidden_size, shape.hidden_size)

    def project(self, x: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, ...]:
        """Queries, keys and values [1, heads, N, D] of [N, H]."""
        q, k, v = self.qkv(x).reshape(len(x), 3, self.heads, self.dim).swapaxes(0, 1)
        more = [(0, 0), (0, 0), (0, -self.dim % _HEAD_MULTIPLE)]
        parts = (mx.pad(each, more) for each in (_turned(q, cos, sin), _turned(k, cos, sin), v))
        return tuple(each.swapaxes(0, 1)[None] for each in parts)

    def __call__(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """[M, H] for the queries [1, heads, M, D] of some patches."""
        attended = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.dim**-0.5)
        return self.proj(attended[0, :, :, : self.dim].swapaxes(0, 1).flatten(1))


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


class _Merger(_MLP):
    def __init__(self, shape: TowerShape) -> None:
        size = shape.hidden_size * shape.spatial_merge_size**2
        super().__init__(size, size, shape.out_hidden_size, "none")
        self.norm = nn.LayerNorm(shape.hidden_size, eps=_EPS)

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(self.norm(x).reshape(-1, self.linear_fc1.bias.size))


class VisionTower(nn.Module):
    """Sees one image at a time, in parts between which a caller may pause."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.shape = shape
        kernel = shape.temporal_patch_size, shape.patch_size, shape.patch_size
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv3d(shape.in_channels, shape.hidden_size, kernel)
        self.pos_embed = nn.Embedding(shape.num_position_embeddings, shape.hidden_size)
        self.blocks = [_Block(shape) for _ in range(shape.depth)]
        self.merger = _Merger(shape)

    def __call__(self, rgb: np.ndarray) -> mx.array:
        """Rows [tokens, out_hidden_size] of an image, uint8 [height, width, 3]."""
        *_, last = self.parts(rgb)
        return last.arrays[0]

    def parts(self, rgb: np.ndarray) -> Iterator[TowerPart]:
        """The parts of the work on an image, in order; the last one has its rows.

        In each layer they are the keys of all patches, and then `PART_TOKENS` tokens at a time. The
        sizes depend on the image alone, and so does the rounding.
        """
        shape = self.shape
        size, count = shape.hidden_size, rgb.shape[0] * rgb.shape[1] // shape.patch_size**2
        step = PART_TOKENS * shape.spatial_merge_size**2
        slices = [slice(at, at + step) for at in range(0, count, step)]
        states, turn = self._embedded(rgb)
        yield TowerPart((states,), count * size * shape.patch_numbers)
        for block in self.blocks:
            q, k, v = block.attn.project(block.norm1(states), *turn)
            yield TowerPart((q, k, v), 3 * count * size**2)
            work = step * size * (size + 2 * shape.intermediate_size + 2 * count)
            ready = []
            for some in slices:
                attended = states[some] + block.attn(q[:, :, some], k, v)
                ready.append(attended + block.mlp(block.norm2(attended)))
                yield TowerPart((ready[-1],), work)
            states = mx.concatenate(ready)
        wide = size * shape.spatial_merge_size**2
        rows = []
        for some in slices:
            rows.append(self.merger(states[some]))
            yield TowerPart((rows[-1],), PART_TOKENS * wide * (wide + shape.out_hidden_size))
        yield TowerPart((mx.concatenate(rows),), 0)

    def _embedded(self, rgb: np.ndarray) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        """States [N, H] of patches, and cos and sin [N, 1, head size / 2] of their places."""
        shape, dtype = self.shape, self.merger.norm.weight.dtype
        proj, patches = self.patch_embed.proj, patches_of(mx.array(rgb), shape).astype(dtype)
        embedded = patches @ proj.weight.flatten(1).T + proj.bias
        rows, columns = (n // shape.patch_size for n in rgb.shape[:2])
        places, shares = _interpolation(rows, columns, shape)
        learned = self.pos_embed(mx.array(places)) * mx.array(shares).astype(dtype)[..., None]
        angles = mx.array(_angles(rows, columns, shape))[:, None]
        return embedded + learned.sum(axis=0), (mx.cos(angles), mx.sin(angles))


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
    quantization = config.get("quantization") or config.get("quantization_config") or {}

    def packed(name: str, layer: nn.Module) -> bool | dict[str, Any]:
        """How a layer is quantized, which its tensors' shapes say."""
        if (scales := named.get(f"{name}.scales")) is None:
            return False
        inputs = layer.weight.shape[-1]
        bits, group = named[f"{name}.weight"].shape[-1] * 32 // inputs, inputs // scales.shape[-1]
        mode = "affine" if f"{name}.biases" in named else quantization.get("mode", "affine")
        return {"bits": bits, "group_size": group, "mode": mode}

    embed = "patch_embed.proj.weight"
    if embed in named and named[embed].shape != tower.patch_embed.proj.weight.shape:
        named[embed] = named[embed].transpose(0, 2, 3, 4, 1)  # as PyTorch has it: channels first
    try:
        nn.quantize(tower, class_predicate=packed)
        tower.load_weights(list(named.items()))
    except (ValueError, KeyError) as error:
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
