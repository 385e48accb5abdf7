"""Putting a sidecar beside a model so that it is there as a whole or not at all.

Everything is written to temporary files in the same directory, which are renamed at the end. A
sidecar of several files becomes one by the renaming of its index: until then the loader doesn't see
its shards, and a sidecar that was there before stays whole, as the new shards have other names.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from mlx_mtp.convert.writer import SafetensorsWriter, TensorSpec
from mlx_mtp.models.head_weights import SIDECAR, SIDECAR_INDEX

MAX_FILE_BYTES = 5 * 10**9
_OUR_SHARD = re.compile(r"^mtp-[0-9a-f]{8}-\d{5}-of-\d{5}\.safetensors$")
_TEMPORARY = ".mtp-{}.tmp"


def split(specs: Sequence[TensorSpec], max_file_bytes: int) -> list[list[TensorSpec]]:
    """Tensors by file, in order; a file holds more than the limit only if one tensor does."""
    files: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if files[-1] and size + spec.nbytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(spec)
        size += spec.nbytes
    return files


class SidecarWriter:
    """A sidecar in the making; what is not committed is removed on exit.

    Args:
        directory: of the model.
        specs: all tensors.
        metadata: the header's entries, of the length that they will have in the end.
        max_file_bytes: where to begin a new file.
    """

    def __init__(
        self,
        directory: Path,
        specs: Sequence[TensorSpec],
        metadata: Mapping[str, str],
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._directory = directory
        self._groups = split(specs, max_file_bytes)
        self._metadata = dict(metadata)
        self._temporary: list[Path] = []
        self._writers: dict[str, SafetensorsWriter] = {}
        # Open, and so locked, to the end: no run beside this one takes them for leftovers.
        self._open = contextlib.ExitStack()

    def __enter__(self) -> SidecarWriter:
        remove_leftovers(self._directory)
        try:
            for number, group in enumerate(self._groups):
                path = self._directory / _TEMPORARY.format(f"{os.getpid()}-{number}")
                self._temporary.append(path)
                file = self._open.enter_context(path.open("xb"))
                _lock(file.fileno())
                writer = SafetensorsWriter(file, group, self._metadata)
                self._writers.update((spec.name, writer) for spec in group)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._open.close()
        finally:
            for path in self._temporary:
                path.unlink(missing_ok=True)

    def write(self, name: str, row: int, data: np.ndarray) -> None:
        """See `SafetensorsWriter.write`."""
        self._writers[name].write(name, row, data)

    def finish(self, metadata: Mapping[str, str]) -> dict[str, Path]:
        """Bring everything to the disk, still under temporary names.

        Returns:
            Where each file of the sidecar lies now, by the name it will have.
        """
        for writer in dict.fromkeys(self._writers.values()):
            writer.finish(metadata)
        names = [SIDECAR] if len(self._groups) == 1 else self._write_index(metadata)
        for path in self._temporary:
            _sync(path)
        return dict(zip(names, self._temporary, strict=True))

    def commit(self, files: Mapping[str, Path]) -> None:
        """Make it the model's sidecar.

        Args:
            files: what `finish` returned.
        """
        for name, path in files.items():
            os.replace(path, self._directory / name)
        _sync(self._directory)
        # An index counts before a single file, so its coming or going is the change to the new one.
        obsolete = SIDECAR if SIDECAR_INDEX in files else SIDECAR_INDEX
        (self._directory / obsolete).unlink(missing_ok=True)
        for path in self._directory.iterdir():
            if _OUR_SHARD.match(path.name) and path.name not in files:
                path.unlink()

    def _write_index(self, metadata: Mapping[str, str]) -> list[str]:
        """Names of the shards, by a digest of what they are made of, and of their index, last."""
        digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode()).hexdigest()[:8]
        count = len(self._groups)
        names = [
            f"mtp-{digest}-{number:05d}-of-{count:05d}.safetensors"
            for number in range(1, count + 1)
        ]
        shards = zip(names, self._groups, strict=True)
        index = {
            "metadata": {"total_size": sum(s.nbytes for group in self._groups for s in group)},
            "weight_map": {f"mtp.{s.name}": name for name, group in shards for s in group},
        }
        path = self._directory / _TEMPORARY.format(f"{os.getpid()}-index")
        self._temporary.append(path)
        file = self._open.enter_context(path.open("x", encoding="utf-8"))
        _lock(file.fileno())
        json.dump(index, file, indent=2)
        file.flush()
        return [*names, SIDECAR_INDEX]


def remove_leftovers(directory: Path) -> None:
    """Remove the temporary files of runs that were killed; those of running ones are locked."""
    for path in directory.glob(_TEMPORARY.format("*")):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _lock(descriptor: int) -> None:
    # A file system without locks costs no more than the safety from a run at the same time.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
