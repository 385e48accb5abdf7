"""The memory computed from the layer specs is that of real caches, byte for byte."""

from collections.abc import Iterable

import mlx.core as mx
import pytest

from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.specs import CacheMemory
from mlx_mtp.engine.memory import footprint
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.models.loader import load_model
from tests.tiny_models import FAMILIES


@pytest.fixture(params=(*FAMILIES, "bundled", "bfloat16", "float16"))
def model(request, tiny_models, demo_model) -> LoadedModel:
    if request.param == "bundled":
        return demo_model
    if request.param in FAMILIES:
        return tiny_models[request.param]
    # A dense model: on the CPU mlx has no mixture of experts in these types.
    return load_model(tiny_models["qwen3_5"].path, enable_mtp=True, dtype=request.param)


def memory_of(model: LoadedModel) -> CacheMemory:
    return footprint(model, 8).caches


def nbytes(arrays: Iterable[mx.array]) -> int:
    """Of arrays that several layers share, once."""
    return sum(array.nbytes for array in {id(array): array for array in arrays}.values())


def window(model: LoadedModel, caches, length: int, lengths: list[int] | None, limit: int) -> int:
    """Bytes of trunk's and head's caches of three rows after a window."""
    (trunk, head), tokens = caches, mx.ones((3, length), dtype=mx.int32)
    start, known = trunk.offset, None if lengths is None else mx.array(lengths)
    trunk.begin(limit, known)
    hidden = model.hidden(tokens, trunk)
    trunk.commit(mx.ones(3, dtype=mx.int32) if known is None else known)
    head.reserve(limit)
    model.head.write(model.head.join(model.embed(tokens), hidden), head, start)
    return nbytes([*trunk.arrays(), *head.arrays()])


@pytest.mark.parametrize("longest", [40, 256, 257])
def test_prefills_and_verify_windows(model, longest):
    memory, alone = memory_of(model), memory_of(model.without_head())
    for depth in (0, 1, 3, 8):
        caches = model.make_cache(3), RaggedKVCache(3)
        used = window(model, caches, longest, [3, longest, 1], longest)
        assert used == memory.batch(3, longest, depth=None)
        assert nbytes(caches[0].arrays()) == alone.batch(3, longest, depth=None)
        for _ in range(2):
            kept = [1, 0, 1] if depth == 0 else None
            used = window(model, caches, depth + 1, kept, longest + 20)
            assert used == memory.batch(3, longest + 20, depth)
