"""The format of a stored node, keys, the fingerprint, and the order in which nodes go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mlx_mtp.cache.prefix_file import (
    HostArray,
    NodeHeader,
    UnfitFileError,
    encode,
    read_arrays,
    read_header,
)
from mlx_mtp.cache.prefix_index import Entry, PrefixIndex
from mlx_mtp.cache.prefix_keys import extend_key, fingerprint, root_key
from tests.cache.stored_nodes import FINGERPRINT, ROOT, key_of

SHARED = [HealthCheck.function_scoped_fixture]


def _example() -> tuple[bytes, dict[str, HostArray]]:
    arrays = {"a": HostArray("BF16", (3,), b"abcdef"), "b": HostArray("U32", (2, 1), b"12345678")}
    header = NodeHeader(key_of(1), ROOT, ROOT, FINGERPRINT, b"\1\0\0\0", {"x": "y"}, {})
    return b"".join(encode(header, arrays)), arrays


EXAMPLE, ARRAYS = _example()


def _reads(folder: Path, content: bytes) -> dict[str, HostArray]:
    path = folder / "node"
    path.write_bytes(content)
    with path.open("rb", buffering=0) as file:
        return read_arrays(file, read_header(file, len(content), key_of(1)))


@settings(max_examples=300, deadline=None, suppress_health_check=SHARED)
@given(at=st.integers(0, len(EXAMPLE) - 1), flip=st.integers(1, 255))
def test_a_changed_byte_anywhere_is_noticed(tmp_path: Path, at: int, flip: int) -> None:
    assert _reads(tmp_path, EXAMPLE) == ARRAYS
    content = bytearray(EXAMPLE)
    content[at] ^= flip
    with pytest.raises(UnfitFileError):
        _reads(tmp_path, bytes(content))


@pytest.mark.full
def test_a_changed_bit_of_every_byte_is_noticed(tmp_path: Path) -> None:
    for at in range(len(EXAMPLE)):
        for bit in (0, 5, 7):
            content = bytearray(EXAMPLE)
            content[at] ^= 1 << bit
            with pytest.raises(UnfitFileError):
                _reads(tmp_path, bytes(content))


@settings(max_examples=100, deadline=None, suppress_health_check=SHARED)
@given(length=st.integers(0, len(EXAMPLE) - 1), more=st.binary(max_size=9))
def test_cut_short_or_with_more_behind_it_is_noticed(
    tmp_path: Path, length: int, more: bytes
) -> None:
    assume(EXAMPLE[:length] + more != EXAMPLE)
    with pytest.raises(UnfitFileError):
        _reads(tmp_path, EXAMPLE[:length] + more)
    with pytest.raises(UnfitFileError):
        _reads(tmp_path, EXAMPLE + b"0" + more)


@settings(max_examples=100, deadline=None, suppress_health_check=SHARED)
@given(content=st.binary(max_size=200))
def test_garbage_is_no_node(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UnfitFileError):
        _reads(tmp_path, content)


def test_a_key_names_a_prefix_however_it_is_cut() -> None:
    whole = extend_key(ROOT, range(10))
    assert extend_key(extend_key(ROOT, range(4)), range(4, 10)) == whole
    roots = {root_key(None), root_key(""), root_key("a"), root_key("b")}
    assert len(roots) == 4
    assert len({extend_key(root, [1, 2]) for root in roots} | {extend_key(ROOT, [2, 1])}) == 5


def test_fingerprint_follows_all_it_is_made_of(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    os.utime(weights, ns=(10**18, 10**18))
    facts = {"dtype": "bfloat16", "version": "0.1.0", "kv_bits": None}
    marks = [fingerprint({"a": 1}, [weights], **facts)]
    assert fingerprint({"a": 1}, [weights], **facts) == marks[0]
    marks.append(fingerprint({"a": 2}, [weights], **facts))
    marks += [fingerprint({"a": 1}, [weights], **facts | {name: 8}) for name in facts]
    with weights.open("r+b") as file:  # The last byte, and the time as it was.
        file.seek(-1, os.SEEK_END)
        file.write(b"1")
    os.utime(weights, ns=(10**18, 10**18))
    marks.append(fingerprint({"a": 1}, [weights], **facts))
    os.utime(weights, ns=(10**18, 10**18 + 1))
    marks.append(fingerprint({"a": 1}, [weights], **facts))
    weights.rename(tmp_path / "other.safetensors")
    marks.append(fingerprint({"a": 1}, [tmp_path / "other.safetensors"], **facts))
    marks.append(fingerprint({"a": 1}, [], **facts))
    assert len(set(marks)) == len(marks)


def test_the_index_forgets_and_orders() -> None:
    index = PrefixIndex()
    for used, (key, parent) in enumerate([("a", "r"), ("b", "a"), ("c", "b"), ("d", "a")]):
        index.add(Entry(key, parent, "r", 10, used))
    assert index.under("a") == ["a", "b", "d", "c"] or index.under("a") == ["a", "d", "b", "c"]
    assert index.lineage("c") == {"a", "b", "c"}
    assert index.oldest_leaf().key == "c"
    assert index.touch("c", 50) == ["c", "b", "a"]
    assert index.oldest_leaf().key == "d"
    assert index.oldest_leaf(frozenset("d")).key == "c"
    index.add(Entry("b", "a", "r", 30, 60))
    assert (index.nbytes, len(index)) == (60, 4)
    index.remove("b")
    assert index.orphans() == ["c"]
    assert index.remove("b") is None
    assert (index.nbytes, len(index)) == (30, 3)
