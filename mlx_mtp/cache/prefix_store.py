"""The prefix cache on disk: nodes of a radix tree that outlive the process.

The engine's thread puts, asks and removes; writing and reading are the work of two others, which
see bytes and never an mlx array (`prefix_writer`, `prefix_reader`). Nothing that goes wrong with
the disk reaches the engine: a write that can't be is dropped, a file that doesn't fit is a miss.

The files hold prompts and answers in clear, as tokens in their headers; they are for their owner
alone (`prefix_folder`), but whoever reads the disk reads them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import mlx.core as mx

from mlx_mtp.cache.prefix_arrays import TYPES, to_host
from mlx_mtp.cache.prefix_file import (
    NodeHeader,
    StoredNode,
    UnfitFileError,
    encode_tokens,
    read_arrays,
    read_header,
)
from mlx_mtp.cache.prefix_folder import PrefixFolder
from mlx_mtp.cache.prefix_index import Entry, PrefixIndex
from mlx_mtp.cache.prefix_reader import PrefixReader
from mlx_mtp.cache.prefix_writer import PrefixWriter
from mlx_mtp.errors import UsageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Gauges and counters.

    Args:
        num_nodes, nbytes: on the disk.
        queued_bytes: waiting to be written.
        num_written, num_dropped, num_unfit: nodes since the start; unfit ones were removed.
    """

    num_nodes: int
    nbytes: int
    queued_bytes: int
    num_written: int
    num_dropped: int
    num_unfit: int


class PrefixStore:
    """Nodes by key in a directory of their own, one file each.

    A node is of use only with all its ancestors, so a child is taken only when its parent is here
    or on its way, and what is least recently used goes first from the leaves. Using a node uses its
    ancestors.

    Args:
        path: of the directory; made if it isn't there.
        fingerprint: of all that the numbers depend on (`prefix_keys.fingerprint`). Files with
            another one are removed: a directory serves one model at a time.
        max_bytes: of all files.
        max_queued_bytes: of what waits to be written; beyond it writes are dropped.
        retry_seconds: for how long nothing is written after the disk refused a write.
        lock_seconds: how long to wait for another server to leave the directory.

    Attributes:
        path, max_bytes: as given.
        found: headers of the nodes that were there at the start, parents before children.
        reader: reads them on a thread of its own.

    Raises:
        UsageError: the directory can't be used, isn't safe, or another process uses it.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: str,
        max_bytes: int,
        *,
        max_queued_bytes: int = 1 << 30,
        retry_seconds: float = 60.0,
        lock_seconds: float = 3.0,
    ) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._fingerprint = fingerprint
        self._folder = PrefixFolder(path, lock_seconds)
        self._index = PrefixIndex()
        self._num_unfit = 0
        self._closed = False
        self._now = 0
        self.reader = PrefixReader(self.read)
        self._writer = PrefixWriter(
            self._folder, self._index, max_bytes, max_queued_bytes, retry_seconds
        )
        try:
            self.found = self._scan(max_bytes)
        except OSError as error:
            self.close()
            raise UsageError(f"--prefix-cache-dir {path} can't be read: {error}.") from None

    def put(
        self,
        key: str,
        parent: str,
        root: str,
        tokens: Sequence[int],
        arrays: Mapping[str, mx.array],
        *,
        extra: Mapping[str, str] | None = None,
        replace: bool = False,
    ) -> bool:
        """Store a node in the background; what it costs here is one copy of its bytes.

        Args:
            key, parent, root: `prefix_keys`; a node without a parent has the root for it.
            tokens: the node's own.
            arrays: at least one, evaluated, of any dtype.
            extra: given back in the header.
            replace: write it even if a node with this key is here (it was split, or has more
                arrays now).

        Returns:
            Whether it is here or on its way. False: its parent is not here, it is too large, too
            much waits already, or the disk refused a write a moment ago.

        Raises:
            ValueError: a token id or the arrays can't be stored at all.
        """
        writer = self._writer
        nbytes = sum(array.nbytes for array in arrays.values())
        with writer.lock:
            if not replace and self._known(key):
                self.touch(key)
                return True
            if parent != root and not self._known(parent):
                return False
            if not writer.has_room(nbytes):
                return False
            self.touch(parent)
        try:
            token_bytes = encode_tokens(tokens)
        except OverflowError as error:
            raise ValueError(f"a token id can't be stored: {error}") from None
        host = {name: to_host(array) for name, array in arrays.items()}
        header = NodeHeader(key, parent, root, self._fingerprint, token_bytes, extra or {}, {})
        writer.put(header, host, nbytes)
        return True

    def read(self, key: str, go_on: Callable[[], object] | None = None) -> StoredNode | None:
        """Read a node; None if it isn't here or doesn't fit. Takes as long as the disk does.

        One that still waits to be written is given back from the queue. One that doesn't fit is
        removed, with all that builds on it.

        Args:
            key: the node's.
            go_on: called between two pieces; what it raises ends the reading, and is raised.
        """
        if self._closed:
            return None
        waiting = self._writer.waiting(key)
        if waiting is not None:
            return StoredNode(*waiting)
        if key not in self:
            return None
        try:
            with self._folder.open(key) as file:
                header = self._checked_header(file, key)
                arrays = read_arrays(file, header, go_on)
        except UnfitFileError as error:
            self._reject(key, error)
            return None
        except OSError as error:
            self._writer.complain(error, "read")
            self.remove_under(key)
            return None
        self.touch(key)
        return StoredNode(header, arrays)

    def touch(self, key: str) -> None:
        """The node was used, from memory perhaps: it and its ancestors count as recent."""
        with self._writer.lock:
            self._now = max(self._now + 1, time.time_ns())
            self._writer.mark_used(self._index.touch(key, self._now), self._now)

    def remove(self, key: str) -> None:
        """Remove one node, on the disk or on its way; its children are of no use without it."""
        self._writer.remove([key])

    def remove_under(self, key: str) -> None:
        """Remove a node and all that builds on it; with a root's key, all of that salt."""
        with self._writer.lock:
            self._writer.remove(self._writer.pending_under([key, *self._index.under(key)]))

    def __contains__(self, key: object) -> bool:
        """On the disk."""
        with self._writer.lock:
            return key in self._index

    def holds(self, key: str) -> bool:
        """On the disk or on its way there (`read` would find it)."""
        with self._writer.lock:
            return not self._closed and self._known(key)

    def size(self, key: str) -> int:
        """Bytes of a node, as a file or waiting to be one; 0 if it is neither."""
        with self._writer.lock:
            entry = self._index.get(key)
            return self._writer.pending_nbytes(key) if entry is None else entry.nbytes

    def stats(self) -> StoreStats:
        """Gauges and counters now."""
        writer = self._writer
        with writer.lock:
            return StoreStats(
                num_nodes=len(self._index),
                nbytes=self._index.nbytes,
                queued_bytes=writer.queued_bytes,
                num_written=writer.num_written,
                num_dropped=writer.num_dropped,
                num_unfit=self._num_unfit,
            )

    def flush(self, seconds: float) -> bool:
        """Wait until all that was put and removed is on the disk; False if that takes longer."""
        return self._writer.wait(seconds)

    def close(self, seconds: float = 10.0) -> None:
        """Write what is queued, for so long at most, and leave the directory to others."""
        if not self._closed:
            self._closed = True
            self.reader.stop()
            if self._writer.close(seconds) and self.reader.ended():
                self._folder.close()
            else:
                logger.warning("The disk of %s hangs; it is left as it is.", self._folder.path)

    def _known(self, key: str) -> bool:
        return key in self._index or self._writer.pending(key)

    def _scan(self, max_bytes: int) -> list[NodeHeader]:
        """Take in what is there; remove what doesn't fit, lacks an ancestor, or is too much."""
        headers: dict[str, NodeHeader] = {}
        unfit: dict[str, str] = {}
        for key in self._folder.node_keys():
            try:
                with self._folder.open(key) as file:
                    headers[key] = header = self._checked_header(file, key)
                    stat = os.fstat(file.fileno())
            except (OSError, UnfitFileError) as error:
                unfit[key] = str(error)
                continue
            with self._writer.lock:
                used = stat.st_mtime_ns
                self._index.add(Entry(key, header.parent, header.root, stat.st_size, used))
        with self._writer.lock:
            unfit |= dict.fromkeys(self._index.orphans(), "the prefix before it is missing")
            self._writer.remove(unfit)
            while self._index.nbytes > max_bytes and (oldest := self._index.oldest_leaf()):
                self._writer.remove([oldest.key])
            roots = {header.root for header in headers.values()}
            order = [key for root in roots for key in self._index.under(root)]
        if unfit:
            self._num_unfit = len(unfit)
            reason = next(iter(unfit.values()))
            logger.info("%d files in %s removed: %s", len(unfit), self._folder.path, reason)
        return [headers[key] for key in order]

    def _checked_header(self, file: FileIO, key: str) -> NodeHeader:
        size = os.fstat(file.fileno()).st_size
        header = read_header(file, size, key)
        if header.fingerprint != self._fingerprint:
            raise UnfitFileError("it is of another model, version or setting")
        if unknown := {dtype for dtype, _ in header.arrays.values()} - TYPES.keys():
            raise UnfitFileError(f"it has arrays of types that are not known: {unknown}")
        return header

    def _reject(self, key: str, error: UnfitFileError) -> None:
        logger.warning("A prefix in %s is removed: %s", self._folder.path, error)
        with self._writer.lock:
            self._num_unfit += 1
        self.remove_under(key)
