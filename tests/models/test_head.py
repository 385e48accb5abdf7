"""The head's logits equal an independent NumPy head, at depths 1, 2 and 3, dense and MoE."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.models.loader import load_model
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.speculative.proposer import Computed, MTPProposer
from tests.harness import greedy
from tests.reference_head import ReferenceHead
from tests.tiny_models import FAMILIES, VOCAB, Layout, text_config, write_checkpoint

DEPTH = 3


class RecordingSampler(Sampler):
    """Keeps the draft logits on their way to the draw."""

    def __init__(self) -> None:
        super().__init__([greedy(1)], [()], VOCAB)
        self.seen: list[np.ndarray] = []
        self.positions: list[int] = []

    def draw(self, logits, positions, window, *, ids=None) -> mx.array:
        self.seen.append(np.array(logits[0, 0]))
        self.positions.append(int(positions[0, 0].item()))
        return super().draw(logits, positions, window, ids=ids)


@pytest.mark.parametrize("stacked", [False, True], ids=["experts-one-by-one", "experts-stacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_draft_logits_equal_the_reference(tmp_path, family, stacked):
    layout = Layout(family, stacked_experts=stacked, seed=5)
    tensors = write_checkpoint(tmp_path, layout)
    model = load_model(tmp_path, enable_mtp=True)
    tokens = np.random.default_rng(3).integers(2, VOCAB, 14)

    # Trunk: its post-norm hidden states of the prompt, which both heads start from.
    hidden = model.causal_lm.model(mx.array(tokens[None, :-1].astype(np.int32)))

    embed = next(k for k in tensors if k.endswith("embed_tokens.weight"))
    reference = ReferenceHead(tensors, text_config(layout), "mtp.", embed)
    expected = reference.drafts(np.array(hidden[0]), tokens[1:].tolist(), DEPTH)

    # Ours: the same rows in three windows of different lengths, the last with a rejected tail.
    proposer, sampler = MTPProposer(model), RecordingSampler()
    state = proposer.make_state(["a"])
    start = 0
    for length, kept in ((6, 6), (1, 1), (8, 6)):
        rows = [min(start + j, 12) for j in range(length)]
        window = Computed(
            hidden=hidden[:, mx.array(rows)],
            targets=mx.array([[int(tokens[r + 1]) for r in rows]]),
            start=mx.array([start]),
            num_kept=mx.array([kept]),
            limit=start + length,
        )
        proposer.propose(state, window, DEPTH, sampler)
        start += kept
    # Thirteen rows kept, so the next token is at 13 and the drafts, with its noise, follow it.
    assert sampler.positions[-DEPTH:] == [14, 15, 16]
    for ours, theirs in zip(sampler.seen[-DEPTH:], expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_the_reference_tells_a_wrong_head_from_a_right_one(tmp_path):
    """Guards the test above: each mistake it is meant to catch moves the logits far over 1e-4."""
    layout = Layout("qwen3_next", seed=5)
    tensors = write_checkpoint(tmp_path, layout)
    embed = "model.embed_tokens.weight"
    hidden = np.random.default_rng(0).standard_normal((5, 64))
    config = text_config(layout)
    right = ReferenceHead(tensors, config, "mtp.", embed).drafts(hidden, [4, 5, 6, 7, 8], 1)[0]
    spoiled = dict(tensors)
    for name in ("mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight"):
        spoiled[name] = tensors[name] - 1.0  # the 1 forgotten
        wrong = ReferenceHead(spoiled, config, "mtp.", embed).drafts(hidden, [4, 5, 6, 7, 8], 1)[0]
        assert np.abs(wrong - right).max() > 1e-2
        spoiled[name] = tensors[name]
    swapped = tensors["mtp.fc.weight"]
    spoiled["mtp.fc.weight"] = np.concatenate([swapped[:, 64:], swapped[:, :64]], axis=1)
    wrong = ReferenceHead(spoiled, config, "mtp.", embed).drafts(hidden, [4, 5, 6, 7, 8], 1)[0]
    assert np.abs(wrong - right).max() > 1e-2
