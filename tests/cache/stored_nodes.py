"""Nodes whose content follows from their tokens, so that another process can check them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_mtp.cache.prefix_arrays import to_mlx
from mlx_mtp.cache.prefix_file import StoredNode
from mlx_mtp.cache.prefix_keys import extend_key, root_key
from mlx_mtp.cache.prefix_store import PrefixStore

ROOT = root_key(None)
FINGERPRINT = "f" * 64
PATIENCE = 30.0
DTYPES = (
    *(mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64),
    *(mx.float16, mx.bfloat16, mx.float32, mx.complex64),
)


def payload(tokens: Sequence[int], nbytes: int = 2048) -> dict[str, mx.array]:
    """A snapshot, quantized KV and a hidden state, or rather their likes."""
    rng = np.random.default_rng(list(tokens))
    words = rng.integers(0, 1 << 32, size=nbytes // 4, dtype=np.uint32)
    normal = mx.array(rng.normal(size=(2, 3, 5)).astype(np.float32))
    arrays = {
        "layers.0.keys": mx.array(words).reshape(1, 1, -1, 4),
        "layers.0.scales": normal.astype(mx.bfloat16),
        "layers.1.state": normal,
    }
    mx.eval(arrays)
    return arrays


def put(store: PrefixStore, before: Sequence[int], tokens: Sequence[int], **more: object) -> bool:
    parent = extend_key(ROOT, before)
    nbytes = more.pop("nbytes", 2048)
    arrays = payload([*before, *tokens], nbytes)
    return store.put(extend_key(parent, tokens), parent, ROOT, tokens, arrays, **more)


def key_of(*tokens: int) -> str:
    return extend_key(ROOT, tokens)


def same(one: mx.array, other: mx.array) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and memoryview(one).tobytes() == memoryview(other).tobytes()


def check_whole(node: StoredNode, tokens: Sequence[int], nbytes: int = 2048) -> None:
    """The node is the one that `put` made of these tokens, all of its path."""
    wanted = payload(tokens, nbytes)
    assert node.arrays.keys() == wanted.keys()
    assert all(same(to_mlx(node.arrays[name]), wanted[name]) for name in wanted)


def files(folder: Path, pattern: str = "*.safetensors") -> list[Path]:
    return sorted(folder.glob(pattern))


Open = Callable[..., PrefixStore]
