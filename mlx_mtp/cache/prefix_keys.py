"""Keys of token prefixes, and the fingerprint of what their cached numbers depend on.

The key of a prefix is a SHA-256 over its salt and its tokens, so it does not depend on how the
prefix is cut into files, and the keys of all prefixes of a prompt come from one pass over it.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

KEY_DIGITS = 40
"""160 bits: two keys and the rest of a file's name must fit the 143 bytes that eCryptfs allows."""
_TOKEN_BYTES = 4
_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16


def root_key(salt: str | None) -> str:
    """Key of the empty prefix: 64 hexadecimal digits. No salt and the empty one differ."""
    text = b"mlx-mtp prefix\0" + (b"" if salt is None else b"salt\0" + salt.encode())
    return hashlib.sha256(text).hexdigest()


def prefix_keys(root: str, tokens: Sequence[int], ends: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Lengths and keys of prefixes of a prompt, which `ends` names in ascending order.

    The root is the `root_key` of its salt. About 10 ns a token.
    """
    data = memoryview(array("I", tokens).tobytes())
    digest, done = hashlib.sha256(bytes.fromhex(root)), 0
    for end in ends:
        digest.update(data[done * _TOKEN_BYTES : end * _TOKEN_BYTES])
        done = end
        yield end, digest.hexdigest()[:KEY_DIGITS]


def fingerprint(config: Mapping[str, Any], files: Iterable[Path], **facts: object) -> str:
    """Hash of everything that the numbers in a cache depend on: 64 hexadecimal digits.

    A file counts with its name, size, modification time and 16 samples of its content, so that
    replaced weights are noticed without reading several gigabytes at each start.

    Args:
        config: the model's config.json.
        files: its weights and its head's.
        facts: whatever else there is, as its `str`: versions, device, dtype, head, quantization of
            what is stored, tokens in a prefill chunk.

    Raises:
        OSError: a file can't be read.
    """
    weights = [_weights_mark(path) for path in sorted(files)]
    others = {name: str(value) for name, value in facts.items()}
    text = json.dumps([config, weights, others], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _weights_mark(path: Path) -> list[object]:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        stat = os.fstat(file.fileno())
        for sample in range(_SAMPLES):
            file.seek(max(stat.st_size - _SAMPLE_BYTES, 0) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return [path.name, stat.st_size, stat.st_mtime_ns, digest.hexdigest()]
