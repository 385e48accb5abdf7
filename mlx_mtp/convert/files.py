"""Safetensors files: sources, read in slices, as a tensor can hold all experts; and sidecars."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_mtp.errors import CheckpointError, ConvertError, ModelError
from mlx_mtp.kernels import formats
from mlx_mtp.models.files import read_header
from mlx_mtp.models.head_weights import SIDECAR, SIDECAR_INDEX, SIDECAR_PATTERN, sidecar_files

FORMAT_VERSION_KEY = "mlx_mtp_format_version"
FP8 = "F8_E4M3"
# mlx's types by the names in safetensors files; FP8 is read as uint8 codes.
TYPES = {**formats.TYPES, FP8: mx.uint8}
_TYPE_NAMES = {dtype: name for name, dtype in formats.TYPES.items()}
_TEMPORARY = ".mtp-{}.tmp"


class SafetensorsFile:
    """A file's header, checked against its length; CheckpointError if the file is damaged."""

    def __init__(self, path: Path) -> None:
        start, header = read_header(path)
        self.path, self.size = path, path.stat().st_size
        self.digest = hashlib.sha256()  # of the tensors' bytes, in the order of the reads
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self.tensors: dict[str, StoredTensor] = {}
        for name, entry in header.items():
            begin, end = (start + offset for offset in entry["data_offsets"])
            shape = tuple(entry["shape"])
            self.tensors[name] = StoredTensor(self, name, entry["dtype"], shape, begin, end - begin)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, or a slice of it along its first axis."""

    file: SafetensorsFile
    name: str
    dtype: str  # as named in safetensors files
    shape: tuple[int, ...]
    offset: int  # of the first byte in the file
    nbytes: int
    scales: StoredTensor | None = None  # of an FP8 tensor, [..., blocks of rows, blocks of columns]
    block: tuple[int, int] = (1, 1)  # rows and columns that share a scale

    def sliced(self, start: int, stop: int) -> StoredTensor:
        stride = self.nbytes // self.shape[0]
        return replace(
            self,
            shape=(stop - start, *self.shape[1:]),
            offset=self.offset + start * stride,
            nbytes=(stop - start) * stride,
            scales=self.scales and self.scales.sliced(start, stop),
        )

    def with_scales(self, scales: StoredTensor | None, block: tuple[int, int]) -> StoredTensor:
        """Returns the FP8 tensor with its scales; CheckpointError if they are missing or wrong."""
        if scales is None:
            raise CheckpointError(
                f"{self.name} in {self.file.path} is FP8 and has no {self.name}_scale_inv."
            )
        blocks = (-(-size // each) for size, each in zip(self.shape[-2:], block))
        expected = (*self.shape[:-2], *blocks)
        if scales.shape != expected or scales.dtype not in formats.FLOATS:
            raise CheckpointError(
                f"{scales.name} in {scales.file.path} has shape {scales.shape} and type "
                f"{scales.dtype}; for a matrix of shape {self.shape} in blocks of "
                f"{block[0]}x{block[1]} it should be {expected}, BF16 or F32."
            )
        return replace(self, scales=scales, block=block)

    def like(self) -> mx.array:
        """Returns unevaluated zeros of the shape and type that `read` returns.

        Raises CheckpointError for a type that can't be read.
        """
        if self.dtype not in TYPES or (self.dtype == FP8 and self.scales is None):
            raise CheckpointError(
                f"{self.name} in {self.file.path} has type {self.dtype}, of a quantization that is "
                "not supported. Give the BF16 original, its block-scaled FP8 release, or an MLX "
                "checkpoint."
            )
        return mx.zeros(self.shape, dtype=mx.bfloat16 if self.scales else TYPES[self.dtype])

    def read(self) -> mx.array:
        """Read the tensor; FP8 becomes bfloat16, each code times its scale, rounded once."""
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
        return dequantize(values, self.scales.read(), self.block, mx.bfloat16)


def dequantize(
    codes: mx.array, scales: mx.array, block: tuple[int, int], dtype: mx.Dtype
) -> mx.array:
    """Returns FP8 codes [..., R, C] times their blocks' scales, as `dtype`, rounded once."""
    if codes.ndim > 2:  # one expert at a time: the repeated scales of all take much memory
        return mx.stack([dequantize(*each, block, dtype) for each in zip(codes, scales)])
    rows, columns = codes.shape
    scales = mx.repeat(scales.astype(mx.float32), block[0], axis=0)[:rows]
    scales = mx.repeat(scales, block[1], axis=1)[:, :columns]
    return (mx.from_fp8(codes, dtype=mx.float32) * scales).astype(dtype)


class Existing(NamedTuple):
    """A sidecar that a model already has."""

    files: list[Path]  # empty if they can't be read
    metadata: Mapping[str, str]

    @classmethod
    def find(cls, directory: Path) -> Existing | None:
        try:
            files = sidecar_files(directory)
            return cls(files, SafetensorsFile(files[0]).metadata) if files else None
        except ModelError:
            return cls([], {})

    def differences(self, entries: Mapping[str, str], but: Container[str]) -> list[str]:
        """Returns how the header differs from `entries`, such as `bits 4, not 8`.

        Keys in `but` are not compared.
        """
        if FORMAT_VERSION_KEY not in self.metadata:
            return ["it was not made by this program"]
        return [
            f"{key} {self.metadata.get(key, 'unknown')}, not {value}"
            for key, value in entries.items()
            if key not in but and self.metadata.get(key) != value
        ]


@contextlib.contextmanager
def new_sidecar(
    directory: Path,
    like: Mapping[str, mx.array],
    metadata: Callable[[], dict[str, str]],
    tensors: Iterable[tuple[int, Mapping[str, mx.array]]],
) -> Iterator[Path]:
    """Write a sidecar and yield its path; at the end of the block it replaces the model's sidecar.

    The arguments are those of `write_tensors`.
    """
    path = directory / _TEMPORARY.format(os.getpid())
    _remove_leftovers(directory)
    try:
        with path.open("xb") as file:
            # The lock, if the file system supports locks, tells other runs that the file is in use.
            with contextlib.suppress(OSError):
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_tensors(file, like, metadata, tensors, "mtp.")
            file.flush()
            os.fsync(file.fileno())
            yield path
            _publish(path, directory)
    finally:
        path.unlink(missing_ok=True)


def write_tensors(
    file: BinaryIO,
    like: Mapping[str, mx.array],
    metadata: Callable[[], Mapping[str, str]],
    tensors: Iterable[tuple[int, Mapping[str, mx.array]]],
    prefix: str = "",
) -> None:
    """Write a safetensors file one slice of a tensor at a time; each name gets the prefix.

    `like` has the type and shape of each tensor. `tensors` yields slices as uint8, after the index
    of the slices along the first axis. `metadata` is called before and after `tensors` is read, and
    both results must have the same length as JSON.
    """
    entries, end = dict[str, Any](), 0
    # Wide types come first, so that every tensor is aligned to its item size.
    for name, array in sorted(like.items(), key=lambda item: -item[1].itemsize):
        offsets = (end, end + array.nbytes)
        end += array.nbytes
        dtype = _TYPE_NAMES[array.dtype]
        entry = {"dtype": dtype, "shape": array.shape, "data_offsets": offsets}
        entries[prefix + name] = entry
    start = len(_header(entries, metadata()))
    for first, arrays in tensors:
        mx.eval(arrays)
        for name, array in arrays.items():
            skipped = first * (array.nbytes // array.shape[0])
            file.seek(start + entries[prefix + name]["data_offsets"][0] + skipped)
            file.write(np.array(array, copy=False).data)
    file.seek(0)
    file.write(_header(entries, metadata()))


def _header(entries: Mapping[str, object], metadata: Mapping[str, str]) -> bytes:
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _publish(path: Path, directory: Path) -> None:
    os.replace(path, directory / SIDECAR)
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    # The index of an older sidecar in several files would take precedence.
    (directory / SIDECAR_INDEX).unlink(missing_ok=True)
    for shard in directory.glob("mtp-*-of-*.safetensors"):
        shard.unlink()


def _remove_leftovers(directory: Path) -> None:
    for path in directory.glob(_TEMPORARY.format("*")):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if in use
            path.unlink()


def link_model(model: Path, directory: Path) -> None:
    """Link a model's files into another directory, except its sidecar and hidden files.

    Raises ConvertError if the directory has a different file with one of the names.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(model.glob("[!.]*")):
        if not path.is_file() or path.match(SIDECAR_PATTERN) or path.name == SIDECAR_INDEX:
            continue
        link = directory / path.name
        if not link.exists():
            link.symlink_to(path.resolve())
        elif not link.samefile(path):
            raise ConvertError(
                f"{link} is not the same file as {path}: give --output a new or empty directory."
            )
