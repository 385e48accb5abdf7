"""Names of token prefixes, and the fingerprint of what their cached numbers depend on.

A key is a hash chain, one link a token: `K(s + [t]) = SHA-256(K(s), t)`, from a root made of the
salt. So it names a prefix whatever the pieces it is stored in, a node that is split keeps its key,
and a child's key follows from its parent's alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16


def root_key(salt: str | None) -> str:
    """Key of the empty prefix: 64 hexadecimal digits. No salt and the empty one differ."""
    text = b"mlx-mtp prefix\0" + (b"" if salt is None else b"salt\0" + salt.encode())
    return hashlib.sha256(text).hexdigest()


def extend_key(key: str, tokens: Iterable[int]) -> str:
    """Key of a prefix with these tokens after it; some 0.6 microseconds a token."""
    link = bytes.fromhex(key)
    for token in tokens:
        link = hashlib.sha256(link + token.to_bytes(4, "little")).digest()
    return link.hex()


def fingerprint(config: Mapping[str, Any], files: Iterable[Path], **facts: object) -> str:
    """Of everything that the numbers in a cache depend on: 64 hexadecimal digits.

    A file counts with its name, size, time of change and 16 samples of its content, so that
    weights that were replaced are noticed without being read (several gigabytes at each start).

    Args:
        config: the model's config.json.
        files: its weights and its head's.
        facts: what else there is, with a `str` that says it: versions, device, dtype, head,
            quantization of what is stored, tokens in a prefill chunk.

    Raises:
        OSError: a file can't be read.
    """
    weights = [_weights_mark(path) for path in sorted(files)]
    said = {name: str(value) for name, value in facts.items()}
    text = json.dumps([config, weights, said], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _weights_mark(path: Path) -> list[object]:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        stat = os.fstat(file.fileno())
        for sample in range(_SAMPLES):
            file.seek(max(stat.st_size - _SAMPLE_BYTES, 0) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return [path.name, stat.st_size, stat.st_mtime_ns, digest.hexdigest()]
