"""Drawing from some tokens alone: the draw from all of them, had the others no chance."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.sampling.noise import keyed_gumbel
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.sampler import Sampler
from tests.sampling.test_sampler import VOCAB, params


def sampler_of(rows, random) -> tuple[Sampler, mx.array]:
    """With an output of four tokens each, and its last token."""
    sampler = Sampler(rows, [random.integers(0, VOCAB, 3).tolist() for _ in rows], VOCAB)
    outputs = random.integers(0, VOCAB, (len(rows), 4))
    sampler.count(mx.array(outputs), mx.array([4] * len(rows)))
    return sampler, mx.array(outputs[:, -1:].astype(np.int32))


def scattered(logits: np.ndarray, ids: np.ndarray) -> mx.array:
    """The slow way: all V tokens, minus infinity for those that may not be drawn."""
    wide = np.full((*logits.shape[:2], VOCAB), -np.inf, dtype=np.float32)
    wide[..., ids] = logits
    return mx.array(wide)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(params, min_size=1, max_size=4),
    seed=st.integers(0, 999),
    num_ids=st.integers(1, VOCAB),
    num_drafts=st.integers(0, 3),
)
def test_a_reduced_draw_is_the_scattered_one(rows, seed, num_ids, num_drafts):
    random = np.random.default_rng(seed)
    sampler, last = sampler_of(rows, random)
    ids = np.sort(random.choice(VOCAB, num_ids, replace=False)).astype(np.int32)
    drafts = random.integers(0, VOCAB, (len(rows), num_drafts)).astype(np.int32)
    window = mx.concatenate([last, mx.array(drafts)], axis=1)
    positions = mx.array(random.integers(0, 1000, (len(rows), 1)).astype(np.int32))
    logits = (3 * random.standard_normal((len(rows), 1, num_ids))).astype(np.float32)

    scores = np.array(sampler.scores(mx.array(logits), positions, window, ids=mx.array(ids)))
    expected = np.array(sampler.scores(scattered(logits, ids), positions, window))[..., ids]
    # The sums behind top_p have other lengths: a cut may fall on a rounding tie.
    cut = np.isfinite(scores) != np.isfinite(expected)
    assert cut.mean() <= 0.03 or cut.sum() == 1
    both = np.isfinite(scores) & np.isfinite(expected)
    np.testing.assert_array_equal(scores[both], expected[both])

    drawn = np.array(sampler.draw(mx.array(logits), positions, window, ids=mx.array(ids)))
    assert drawn.dtype == np.int32
    assert np.isin(drawn, ids).all()
    if not cut.any():
        slow = np.array(sampler.draw(scattered(logits, ids), positions, window))
        np.testing.assert_array_equal(drawn, slow)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(params, min_size=1, max_size=4), seed=st.integers(0, 999))
def test_all_ids_change_nothing(rows, seed):
    random = np.random.default_rng(seed)
    sampler, last = sampler_of(rows, random)
    positions = mx.array(random.integers(0, 1000, (len(rows), 1)).astype(np.int32))
    logits = mx.array((3 * random.standard_normal((len(rows), 1, VOCAB))).astype(np.float32))
    every = mx.arange(VOCAB)
    whole = sampler.scores(logits, positions, last)
    assert mx.array_equal(sampler.scores(logits, positions, last, ids=every), whole)
    assert mx.array_equal(
        sampler.draw(logits, positions, last, ids=every), sampler.draw(logits, positions, last)
    )


@pytest.mark.parametrize("vocab", [7, VOCAB, 4096])
def test_each_token_has_the_noise_it_has_among_all(vocab):
    """Bit for bit that of mlx's own generator, or drafts would be drawn with another noise."""
    seeds = mx.array([3, 2**32 - 1], dtype=mx.uint32)
    positions = mx.array([[0, 5], [900, 901]], dtype=mx.int32)
    every = keyed_gumbel(seeds, positions, vocab)
    key = mx.array([2**32 - 1, 900], dtype=mx.uint32)
    assert mx.array_equal(every[1, 0], mx.random.gumbel((vocab,), key=key))
    ids = mx.array([0, 2, vocab - 1])
    assert mx.array_equal(keyed_gumbel(seeds, positions, vocab, ids), every[..., ids])


def test_equal_logits_give_the_lowest_id():
    sampler = Sampler([SamplingParams(max_tokens=1, temperature=0.0)], [[1]], VOCAB)
    last = mx.zeros((1, 1), dtype=mx.int32)
    drawn = sampler.draw(mx.zeros((1, 1, 3)), last, last, ids=mx.array([4, 9, 30]))
    assert drawn.item() == 4
