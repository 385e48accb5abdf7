"""Tensors in a source's safetensors files, read late and, where they are stacks, in slices.

`mx.load` would read a tensor whole, and one tensor may hold all experts of a head.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from mlx_mtp.errors import CheckpointError

FP8 = "F8_E4M3"
_FLOATS = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}
# The format's names of the types that are read; FP8 as its codes.
TYPES = {**_FLOATS, "U32": mx.uint32, FP8: mx.uint8, "U8": mx.uint8}


class SafetensorsFile:
    """The header of a file, checked against its length; CheckpointError if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self.digest = hashlib.sha256()  # Of all that was read of the tensors, in that order.
        try:
            self.size = path.stat().st_size
            with safe_open(path, framework="numpy"), path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error.strerror or error}.") from error
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(
                f"{path} ({self.size:,} bytes) is truncated, damaged or not a safetensors file: "
                f"{error}. Download it again."
            ) from error
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self.tensors: dict[str, StoredTensor] = {}
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            shape = tuple(entry["shape"])
            self.tensors[name] = StoredTensor(self, name, entry["dtype"], shape, begin, end - begin)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, or a slice of it along its first axis."""

    file: SafetensorsFile
    name: str
    dtype: str  # The format's name of it.
    shape: tuple[int, ...]
    offset: int  # Of its first byte in the file.
    nbytes: int
    scales: StoredTensor | None = None  # Of FP8: [.., blocks of rows, blocks of columns].
    block: tuple[int, int] = (1, 1)  # Rows and columns that share a scale.

    def part(self, start: int, stop: int) -> StoredTensor:
        stride = self.nbytes // self.shape[0]
        return replace(
            self,
            shape=(stop - start, *self.shape[1:]),
            offset=self.offset + start * stride,
            nbytes=(stop - start) * stride,
            scales=self.scales and self.scales.part(start, stop),
        )

    def with_scales(self, scales: StoredTensor | None, block: tuple[int, int]) -> StoredTensor:
        """An FP8 tensor with its scales; CheckpointError if they don't fit."""
        if scales is None:
            raise CheckpointError(
                f"{self.name} in {self.file.path} is FP8 and has no {self.name}_scale_inv."
            )
        blocks = (-(-size // each) for size, each in zip(self.shape[-2:], block))
        expected = (*self.shape[:-2], *blocks)
        if scales.shape != expected or scales.dtype not in _FLOATS:
            raise CheckpointError(
                f"{scales.name} in {scales.file.path} has shape {scales.shape} and type "
                f"{scales.dtype}; for a matrix of shape {self.shape} in blocks of "
                f"{block[0]}x{block[1]} it should be {expected}, BF16 or F32."
            )
        return replace(self, scales=scales, block=block)

    def like(self) -> mx.array:
        """Zeros of the shape and type that `read` gives, which cost nothing until evaluated."""
        if self.dtype not in TYPES or (self.dtype == FP8 and self.scales is None):
            raise CheckpointError(
                f"{self.name} in {self.file.path} has type {self.dtype}, of a quantization that is "
                "not supported. Give the BF16 original, its block-scaled FP8 release, or an MLX "
                "checkpoint."
            )
        return mx.zeros(self.shape, dtype=mx.bfloat16 if self.scales else TYPES[self.dtype])

    def read(self) -> mx.array:
        """The tensor; FP8 in bfloat16, code times scale in float32 and rounded once."""
        path = self.file.path
        try:
            data = np.fromfile(path, np.uint8, self.nbytes, offset=self.offset)
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error.strerror or error}.") from error
        if data.nbytes < self.nbytes:
            raise CheckpointError(f"{path} was truncated while it was read. Download it again.")
        self.file.digest.update(data.data)
        values = mx.array(data).view(TYPES[self.dtype]).reshape(self.shape)
        if self.scales is None:
            return values
        scales = mx.repeat(self.scales.read().astype(mx.float32), self.block[0], axis=-2)
        scales = mx.repeat(scales, self.block[1], axis=-1)
        scales = scales[..., : self.shape[-2], : self.shape[-1]]
        return (mx.from_fp8(values, dtype=mx.float32) * scales).astype(mx.bfloat16)
