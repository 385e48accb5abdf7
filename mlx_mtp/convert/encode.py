"""What becomes of a head's matrix on its way into the sidecar, a few rows at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod

import mlx.core as mx

from mlx_mtp.convert.layout import Weight
from mlx_mtp.convert.rows import FLOATS, PackedRows, Rows, Setting
from mlx_mtp.convert.writer import TensorSpec
from mlx_mtp.models.head_weights import NORMS, Convention

_DTYPE_NAMES = {dtype: name for name, dtype in FLOATS.items()}


class Encoding(ABC):
    """One way to store a parameter."""

    setting: Setting | None = None

    @abstractmethod
    def specs(self, name: str, shape: tuple[int, ...]) -> list[TensorSpec]:
        """The tensors that a parameter of this name and shape becomes."""

    @abstractmethod
    def encode(self, rows: Rows, start: int, stop: int) -> list[mx.array]:
        """Rows `start` to `stop` of each of them, in the order of `specs`."""


class Stored(Encoding):
    """As the float type it has; nothing is rounded but FP32 and FP8, to BF16."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self._dtype = dtype

    def specs(self, name: str, shape: tuple[int, ...]) -> list[TensorSpec]:
        """See the base class."""
        return [TensorSpec(name, _DTYPE_NAMES[self._dtype], shape)]

    def encode(self, rows: Rows, start: int, stop: int) -> list[mx.array]:
        """See the base class."""
        return [rows.read(start, stop)]


class Norm(Encoding):
    """A norm's weight in FP32, where 1 + w of a BF16 w loses next to nothing.

    Args:
        convention: "hf" (zero-centred: the 1 is added) or "mlx" (it is there already).
    """

    def __init__(self, convention: Convention) -> None:
        self._offset = 1.0 if convention == "hf" else 0.0

    def specs(self, name: str, shape: tuple[int, ...]) -> list[TensorSpec]:
        """See the base class."""
        return [TensorSpec(name, "F32", shape)]

    def encode(self, rows: Rows, start: int, stop: int) -> list[mx.array]:
        """See the base class."""
        return [rows.read(start, stop).astype(mx.float32) + self._offset]


class Quantized(Encoding):
    """As packed words, scales and, in affine mode, biases.

    Args:
        setting: how.
        dtype: float type of the weights, and of affine scales.
    """

    def __init__(self, setting: Setting, dtype: mx.Dtype) -> None:
        self.setting: Setting = setting
        self._dtype = dtype

    def specs(self, name: str, shape: tuple[int, ...]) -> list[TensorSpec]:
        """See the base class."""
        stem, (*lead, in_dims) = name.removesuffix(".weight"), shape
        groups = (*lead, in_dims // self.setting.group_size)
        scales = _DTYPE_NAMES[self._dtype] if self.setting.mode == "affine" else "U8"
        parts = [
            TensorSpec(name, "U32", (*lead, in_dims * self.setting.bits // 32)),
            TensorSpec(f"{stem}.scales", scales, groups),
        ]
        if self.setting.mode == "affine":
            parts.append(TensorSpec(f"{stem}.biases", scales, groups))
        return parts

    def encode(self, rows: Rows, start: int, stop: int) -> list[mx.array]:
        """See the base class."""
        return self.setting.quantize(rows.read(start, stop))


class Packed(Quantized):
    """As a quantized source has it, to the bit."""

    def encode(self, rows: Rows, start: int, stop: int) -> list[mx.array]:
        """See the base class."""
        assert isinstance(rows, PackedRows)
        return rows.packed(start, stop)


def choose_encoding(
    name: str, weight: Weight, setting: Setting | None, convention: Convention, *, keep: bool
) -> Encoding:
    """How to store a parameter.

    Args:
        name: of the parameter, without the `mtp.` prefix.
        weight: where it comes from.
        setting: how it should be quantized; None to leave it unquantized.
        convention: of the source's norms.
        keep: leave what is quantized already as it is.
    """
    rows = weight.rows
    if name in NORMS:
        return Norm(convention)
    if rows.setting is not None and (keep or rows.setting == setting):
        return Packed(rows.setting, rows.dtype)
    return Stored(rows.dtype) if setting is None else Quantized(setting, rows.dtype)
