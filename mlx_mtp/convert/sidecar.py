"""The file beside a model that holds its head: its header, and how it is put in place.

It is written to a temporary file in the same directory, synced and renamed: at any moment the
loader finds the old head or the new one, and a killed run leaves nothing but the temporary file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_mtp.convert.tensors import FP8, TYPES, SafetensorsFile
from mlx_mtp.errors import CheckpointError, ConvertError
from mlx_mtp.models.head_weights import SIDECAR, SIDECAR_INDEX, SIDECAR_PATTERN, sidecar_files

FORMAT_VERSION_KEY = "mlx_mtp_format_version"
# What may differ between two sidecars that are the same: the contents of the source count.
_NOT_COMPARED = ("created_by", "source", "source_revision")
_TEMPORARY = ".mtp-{}.tmp"
_TYPE_NAMES = {dtype: name for name, dtype in TYPES.items() if name != FP8}


class Existing(NamedTuple):
    """A sidecar that is there already."""

    files: tuple[Path, ...]  # None if they can't be read.
    metadata: Mapping[str, str]

    @classmethod
    def find(cls, directory: Path) -> Existing | None:
        try:
            files = sidecar_files(directory)
            return cls(tuple(files), SafetensorsFile(files[0]).metadata) if files else None
        except CheckpointError:
            return cls((), {})

    def is_of_commit(self, wanted: Mapping[str, str]) -> bool:
        """Whether it was made from the same commit of the same repository, in the same way."""
        if not wanted["source_revision"] or self.differences(wanted):
            return False
        return all(self.metadata.get(k) == wanted[k] for k in ("source", "source_revision"))

    def differences(self, wanted: Mapping[str, str]) -> list[str]:
        """In which of the wanted header entries it differs: `bits 4, not 8`."""
        if FORMAT_VERSION_KEY not in self.metadata:
            return ["it was not made by this program"]
        return [
            f"{key} {self.metadata.get(key, 'unknown')}, not {value}"
            for key, value in wanted.items()
            if key not in _NOT_COMPARED and self.metadata.get(key) != value
        ]


class SidecarWriter:
    """A sidecar in the making. Use as a context manager: what is not committed is removed.

    Args:
        specs: type and shape of each tensor, by its name without the `mtp.` prefix.
        metadata: the header's entries; `finish` may give others of the same length.

    Attributes:
        path: where the file is until `commit`.
    """

    def __init__(
        self,
        directory: Path,
        specs: Mapping[str, tuple[mx.Dtype, tuple[int, ...]]],
        metadata: Mapping[str, str],
    ) -> None:
        self._directory, self.path = directory, directory / _TEMPORARY.format(os.getpid())
        self._entries: dict[str, object] = {}
        self._offsets: dict[str, int] = {}
        end = 0
        # Wide types first, so that every tensor begins at a multiple of its item's size.
        for name, (dtype, shape) in sorted(specs.items(), key=lambda spec: -spec[1][0].size):
            self._offsets[name] = begin = end
            end += prod(shape) * dtype.size
            entry = {"dtype": _TYPE_NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
            self._entries[f"mtp.{name}"] = entry
        self._start = len(self._header(metadata))
        _remove_leftovers(directory)
        self._file = self.path.open("xb")
        # No run beside this one takes it for a leftover, where the file system has locks.
        with contextlib.suppress(OSError):
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __enter__(self) -> SidecarWriter:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()
        finally:
            self.path.unlink(missing_ok=True)

    def write(self, first: int, tensors: Mapping[str, mx.array]) -> int:
        """Write tensors, or their slices from `first` on, given as bytes; returns how many."""
        mx.eval(tensors)
        for name, array in tensors.items():
            row = array.nbytes // array.shape[0]
            self._file.seek(self._start + self._offsets[name] + first * row)
            self._file.write(np.array(array, copy=False).data)
        return sum(array.nbytes for array in tensors.values())

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the header and bring all to the disk."""
        self._file.seek(0)
        self._file.write(self._header(metadata))
        self._file.flush()
        os.fsync(self._file.fileno())

    def commit(self) -> None:
        """Make it the model's sidecar."""
        os.replace(self.path, self._directory / SIDECAR)
        descriptor = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        # The index of an older sidecar in several files counts until it is gone.
        (self._directory / SIDECAR_INDEX).unlink(missing_ok=True)
        for shard in self._directory.glob("mtp-*-of-*.safetensors"):
            shard.unlink()

    def _header(self, metadata: Mapping[str, str]) -> bytes:
        entries: dict[str, object] = {"__metadata__": dict(metadata), **self._entries}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def _remove_leftovers(directory: Path) -> None:
    """Remove the temporary files of runs that were killed; those of running ones are locked."""
    for path in directory.glob(_TEMPORARY.format("*")):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def link_model(model: Path, directory: Path) -> None:
    """Link a model's files, but for its sidecar, into another directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(model.iterdir()):
        if not path.is_file() or path.match(SIDECAR_PATTERN) or path.name == SIDECAR_INDEX:
            continue
        link = directory / path.name
        if not link.exists():
            link.symlink_to(path.resolve())
        elif not link.samefile(path):
            raise ConvertError(
                f"{link} is not the same file as {path}: give --output a new or empty directory."
            )
