"""Writing a safetensors file whose tensors come in pieces and in any order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import BinaryIO

import numpy as np

from mlx_mtp.convert.safetensors_file import ITEM_SIZES


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written.

    Args:
        name: without the `mtp.` prefix, which the file adds.
        dtype: the format's name of the type.
        shape: of the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return prod(self.shape) * ITEM_SIZES[self.dtype]

    @property
    def row_nbytes(self) -> int:
        """Bytes along the last dimension."""
        return self.shape[-1] * ITEM_SIZES[self.dtype]


class SafetensorsWriter:
    """The format's header first, since every shape is known beforehand; then the rows as they come.

    Args:
        file: open for writing and empty.
        specs: every tensor of the file.
        metadata: text entries of the header; `finish` may give other ones of the same length.
    """

    def __init__(
        self, file: BinaryIO, specs: Sequence[TensorSpec], metadata: Mapping[str, str]
    ) -> None:
        self._file = file
        # Wide types first: so every tensor begins at a multiple of its item's size.
        self._specs = sorted(specs, key=lambda spec: -ITEM_SIZES[spec.dtype])
        header = self._header(metadata)
        self._start = len(header)
        self._offsets: dict[str, tuple[int, TensorSpec]] = {}
        offset = self._start
        for spec in self._specs:
            self._offsets[spec.name] = (offset, spec)
            offset += spec.nbytes
        file.write(header)
        file.truncate(offset)

    def write(self, name: str, row: int, data: np.ndarray) -> None:
        """Put bytes (uint8, contiguous) at a row of a tensor flattened to two dimensions."""
        offset, spec = self._offsets[name]
        assert row * spec.row_nbytes + data.nbytes <= spec.nbytes, (name, row, data.nbytes)
        self._file.seek(offset + row * spec.row_nbytes)
        self._file.write(data.data)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the header again, with what is known only now, and empty the buffer."""
        header = self._header(metadata)
        assert len(header) == self._start, "the header has another length than at the start"
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()

    def _header(self, metadata: Mapping[str, str]) -> bytes:
        entries: dict[str, object] = {"__metadata__": dict(metadata)}
        offset = 0
        for spec in self._specs:
            entries[f"mtp.{spec.name}"] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.nbytes],
            }
            offset += spec.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text
