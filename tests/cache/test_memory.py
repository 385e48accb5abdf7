"""The memory computed from the layer specs equals that of real caches, byte for byte."""

from collections.abc import Iterable

import mlx.core as mx
import pytest

from mlx_mtp.cache.batch import BatchCache
from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.packing import Packing
from mlx_mtp.cache.specs import CacheMemory
from mlx_mtp.engine.memory import footprint
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel
from tests.support.cases import arrays_of
from tests.support.quick import full
from tests.support.tiny_models import FAMILIES


@pytest.fixture(params=(*FAMILIES, "bundled", "bfloat16", "float16"))
def model(request, tiny_models, demo_model) -> LoadedModel:
    if request.param == "bundled":
        return demo_model
    if request.param in FAMILIES:
        return tiny_models[request.param]
    # A dense model, as mlx runs no mixture of experts in these types on the CPU.
    return load_model(tiny_models["qwen3_5"].path, enable_mtp=True, dtype=request.param)


def memory_of(model: LoadedModel) -> CacheMemory:
    return footprint(model, 8).caches


def nbytes(arrays: Iterable[mx.array]) -> int:
    """Returns the bytes of arrays; an array that several layers share counts once."""
    return sum(array.nbytes for array in {id(array): array for array in arrays}.values())


def unkept(memory: CacheMemory) -> int:
    """Returns the bytes of a row's position that only a GPU's kernel keeps in pending windows."""
    shapes = [layer.shape for layer in memory.recurrent]
    return sum(
        (s.channels - s.key_heads * s.key_dim) * memory.itemsize + 4 * s.value_heads for s in shapes
    )


def window(model: LoadedModel, cache, lengths: list[int], known: list[int] | None) -> int:
    """Returns the bytes of the trunk's and the head's caches after a window."""
    start, kept = cache.offset, None if known is None else mx.array(known)
    cache.begin_window(lengths, kept)
    tokens = mx.ones(sum(lengths), dtype=mx.int32)
    hidden = model.hidden(tokens, cache)
    cache.commit(mx.ones(len(lengths), dtype=mx.int32) if kept is None else kept)
    if cache.head is not None:
        packing = Packing(cache.layout, start, lengths)
        model.head.write(model.embed(tokens), hidden, cache.head, packing)
    return nbytes(arrays_of(cache.arrays()))


@pytest.mark.parametrize("longest", [40, 257, full(900)])
def test_prefills_and_verify_windows(model, longest):
    """Each row takes the KV of its own length."""
    for depth in (0, 1, 3, 8):
        for head in (None, RaggedKVCache()):
            memory = memory_of(model.without_head() if head is None else model)
            cache, lengths = model.make_cache(3), [3, longest, 30]
            cache.head = head
            cache.reserve(lengths)
            used = window(model, cache, lengths, lengths)
            kv = sum(map(memory.kv, lengths))
            assert used == kv + 3 * memory.states_and_window(None)
            for _ in range(2):
                cache.reserve([length + 20 for length in lengths])
                used = window(model, cache, [depth + 1] * 3, [1, 0, 1] if depth == 0 else None)
                kv = sum(memory.kv(length + 20) for length in lengths)
                spare = (depth + 1) * unkept(memory) if depth else 0
                assert used == kv + 3 * (memory.states_and_window(depth) - spare)


def test_a_batch_takes_what_its_rows_take(tiny_models):
    """Rows that join one by one take the sum of their KV, and at most the allowed empty slots."""
    model = tiny_models["qwen3_next"]
    memory, running = memory_of(model), None
    lengths = [9000, 300, 300, 5000, 40, 300, 900, 300, 300, 40, 5000]
    for number, length in enumerate(lengths):
        cache = model.make_cache(1)
        cache.head = RaggedKVCache()
        cache.reserve([length])
        window(model, cache, [2], [2])
        running = running or cache
        if running is not cache:
            running.extend(cache)
        held = lengths[: number + 1]
        running.reserve(held)
        used = sum(a.nbytes for c in running.kv_caches() for a in c.arrays)
        assert sum(map(memory.kv, held)) <= used <= sum(map(memory.most_kv, held))
    own = sum(-(-n // 256) * 256 * memory.kv(1) // 256 for n in lengths)
    assert used < 1.3 * own
    mx.eval(*running.arrays())
    rows = [0, 3, 10]
    running = running.select(rows)
    running.reserve([lengths[row] for row in rows])
    used = sum(a.nbytes for c in running.kv_caches() for a in c.arrays)
    assert used == sum(memory.kv(lengths[row]) for row in rows)


def test_attention_copies_no_kv():
    cache = BatchCache([RaggedKVCache()], 1)
    cache.reserve([8000])
    layer, packing = cache.layers[0], cache.begin_window([1])
    layer.write(packing, mx.ones((1, 2, 2, 64)))
    (array,), queries = layer.arrays, mx.ones((1, 4, 64))
    mx.eval(array, queries)
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    mx.eval(layer.attend(packing, queries, 0.1))
    assert mx.get_peak_memory() - held < array.nbytes / 8
