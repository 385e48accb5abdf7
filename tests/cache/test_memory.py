"""The memory computed from the layer specs is that of real caches, byte for byte."""

from collections.abc import Iterable

import mlx.core as mx
import pytest

from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.specs import CacheMemory
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.memory import footprint
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.models.loader import load_model
from mlx_mtp.speculative.proposer import MTPProposer
from tests.harness import Driver, greedy, request
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


class Caches:
    """Trunk's and head's caches of three rows, advanced by hand."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.trunk = model.make_cache(3)
        self.head = RaggedKVCache(3)

    def run(self, length: int, lengths: list[int] | None, limit: int) -> int:
        """Bytes of the caches after a window."""
        start = self.trunk.offset
        tokens = mx.ones((3, length), dtype=mx.int32)
        known = None if lengths is None else mx.array(lengths)
        self.trunk.begin(limit, known)
        hidden = self.model.hidden(tokens, self.trunk)
        self.trunk.commit(mx.ones(3, dtype=mx.int32) if known is None else known)
        self.head.reserve(limit)
        z = self.model.head.join(self.model.embed(tokens), hidden)
        self.model.head.write(z, self.head, start)
        return nbytes([*self.trunk.arrays(), *self.head.arrays()])


@pytest.mark.parametrize("longest", [40, 256, 257])
def test_after_a_prefill(model, longest):
    caches, memory = Caches(model), memory_of(model)
    assert caches.run(longest, [3, longest, 1], longest) == memory.batch(3, longest, depth=None)
    trunk = memory_of(model.without_head()).batch(3, longest, depth=None)
    assert nbytes(caches.trunk.arrays()) == trunk
    assert caches.run(1, [1, 0, 1], longest + 1) == memory.batch(3, longest + 1, depth=0)


def test_with_a_verify_window(model):
    for depth in (1, 2, 3, 8):
        caches = Caches(model)
        caches.run(20, [20, 5, 9], 20)
        for _ in range(2):
            assert caches.run(depth + 1, None, 40) == memory_of(model).batch(3, 40, depth)


def test_a_row_of_the_engine(model, monkeypatch):
    """From the prompt to the last token, with windows in flight."""
    made = []

    def remembered(make):
        def wrapped(*args):
            made.append(make(*args))
            return made[-1]

        return wrapped

    monkeypatch.setattr(LoadedModel, "make_cache", remembered(LoadedModel.make_cache))
    monkeypatch.setattr(MTPProposer, "make_state", remembered(MTPProposer.make_state))
    prompt, answer, depth = 230, 26, 3
    driver = Driver(model, config=EngineConfig(num_draft_tokens=depth, prefill_step_size=64))
    driver.add(request("r", [1] * prompt, greedy(answer, ignore_eos=True)))
    seen = []
    while not driver.core.idle:
        driver.step()
        seen.append(nbytes(array for cache in made for array in cache.arrays()))
    assert len(made) == 2
    memory = memory_of(model)
    assert seen[0] == memory.batch(1, 64, depth=None)
    # 256 tokens fit the first block; the windows on their way to them don't.
    assert max(seen) == memory.batch(1, prompt + answer + 2 * (depth + 1), depth)
    assert max(seen) > memory.batch(1, prompt + answer, depth)
