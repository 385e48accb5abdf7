"""A model sharded over several ranks, threads here, computes the same as the whole model."""

import dataclasses

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.cache.kv import RaggedKVCache
from mlx_mtp.cache.packing import Packing
from mlx_mtp.errors import UsageError
from mlx_mtp.models import tensor_parallel
from mlx_mtp.models.loader import load_model
from tests.conftest import DEMO
from tests.support import tiny_models
from tests.support.exchange import Exchange
from tests.support.tiny_models import Layout, write_checkpoint


def outputs(model) -> list[np.ndarray]:
    """Returns the logits of two windows of two rows, and the head's after the second window."""
    cache, found = model.make_cache(2), []
    cache.head = RaggedKVCache()
    cache.reserve([16, 16])
    for window in (5, 3):
        tokens = mx.arange(2 * window) * 7 % 90
        packing = cache.begin_window([window] * 2, mx.array([window] * 2))
        hidden = model.hidden(tokens, cache)
        found.append(np.array(model.logits(hidden)))
        start = cache.offset
        cache.commit(mx.array([window] * 2))
    packing = Packing(cache.layout, start, [window] * 2)
    z = model.head.write(model.embed(tokens), hidden, cache.head, packing)
    found.append(np.array(model.logits(model.head.run_layer(z, cache.head, packing))))
    return found


@pytest.mark.parametrize(
    ("family", "size", "more"),
    [
        ("qwen3_next", 2, {}),
        ("qwen3_next", 4, {}),  # more ranks than KV heads
        ("qwen3_5", 4, {"bits": 4}),
        ("qwen3_5", 2, {"tied": True}),
        ("qwen3_5_moe", 2, {"bits": 4}),
    ],
)
def test_all_parts_together_are_the_whole(tmp_path, monkeypatch, family, size, more):
    sizes = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "intermediate_size": 128}
    for name, value in sizes.items():
        monkeypatch.setitem(tiny_models._SHARED, name, value)
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        monkeypatch.setitem(tiny_models._MOE, name, 64)
    write_checkpoint(tmp_path, Layout(family, tied=more.get("tied", False)))

    def load(rank: int, size: int):
        bits = more.get("bits")
        model = load_model(tmp_path, enable_mtp=True, part=(0, 1) if bits else (rank, size))
        if bits:
            nn.quantize(model.model, group_size=32, bits=bits)
            tensor_parallel.shard(model.causal_lm, model.head, rank, size)
            model = dataclasses.replace(model, num_ranks=size)
        mx.eval(model.model.state)
        return model

    whole, parts = load(0, 1), [load(rank, size) for rank in range(size)]
    wanted = outputs(whole)
    for found in Exchange(size, monkeypatch).run(lambda rank: outputs(parts[rank])):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-4)
    in_whole, in_part = (sum(a.nbytes for _, a in weights(m)) for m in (whole, parts[0]))
    assert in_part < 0.75 * in_whole and parts[0].nbytes()[0] < whole.nbytes()[0]


def weights(model):
    return tree_flatten(model.model.parameters())


def test_what_cannot_be_cut_is_named():
    why = (
        "for 3 ranks: layers.0.linear_attn.in_proj_qkvz.weight has 4 heads. It can be cut for 2, 4 "
    )
    with pytest.raises(UsageError, match=why):
        load_model(DEMO, enable_mtp=True, lazy=True, part=(0, 3))
    layer = nn.QuantizedLinear(192, 8, group_size=64)
    split = tensor_parallel._Split("down_proj", layer, -1, ((192, 1),))
    assert split.fault(3) is None and split.fault(2) == "192 inputs in groups of 64"
