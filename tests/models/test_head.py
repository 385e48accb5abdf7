"""The head's logits equal those of a NumPy head; a draft vocabulary's are some of all logits."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mtp.cache.packing import Packing
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import DraftVocabulary, module_nbytes
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.speculative.drafter import Computed, MTPDrafter
from tests.support.harness import greedy
from tests.support.reference_head import ReferenceHead
from tests.support.tiny_models import FAMILIES, VOCAB, Layout, text_config, write_checkpoint

DEPTH = 3


class RecordingSampler(Sampler):
    """Records the draft logits and positions of each draw."""

    def __init__(self) -> None:
        super().__init__([greedy(1)], [()], VOCAB)
        self.seen: list[np.ndarray] = []
        self.positions: list[int] = []

    def draw(self, logits, positions, window, ids=None) -> mx.array:
        self.seen.append(np.array(logits[0, 0]))
        self.positions.append(int(positions[0, 0].item()))
        return super().draw(logits, positions, window, ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_draft_logits_equal_the_reference(tmp_path, family):
    layout = Layout(family, seed=5)
    tensors = write_checkpoint(tmp_path, layout)
    model = load_model(tmp_path, enable_mtp=True)
    tokens = np.random.default_rng(3).integers(2, VOCAB, 14)

    # Both heads start from the trunk's post-norm hidden states of the prompt.
    hidden = model.causal_lm.model(mx.array(tokens[None, :-1].astype(np.int32)))

    embed = next(k for k in tensors if k.endswith("embed_tokens.weight"))
    reference = ReferenceHead(tensors, text_config(layout), "mtp.", embed)
    expected = reference.drafts(np.array(hidden[0]), tokens[1:].tolist(), DEPTH)

    # Ours: the same rows in three windows of different lengths, the last with a rejected tail.
    drafter, sampler = MTPDrafter(model), RecordingSampler()
    cache = model.make_cache(1)
    state = drafter.make_state(cache)
    start = 0
    for length, kept in ((6, 6), (1, 1), (8, 6)):
        rows = [min(start + j, 12) for j in range(length)]
        cache.reserve([start + length + DEPTH])
        window = Computed(
            hidden=hidden[0, mx.array(rows)],
            targets=mx.array([int(tokens[r + 1]) for r in rows]),
            last=mx.array([kept - 1]),
            packing=Packing(cache.layout, mx.array([start]), [length]),
            cache=cache,
        )
        drafter.propose(state, window, [DEPTH], sampler)
        start += kept
    # Thirteen rows are kept, so the next token is at 13, and the drafts (and their noise) after it.
    assert sampler.positions[-DEPTH:] == [14, 15, 16]
    for ours, theirs in zip(sampler.seen[-DEPTH:], expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


IDS = (90, 3, 0, 41, 95, 12)
# How the layer is quantized, and the bytes of one of its rows.
FORMATS = {
    "float32": (None, 256),
    "bfloat16": (None, 128),
    "4 bit": ({"group_size": 32, "bits": 4}, 48),
    "8 bit": ({"group_size": 64, "bits": 8}, 72),
    "mxfp4": ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, 34),
}


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("tied", [False, True])
def test_reduced_logits_are_rows_of_the_full_ones(tmp_path, tied, how):
    write_checkpoint(tmp_path, Layout("qwen3_5", tied=tied))
    model = load_model(tmp_path, enable_mtp=True)
    quantized, row_nbytes = FORMATS[how]
    name = "embed_tokens" if tied else "lm_head"
    if quantized:
        nn.quantize(model.causal_lm, class_predicate=lambda p, _: p.endswith(name) and quantized)
    layer = model.output_layer
    if how == "bfloat16":
        layer.weight = layer.weight.astype(mx.bfloat16)
    head = DraftVocabulary(model, IDS)
    assert head.ids.tolist() == sorted(IDS)
    assert layer.weight.shape[0] == VOCAB, "the layer itself has changed"
    for name, value in head.layer.parameters().items():
        assert mx.array_equal(value, layer[name][head.ids])
        assert value.dtype == layer[name].dtype
    hidden = mx.random.normal((2, 3, 64), key=mx.random.key(1))
    reduced, full = model.logits(hidden, head.layer), model.logits(hidden)[..., head.ids]
    left, right = (np.array(a.astype(mx.float32)) for a in (reduced, full))
    # The order of the sums can differ.
    absolute, relative = (0.05, 0.01) if how == "bfloat16" else (1e-5, 1e-5)
    np.testing.assert_allclose(left, right, atol=absolute, rtol=relative)
    assert model.row_nbytes() == row_nbytes
    assert module_nbytes(head.layer) == len(IDS) * row_nbytes
