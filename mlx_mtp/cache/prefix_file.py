"""One node of the prefix cache as a file: safetensors, with two checksums in its header.

Written and read here, not by the `safetensors` package, for three reasons: a node of a long prompt
is hundreds of megabytes and must not be copied once more in memory; its tokens must be known from
the header alone; and every byte of the file, the header's too, must be covered by a checksum. What
is written is ordinary safetensors all the same: the package and `mx.load` read it (a test does).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from typing import Any

import numpy as np

FORMAT = "mlx-mtp prefix 1"
"""Changes with every change of what a file holds; files of another format do not fit."""
_ITEM_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_META = "__metadata__"
_HEAD = b'{"__metadata__":{"header_sha256":"'
_BLANK = b"0" * 64
_MAX_HEADER = 64 << 20
_SLICE = 4 << 20
_LENGTH_BYTES = 8


class UnfitFileError(ValueError):
    """A file is damaged, cut short, of another format, or not what its name says."""


@dataclass(frozen=True, slots=True)
class HostArray:
    """An array's bytes, row by row, as the host holds them.

    Args:
        dtype: safetensors' name of the type, like "BF16".
        shape: of the array.
        data: prod(shape) elements, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class NodeHeader:
    """What a node's file says before its arrays.

    Args:
        key: of the node, 64 hexadecimal digits (`prefix_keys`).
        parent: key of the node before it, or `root`.
        root: key of the empty prefix with the node's salt.
        fingerprint: of all that the arrays' numbers depend on.
        token_bytes: of the node's own tokens, uint32 little-endian.
        extra: whatever else the cache wants to know at the start.
        arrays: (dtype, shape) of each by name, in the file's order.
        data_sha256: of the arrays' bytes, in that order.
        data_start: their place in the file.
    """

    key: str
    parent: str
    root: str
    fingerprint: str
    token_bytes: bytes
    extra: Mapping[str, str]
    arrays: Mapping[str, tuple[str, tuple[int, ...]]]
    data_sha256: str = ""
    data_start: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """The node's own tokens, its parent's not included."""
        return tuple(np.frombuffer(self.token_bytes, dtype="<u4").tolist())

    @property
    def num_tokens(self) -> int:
        """How many these are."""
        return len(self.token_bytes) // 4

    @property
    def data_nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(map(_nbytes, self.arrays.values()))


@dataclass(frozen=True, slots=True)
class StoredNode:
    """A node read back.

    Args:
        header: its key, parent, tokens and the like.
        arrays: as they were put, in the host's memory.
    """

    header: NodeHeader
    arrays: Mapping[str, HostArray]


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """As `NodeHeader.token_bytes` has them.

    Raises:
        OverflowError: an id is negative or too large for 32 bits.
    """
    return np.asarray(tokens, dtype="<u4").tobytes()


def encode(header: NodeHeader, arrays: Mapping[str, HostArray]) -> Iterator[bytes | memoryview]:
    """The file's bytes in pieces of at most 4 MiB, the header's first. Nothing is copied.

    Args:
        header: `arrays`, `data_sha256` and `data_start` of it are not used.
        arrays: by name; at least one.

    Raises:
        ValueError: an array's bytes don't fit its shape, or a name is reserved.
    """
    # Largest items first, so that each array's start is a multiple of its item's size.
    names = sorted(arrays, key=lambda name: (-_ITEM_SIZES[arrays[name].dtype], name))
    digest, entries, end = hashlib.sha256(), {}, 0
    for name in names:
        array = arrays[name]
        if name == _META or _nbytes((array.dtype, array.shape)) != len(array.data):
            raise ValueError(f"the array {name!r} can't be stored: {array.dtype} {array.shape}")
        digest.update(array.data)
        begin, end = end, end + len(array.data)
        entry = {"dtype": array.dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
        entries[name] = entry
    meta = {
        "header_sha256": _BLANK.decode(),
        "format": FORMAT,
        "fingerprint": header.fingerprint,
        "key": header.key,
        "parent": header.parent,
        "root": header.root,
        "tokens": base64.b64encode(header.token_bytes).decode(),
        "extra": json.dumps(dict(header.extra), sort_keys=True),
        "data_sha256": digest.hexdigest(),
    }
    text = json.dumps({_META: meta, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(_LENGTH_BYTES, "little")
    yield text.replace(_BLANK, _header_digest(text).encode(), 1)
    for name in names:
        view = memoryview(arrays[name].data)
        yield from (view[i : i + _SLICE] for i in range(0, len(view), _SLICE))


def read_header(file: FileIO, size: int, key: str) -> NodeHeader:
    """Read and check a header, and that the file is as long as it says.

    Args:
        file: at its start.
        size: of the file, in bytes.
        key: as the file's name has it.

    Raises:
        UnfitFileError: anything is not as `encode` wrote it.
    """
    length = int.from_bytes(_exactly(file, _LENGTH_BYTES), "little")
    if length > min(size - _LENGTH_BYTES, _MAX_HEADER):
        raise UnfitFileError("it is not a safetensors file, or ends within its header")
    text = _exactly(file, length)
    at = len(_HEAD)
    said = text[at : at + len(_BLANK)]
    if not text.startswith(_HEAD) or said != _header_digest(text).encode():
        raise UnfitFileError("its header is damaged, or it is another program's")
    try:
        header = _parsed(json.loads(text), _LENGTH_BYTES + length)
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise UnfitFileError(f"its header can't be read: {error!r}") from None
    if header.key != key:
        raise UnfitFileError("it is another node than its name says")
    if size != header.data_start + header.data_nbytes:
        raise UnfitFileError("it is longer or shorter than its header says")
    return header


def read_arrays(
    file: FileIO, header: NodeHeader, go_on: Callable[[], object] | None = None
) -> dict[str, HostArray]:
    """Read all arrays and check them.

    Args:
        file: just behind the header.
        header: of the same file.
        go_on: called between pieces of 4 MiB at most; what it raises ends the reading.

    Raises:
        UnfitFileError: they are not what was written.
    """
    digest, arrays = hashlib.sha256(), {}

    def check(piece: memoryview) -> None:
        digest.update(piece)
        if go_on is not None:
            go_on()

    for name, (dtype, shape) in header.arrays.items():
        # A bytearray would be zeroed first, while no other thread can run.
        data = np.empty(_nbytes((dtype, shape)), dtype=np.uint8).data
        _fill(file, data, check)
        arrays[name] = HostArray(dtype, shape, data)
    if digest.hexdigest() != header.data_sha256:
        raise UnfitFileError("its content is damaged")
    return arrays


def _parsed(content: Any, data_start: int) -> NodeHeader:
    meta = content.pop(_META)
    if meta["format"] != FORMAT:
        raise ValueError(f"format {meta['format']!r} is not {FORMAT!r}")
    end, arrays = 0, {}
    for name, entry in content.items():
        spec = (str(entry["dtype"]), tuple(map(int, entry["shape"])))
        begin, end = end, end + _nbytes(spec)
        if entry["data_offsets"] != [begin, end]:
            raise ValueError(f"the place of {name!r} is wrong")
        arrays[name] = spec
    return NodeHeader(
        key=meta["key"],
        parent=meta["parent"],
        root=meta["root"],
        fingerprint=meta["fingerprint"],
        token_bytes=base64.b64decode(meta["tokens"], validate=True),
        extra=json.loads(meta["extra"]),
        arrays=arrays,
        data_sha256=meta["data_sha256"],
        data_start=data_start,
    )


def _header_digest(text: bytes | bytearray) -> str:
    """Of a header, with the place of this very digest blank."""
    at = len(_HEAD)
    digest = hashlib.sha256(len(text).to_bytes(_LENGTH_BYTES, "little"))
    digest.update(text[:at] + _BLANK + text[at + len(_BLANK) :])
    return digest.hexdigest()


def _nbytes(spec: tuple[str, tuple[int, ...]]) -> int:
    dtype, shape = spec
    if any(n < 0 for n in shape):
        raise ValueError(f"the shape {shape} has a negative side")
    return _ITEM_SIZES[dtype] * prod(shape)


def _exactly(file: FileIO, count: int) -> bytearray:
    data = bytearray(count)
    _fill(file, memoryview(data))
    return data


def _fill(
    file: FileIO, view: memoryview, check: Callable[[memoryview], None] | None = None
) -> None:
    """Read until a buffer is full, and have each piece checked."""
    done = 0
    while done < len(view):
        got = file.readinto(view[done : done + _SLICE])
        if not got:
            raise UnfitFileError("it ends too early")
        if check is not None:
            check(view[done : done + got])
        done += got
