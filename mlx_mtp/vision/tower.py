"""The vision tower of Qwen3.5, 3.6 and 3.8: turns an image's patches into rows like embeddings.

A pre-norm transformer runs over all patches of the image, with learned positions (interpolated to
the image's grid) and 2-D rotary ones; then a merger joins 2 x 2 patches to a token. Patches are in
the order of the merged tokens, so the four patches of a token are consecutive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_mtp.errors import UnsupportedModelError

PART_TOKENS = 128  # Without fused attention mlx stores all scores of a part's patches.
_HEAD_MULTIPLE = 16  # Head dimension 72 is padded to 80, for which mlx fuses attention on Metal.
_THETA = 10000.0
_EPS = 1e-6
_MEAN = _DEVIATION = 0.5
_MOST = 1 << 16  # maximum of any size in the configuration
TowerPart = tuple[mx.array, ...]  # lazy arrays of a part of the work on an image


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
    def of(cls, config: Mapping[str, Any], hidden_size: int) -> TowerShape:
        """Returns the shape of a config.json's tower; raises UnsupportedModelError."""
        given = config["vision_config"]
        try:
            shape = cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given})
        except TypeError as error:
            raise UnsupportedModelError(f"config.json: vision_config: {error}.") from None
        sizes = vars(shape).items()
        wrong = [f"{k} is {v!r:.40}" for k, v in sizes if type(v) is not int or not 0 < v <= _MOST]
        if not wrong:
            if shape.hidden_size % (4 * shape.num_heads):
                wrong = ["hidden_size does not divide into heads of a multiple of 4"]
            if math.isqrt(n := shape.num_position_embeddings) ** 2 != n:
                wrong += ["num_position_embeddings is not a square number"]
        if shape.out_hidden_size != hidden_size:
            wrong += [f"it gives rows of {shape.out_hidden_size}, and the model has {hidden_size}"]
        if type(config.get("image_token_id")) is not int:
            wrong += ["no image_token_id is beside it"]
        if given.get("deepstack_visual_indexes"):
            wrong += ["deepstack_visual_indexes is not empty, which Qwen3.5's towers never have"]
        if wrong:
            raise UnsupportedModelError(f"config.json: vision_config: {', '.join(wrong)}.")
        return shape

    def scratch(self, tokens: int, itemsize: int) -> int:
        """Returns the maximum bytes, as measured, that an image takes besides the weights."""
        patches, size, heads = tokens * self.spatial_merge_size**2, self.hidden_size, self.num_heads
        padded = heads * (-(-size // heads // _HEAD_MULTIPLE) * _HEAD_MULTIPLE)
        some = min(PART_TOKENS * self.spatial_merge_size**2, patches)
        inputs = self.temporal_patch_size * self.patch_size**2 * self.in_channels
        # Bytes per patch in the first part, in keys, and in attention if mlx stores the scores.
        beginning, keys = 8 * inputs + 26 * size, 60 * size + 12 * padded
        attention = (6 * size + 6 * padded) * itemsize + 4 * heads * some
        return patches * max(beginning, keys, attention) + 20 * some * self.intermediate_size


class _Attention(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.heads, self.dim = shape.num_heads, shape.hidden_size // shape.num_heads
        self.qkv = nn.Linear(shape.hidden_size, 3 * shape.hidden_size)
        self.proj = nn.Linear(shape.hidden_size, shape.hidden_size)

    def project(self, x: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, ...]:
        """Returns queries, keys and values [1, heads, N, D] of patches x [N, H]."""
        q, k, v = self.qkv(x).reshape(len(x), 3, self.heads, self.dim).swapaxes(0, 1)
        more = [(0, 0), (0, 0), (0, -self.dim % _HEAD_MULTIPLE)]
        parts = (mx.pad(each, more) for each in (_turned(q, cos, sin), _turned(k, cos, sin), v))
        return tuple(each.swapaxes(0, 1)[None] for each in parts)

    def __call__(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """Returns [M, H] for the queries [1, heads, M, D] of some patches."""
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
    """Encodes one image at a time, in parts between which a caller can pause."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.shape = shape
        kernel = shape.temporal_patch_size, shape.patch_size, shape.patch_size
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv3d(shape.in_channels, shape.hidden_size, kernel)
        self.pos_embed = nn.Embedding(shape.num_position_embeddings, shape.hidden_size)
        self.blocks = [_Block(shape) for _ in range(shape.depth)]
        self.merger = _Merger(shape)

    def parts(self, rgb: np.ndarray) -> Iterator[TowerPart]:
        """Yields the parts of the work on an image, uint8 [height, width, 3], in order.

        The last part is the image's rows [tokens, out_hidden_size]. A layer's parts are the
        queries, keys and values of all patches, and then `PART_TOKENS` tokens at a time. Sizes, and
        so the rounding, depend on the image alone.
        """
        states, turn = self._embedded(rgb)
        yield (states,)
        step = PART_TOKENS * self.shape.spatial_merge_size**2
        slices = [slice(at, at + step) for at in range(0, len(states), step)]
        for block in self.blocks:
            q, k, v = block.attn.project(block.norm1(states), *turn)
            yield q, k, v
            ready = []
            for some in slices:
                attended = states[some] + block.attn(q[:, :, some], k, v)
                ready.append(attended + block.mlp(block.norm2(attended)))
                yield (ready[-1],)
            states = mx.concatenate(ready)
        rows = []
        for some in slices:
            rows.append(self.merger(states[some]))
            yield (rows[-1],)
        yield (mx.concatenate(rows),)

    def _embedded(self, rgb: np.ndarray) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        """Returns states [N, H] of patches, and cos and sin [N, 1, D / 2] of their places."""
        shape, proj = self.shape, self.patch_embed.proj
        dtype, merge = proj.weight.dtype, shape.spatial_merge_size
        patches = patches_of(mx.array(rgb), shape).astype(dtype)
        embedded = patches @ proj.weight.flatten(1).T + proj.bias
        rows, columns = (n // shape.patch_size for n in rgb.shape[:2])
        # The square of learned positions is stretched to the image's grid.
        side = math.isqrt(shape.num_position_embeddings)
        square = self.pos_embed(mx.arange(side * side)).astype(mx.float32).reshape(side, -1)
        stretched = (_shares(rows, side) @ square).reshape(rows, side, -1)
        learned = _shares(columns, side) @ stretched
        # Half of a head is rotated by the patch's row, half by its column.
        dim = shape.hidden_size // shape.num_heads // 2
        speeds = _THETA ** (-mx.arange(0, dim, 2) / dim)
        places = _merged(mx.array(np.indices((rows, columns)).transpose(1, 2, 0)), merge)
        angles = (places[..., None] * speeds).flatten(1)[:, None]
        states = embedded + _merged(learned, merge).astype(dtype)
        return states, (mx.cos(angles), mx.sin(angles))


def patches_of(rgb: mx.array, shape: TowerShape) -> mx.array:
    """Returns uint8 [height, width, 3] as patches float32 [N, frames * side * side * 3], -1 to 1.

    A still image is repeated for all frames of a patch.
    """
    side = shape.patch_size
    rows, columns = (n // side for n in rgb.shape[:2])
    grid = rgb.reshape(rows, side, columns, -1).swapaxes(1, 2).flatten(2)
    patches = mx.tile(_merged(grid, shape.spatial_merge_size), (1, shape.temporal_patch_size))
    return (patches.astype(mx.float32) * (1 / 255) - _MEAN) / _DEVIATION


def _turned(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Returns x [N, heads, dim] rotated in float32; dimensions i and i + dim / 2 are a pair."""
    one, two = mx.split(x.astype(mx.float32), 2, axis=-1)
    return mx.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1).astype(x.dtype)


def _merged(grid: mx.array, merge: int) -> mx.array:
    """Returns [rows, columns, D] as [N, D] in the order of patches."""
    rows, columns, size = grid.shape
    blocks = grid.reshape(rows // merge, merge, columns // merge, merge, size)
    return blocks.swapaxes(1, 2).reshape(-1, size)


def _shares(count: int, side: int) -> mx.array:
    """Returns float32 [count, side], which interpolates `side` numbers to `count`, ends kept."""
    at = mx.linspace(0, side - 1, count)
    return mx.maximum(1 - mx.abs(at[:, None] - mx.arange(side)), 0)
