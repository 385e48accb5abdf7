"""Reading single tensors, or rows of them, out of a safetensors file without mapping it.

A mapped file's pages count as resident memory once they were touched, and mlx and numpy know
different sets of types; so this reads bytes into buffers and leaves their meaning to the caller.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mlx_mtp.errors import CheckpointError

_TYPES = {
    1: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
    2: ("U16", "I16", "F16", "BF16"),
    4: ("U32", "I32", "F32"),
    8: ("U64", "I64", "F64"),
}
# Bytes an element takes, by the format's names of the types.
ITEM_SIZES = {name: size for size, names in _TYPES.items() for name in names}
_MAX_HEADER = 100 << 20


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies.

    Args:
        name: as in the file.
        dtype: the format's name, like "BF16".
        shape: of the tensor.
        offset: of its first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return prod(self.shape) * ITEM_SIZES[self.dtype]


class SafetensorsFile:
    """A file whose header has been read and checked against its length.

    Attributes:
        path: of the file.
        size: in bytes.
        metadata: the header's text entries.
        tensors: by name.
        digest: a SHA-256 of every byte that `read` returned, in the order of the calls.

    Raises:
        CheckpointError: it is no safetensors file, or it ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digest = hashlib.sha256()
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error.strerror or error}.") from error
        try:
            self.size = path.stat().st_size
            header, start = self._header()
            metadata = header.pop("__metadata__", None) or {}
            self.metadata: dict[str, str] = {str(k): str(v) for k, v in metadata.items()}
            self.tensors = {name: self._info(name, entry, start) for name, entry in header.items()}
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, tensor: TensorInfo, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Bytes `begin` to `end` of a tensor, as uint8 [end - begin].

        Raises:
            CheckpointError: the file ends too early, or the disk fails.
        """
        length = (tensor.nbytes if end is None else end) - begin
        buffer = np.empty(length, dtype=np.uint8)
        view, done = buffer.data, 0
        try:
            self._file.seek(tensor.offset + begin)
            while done < length:
                count = self._file.readinto(view[done:])
                if not count:
                    raise _truncated(self.path, tensor.offset + begin + length, self.size)
                done += count
        except OSError as error:
            raise CheckpointError(f"{self.path} can't be read: {error.strerror}.") from error
        self.digest.update(buffer.data)
        return buffer

    def close(self) -> None:
        """Let go of the file; a second call does nothing."""
        self._file.close()

    def _header(self) -> tuple[dict[str, Any], int]:
        length = int.from_bytes(self._file.read(8), "little")
        if not 2 <= length <= _MAX_HEADER:
            raise CheckpointError(
                f"{self.path} is not a safetensors file: its header would be {length} bytes long."
            )
        if 8 + length > self.size:
            raise _truncated(self.path, 8 + length, self.size)
        try:
            header = json.loads(self._file.read(length))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path} has a damaged header: {error}") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path} has a damaged header: it is not a JSON object.")
        return header, 8 + length

    def _info(self, name: str, entry: Any, start: int) -> TensorInfo:
        try:
            dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
            begin, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.path} has a damaged header: {name}: {error}") from error
        if not 0 <= begin <= end or min(shape, default=0) < 0:
            raise CheckpointError(
                f"{self.path} has a damaged header: {name} lies at {begin} to {end}, shape {shape}."
            )
        if start + end > self.size:
            raise _truncated(self.path, start + end, self.size)
        info = TensorInfo(name, dtype, shape, start + begin)
        # A type of the future may stand there, as long as nobody asks for the tensor.
        if dtype in ITEM_SIZES and info.nbytes != end - begin:
            raise CheckpointError(
                f"{self.path} has a damaged header: {name} of shape {shape} and type {dtype} takes "
                f"{info.nbytes} bytes, the header says {end - begin}."
            )
        return info


def _truncated(path: Path, needed: int, size: int) -> CheckpointError:
    return CheckpointError(
        f"{path} is truncated: it should hold at least {needed:,} bytes and has {size:,}. "
        "Download it again."
    )
