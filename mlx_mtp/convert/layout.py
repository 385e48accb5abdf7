"""From a source's tensors to the matrices of `MTPHead`: names, and experts stacked.

`models/head_weights.py` does the same to arrays when a checkpoint is served as it is; here nothing
is read yet, as a head of 512 experts should never be in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import infer_quant_config

from mlx_mtp.convert.rows import (
    FLOATS,
    Fp8Rows,
    PackedRows,
    PlainRows,
    Rows,
    Setting,
    StoredTensor,
    ZeroRows,
)
from mlx_mtp.errors import CheckpointError, ConvertError
from mlx_mtp.models.head_weights import EXPERT_KEY, NORMS, TIED

Shape = tuple[int, ...]
_SCALE = "_scale_inv"
_FOREIGN = ("qweight", "qzeros", "weight_packed", "weight_scale", "weight_scale_2", "input_scale")
_SHARED_EXPERT = ("shared_expert.", "shared_expert_gate.")


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of a matrix."""

    rows: Rows
    start: int
    stop: int


@dataclass(frozen=True)
class Weight:
    """A parameter of the head, as the rows that make it up, in order.

    Args:
        shape: of the parameter, unquantized.
        pieces: together they have as many rows as the shape.
    """

    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> Rows:
        """Any one of its matrices: all are stored in one way."""
        return self.pieces[0].rows


class Layout:
    """Which rows make up which parameter.

    Args:
        tensors: the head's, by name without the `mtp.` prefix.
        modules: the head's modules by path, for what a packed matrix should look like.
        fp8_block: rows and columns that share an FP8 scale.

    Attributes:
        weights: by the names of `MTPHead`'s parameters.
        tied: copies of the trunk's matrices, which the head doesn't load.

    Raises:
        CheckpointError: an expert is missing, a type can't be read, scales don't fit.
        ConvertError: the source is quantized in a way that is not read here.
    """

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        modules: Mapping[str, nn.Module],
        fp8_block: tuple[int, int],
    ) -> None:
        self._tensors, self._modules, self._block = tensors, modules, fp8_block
        self.tied = {name: tensors[name] for name in TIED if name in tensors}
        self.weights: dict[str, Weight] = {}
        experts: dict[str, dict[int, str]] = {}
        for name in tensors:
            if name in self.tied or self._belongs_to_another(name):
                continue
            match = EXPERT_KEY.match(name)
            if match:
                stacked = f"{match[1].removesuffix('experts')}switch_mlp.{match[3]}.weight"
                experts.setdefault(stacked, {})[int(match[2])] = name
            elif name.endswith(".experts.gate_up_proj"):
                self._split_gate_up(name)
            elif name.endswith(".experts.down_proj"):
                renamed = name.replace(".experts.down_proj", ".switch_mlp.down_proj.weight")
                self._whole(renamed, self._rows(name))
            else:
                self._whole(name, self._rows(name, path=name.removesuffix(".weight")))
        for name, numbered in experts.items():
            self._stack(name, numbered)

    def add_absent_shared_expert(self, expected: Mapping[str, Shape]) -> bool:
        """Fill in zeros for a shared expert that the source never had: it then adds nothing.

        Returns:
            Whether there was anything to fill in.
        """
        absent = [n for n in expected if n.removeprefix("layers.0.mlp.").startswith(_SHARED_EXPERT)]
        if not absent or any(name in self.weights for name in absent):
            return False
        for name in absent:
            self._whole(name, ZeroRows(expected[name]))
        return True

    def _belongs_to_another(self, name: str) -> bool:
        """Whether it is a scale, read together with its matrix."""
        if name.endswith(_SCALE):
            return name.removesuffix(_SCALE) in self._tensors
        stem, _, last = name.rpartition(".")
        return last in ("scales", "biases") and f"{stem}.weight" in self._tensors

    def _rows(self, name: str, path: str | None = None) -> Rows:
        tensor = self._tensors[name]
        last = name.rpartition(".")[2]
        if last in _FOREIGN:
            raise ConvertError(
                f"mtp.{name} in {tensor.file.path} belongs to a quantization that is not "
                "supported. Give the BF16 original, its block-scaled FP8 release, or an MLX "
                "checkpoint."
            )
        if path is not None and f"{path}.scales" in self._tensors:
            return self._packed(path, tensor)
        if tensor.dtype == "F8_E4M3":
            scales = self._tensors.get(name + _SCALE)
            if scales is None:
                raise CheckpointError(
                    f"mtp.{name} in {tensor.file.path} is FP8 and has no mtp.{name}{_SCALE}."
                )
            return Fp8Rows(tensor, scales, self._block)
        if tensor.dtype not in FLOATS:
            raise CheckpointError(
                f"mtp.{name} in {tensor.file.path} has type {tensor.dtype}; a head's tensor should "
                f"have one of {', '.join(FLOATS)}, or F8_E4M3 with scales."
            )
        return PlainRows(tensor, exact=name in NORMS)

    def _packed(self, path: str, weight: StoredTensor) -> PackedRows:
        scales, biases = self._tensors[f"{path}.scales"], self._tensors.get(f"{path}.biases")
        module = self._modules.get(path)
        if module is None or not hasattr(module, "to_quantized") or weight.dtype != "U32":
            raise CheckpointError(
                f"mtp.{path}.weight in {weight.file.path} has scales, but is not a matrix that MLX "
                f"quantizes (type {weight.dtype})."
            )
        shapes = {
            f"{path}.weight": _Shaped(weight.shape, mx.uint32),
            f"{path}.scales": _Shaped(scales.shape, FLOATS.get(scales.dtype, mx.uint8)),
        }
        try:
            found = infer_quant_config(path, module, shapes)
        except (ValueError, ZeroDivisionError) as error:
            raise CheckpointError(f"mtp.{path} in {weight.file.path}: {error}") from error
        if found["mode"] == "affine" and biases is None:
            raise CheckpointError(f"mtp.{path} in {weight.file.path} has scales but no biases.")
        return PackedRows(weight, scales, biases, Setting(**found))

    def _whole(self, name: str, rows: Rows) -> None:
        self.weights[name] = Weight(rows.shape, (Piece(rows, 0, _num_rows(rows.shape)),))

    def _split_gate_up(self, name: str) -> None:
        """[E, 2I, H] to two of [E, I, H]: of each expert's rows the upper half is the gate's."""
        rows = self._rows(name)
        num_experts, double, hidden = rows.shape
        half = double // 2
        for index, projection in enumerate(("gate_proj", "up_proj")):
            starts = range(index * half, num_experts * double, double)
            pieces = tuple(Piece(rows, start, start + half) for start in starts)
            renamed = name.replace("experts.gate_up_proj", f"switch_mlp.{projection}.weight")
            self.weights[renamed] = Weight((num_experts, half, hidden), pieces)

    def _stack(self, name: str, numbered: dict[int, str]) -> None:
        missing = sorted(set(range(max(numbered) + 1)) - set(numbered))
        if missing:
            raise CheckpointError(f"mtp.{name}: expert {missing[0]} is missing from the source.")
        experts = [self._rows(numbered[i]) for i in sorted(numbered)]
        for number, expert in enumerate(experts):
            if expert.shape != experts[0].shape or expert.dtype != experts[0].dtype:
                raise CheckpointError(
                    f"mtp.{numbered[number]} has shape {expert.shape} and type {expert.dtype}, "
                    f"expert 0 has {experts[0].shape} and {experts[0].dtype}."
                )
        pieces = tuple(Piece(expert, 0, _num_rows(expert.shape)) for expert in experts)
        self.weights[name] = Weight((len(experts), *experts[0].shape), pieces)


@dataclass(frozen=True)
class _Shaped:
    """What mlx-lm looks at in an array to tell how it was packed."""

    shape: Shape
    dtype: mx.Dtype


def _num_rows(shape: Shape) -> int:
    return prod(shape[:-1])
