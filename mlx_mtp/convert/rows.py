"""A source's matrices as rows that can be read a few at a time, whatever they are stored as."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import mlx.core as mx
import numpy as np

from mlx_mtp.convert.safetensors_file import SafetensorsFile, TensorInfo
from mlx_mtp.errors import CheckpointError

FLOATS = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}


@dataclass(frozen=True)
class Setting:
    """How a matrix is quantized.

    Args:
        bits: per weight.
        group_size: weights that share a scale.
        mode: "affine", "mxfp4", "nvfp4" or "mxfp8".
    """

    bits: int
    group_size: int
    mode: str = "affine"

    def __str__(self) -> str:
        return f"{self.bits} bits, groups of {self.group_size}, {self.mode}"

    def quantize(self, values: mx.array) -> list[mx.array]:
        """Words, scales and, in affine mode, biases of [.., in]."""
        return list(mx.quantize(values, group_size=self.group_size, bits=self.bits, mode=self.mode))

    def dequantize(self, parts: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        """The reverse, to a float type."""
        return mx.dequantize(
            parts[0],
            parts[1],
            parts[2] if len(parts) == 3 else None,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            dtype=dtype,
        )


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and the file that it is in."""

    file: SafetensorsFile
    info: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return self.info.shape

    @property
    def dtype(self) -> str:
        """The safetensors name of its type."""
        return self.info.dtype

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows of the tensor flattened to two dimensions, as uint8 [rows, bytes of a row]."""
        row = self.row_nbytes
        return self.file.read(self.info, start * row, stop * row).reshape(stop - start, row)

    @property
    def row_nbytes(self) -> int:
        """Bytes along the last dimension."""
        return self.info.nbytes // max(prod(self.shape[:-1]), 1)


class Rows(ABC):
    """A tensor of a source, [.., in], seen as a matrix of rows.

    Attributes:
        shape: in weights, not in packed words.
        dtype: the float type it is kept in when it is not quantized.
        setting: how it is packed already, or None.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    setting: Setting | None = None

    @abstractmethod
    def read(self, start: int, stop: int) -> mx.array:
        """Rows `start` to `stop` as `dtype` [stop - start, in]."""

    @abstractmethod
    def place(self, row: int) -> tuple[str, int]:
        """File and offset of a row, to read in the order of the disk."""

    def row_nbytes(self) -> int:
        """About what a row takes in memory while it is worked on."""
        return 4 * self.shape[-1]


class PlainRows(Rows):
    """BF16, FP16 or FP32.

    Args:
        tensor: of one of these types; FP32 is rounded to BF16 unless `exact`.
        exact: keep FP32.
    """

    def __init__(self, tensor: StoredTensor, *, exact: bool = False) -> None:
        self._tensor = tensor
        self.shape = tensor.shape
        stored = FLOATS[tensor.dtype]
        self.dtype = mx.bfloat16 if stored == mx.float32 and not exact else stored

    def read(self, start: int, stop: int) -> mx.array:
        """See the base class."""
        values = mx.array(self._tensor.rows(start, stop)).view(FLOATS[self._tensor.dtype])
        return values.astype(self.dtype)

    def place(self, row: int) -> tuple[str, int]:
        """See the base class."""
        return _place(self._tensor, row)


class Fp8Rows(Rows):
    """E4M3 with a scale for each block, as the `-FP8` releases store matrices.

    Args:
        tensor: [.., out, in], F8_E4M3.
        scales: [.., ceil(out / block), ceil(in / block)]; a weight is its code times its scale.
        block: rows and columns of a block.

    Raises:
        CheckpointError: the scales don't fit the matrix.
    """

    dtype = mx.bfloat16

    def __init__(self, tensor: StoredTensor, scales: StoredTensor, block: tuple[int, int]) -> None:
        self._tensor, self._stored_scales, self._block = tensor, scales, block
        self.shape = tensor.shape
        *lead, out_dims, in_dims = tensor.shape
        expected = (*lead, -(-out_dims // block[0]), -(-in_dims // block[1]))
        if scales.shape != expected or scales.dtype not in FLOATS:
            raise CheckpointError(
                f"{scales.info.name} in {scales.file.path} has shape {scales.shape} and type "
                f"{scales.dtype}; for a matrix of shape {tensor.shape} in blocks of "
                f"{block[0]}x{block[1]} it should be {expected}, BF16 or F32."
            )

    def read(self, start: int, stop: int) -> mx.array:
        """See the base class. Code times scale in float32, rounded to bfloat16 once."""
        values = E4M3[self._tensor.rows(start, stop)]
        out_dims, in_dims = self.shape[-2:]
        row = np.arange(start, stop)
        blocks_down = -(-out_dims // self._block[0])
        line = row // out_dims * blocks_down + row % out_dims // self._block[0]
        # Rows of one block share their line of scales: widen each line once, then repeat it.
        lines, which = np.unique(line, return_inverse=True)
        wide = np.repeat(self._scales[lines], self._block[1], axis=1)[:, :in_dims]
        values *= wide[which]
        return mx.array(values).astype(mx.bfloat16)

    def place(self, row: int) -> tuple[str, int]:
        """See the base class."""
        return _place(self._tensor, row)

    @cached_property
    def _scales(self) -> np.ndarray:
        """float32 [lines, blocks across]."""
        stored = self._stored_scales
        flat = stored.rows(0, prod(stored.shape[:-1]))
        return np.array(mx.array(flat).view(FLOATS[stored.dtype]).astype(mx.float32))


class PackedRows(Rows):
    """Quantized by MLX already.

    Args:
        weight: packed words, [.., out, words].
        scales, biases: [.., out, groups]; biases in affine mode only.
        setting: how they are packed.
    """

    def __init__(
        self,
        weight: StoredTensor,
        scales: StoredTensor,
        biases: StoredTensor | None,
        setting: Setting,
    ) -> None:
        self._parts = [weight, scales] + ([biases] if biases is not None else [])
        self.setting = setting
        self.shape = (*weight.shape[:-1], scales.shape[-1] * setting.group_size)
        self.dtype = FLOATS.get(scales.dtype, mx.bfloat16)

    def read(self, start: int, stop: int) -> mx.array:
        """See the base class."""
        assert self.setting is not None
        return self.setting.dequantize(self.packed(start, stop), self.dtype)

    def packed(self, start: int, stop: int) -> list[mx.array]:
        """Words, scales and, in affine mode, biases of rows as they are stored."""
        types = [mx.uint32, *(FLOATS.get(p.dtype, mx.uint8) for p in self._parts[1:])]
        return [
            mx.array(part.rows(start, stop)).view(dtype)
            for part, dtype in zip(self._parts, types, strict=True)
        ]

    def place(self, row: int) -> tuple[str, int]:
        """See the base class."""
        return _place(self._parts[0], row)


class ZeroRows(Rows):
    """A matrix that the source does not have and whose absence means zero."""

    dtype = mx.bfloat16

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def read(self, start: int, stop: int) -> mx.array:
        """See the base class."""
        return mx.zeros((stop - start, self.shape[-1]), dtype=self.dtype)

    def place(self, row: int) -> tuple[str, int]:
        """See the base class."""
        return "", row


def _place(tensor: StoredTensor, row: int) -> tuple[str, int]:
    return str(tensor.file.path), tensor.info.offset + row * tensor.row_nbytes


def _e4m3_table() -> np.ndarray:
    """The value of each of the 256 codes of E4M3 (bias 7, no infinities), float32."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3 & 15).astype(np.float32), (code & 7).astype(np.float32)
    normal = np.exp2(exponent - 7) * (1 + mantissa / 8)
    magnitude = np.where(exponent == 0, np.exp2(np.float32(-6)) * mantissa / 8, normal)
    magnitude[code & 127 == 127] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


E4M3 = _e4m3_table()
