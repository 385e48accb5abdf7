"""Processing against NumPy, rows independent of their neighbours, windows equal to single steps."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.sampling.noise import keyed_gumbel
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.processors import truncate
from mlx_mtp.sampling.sampler import Sampler

VOCAB = 40

params = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 1.1]),
    logit_bias=st.sampled_from([(), ((3, 2.5), (7, -100.0))]),
    seed=st.integers(-(2**63), 2**63 - 1),
    choice=st.integers(0, 3),
)


def numpy_scores(p: SamplingParams, logits, prompt, output, position) -> np.ndarray:
    """The same pipeline for one row and position, written out in float64."""
    x = logits.astype(np.float64).copy()
    counts = np.bincount(np.array(output, dtype=int), minlength=VOCAB)
    for token in set(prompt) | set(output):
        x[token] = (
            x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        )
    x -= p.presence_penalty * (counts > 0) + p.frequency_penalty * counts
    for token, value in p.logit_bias:
        x[token] += value
    if p.temperature == 0:
        return x
    x /= p.temperature
    if p.top_k:
        kth = np.sort(x)[::-1][min(p.top_k, VOCAB) - 1]
        x[x < kth] = -np.inf
    if p.top_p < 1:
        order = np.argsort(-x)
        e = np.exp(x[order] - x.max())
        before = np.cumsum(e / e.sum()) - e / e.sum()
        last = x[order][before < p.top_p][-1]
        x[x < last] = -np.inf
    if p.min_p:
        x[x < x.max() + np.log(p.min_p)] = -np.inf
    key = mx.array([p.noise_seed(), position], dtype=mx.uint32)
    return x + np.array(mx.random.gumbel((VOCAB,), key=key))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(params, min_size=1, max_size=4), seed=st.integers(0, 999))
def test_a_window_of_a_mixed_batch_equals_each_position_alone(rows, seed):
    random = np.random.default_rng(seed)
    length = int(random.integers(1, 5))
    prompts = [random.integers(0, VOCAB, 3).tolist() for _ in rows]
    outputs = [random.integers(0, VOCAB, 4).tolist() for _ in rows]
    drafts = random.integers(0, VOCAB, (len(rows), length - 1))
    logits = (3 * random.standard_normal((len(rows), length, VOCAB + 6))).astype(np.float32)
    logits[..., VOCAB:] = 99.0  # padding of the vocabulary, never to be drawn
    start = random.integers(0, 1000, len(rows))

    sampler = Sampler(rows, prompts, VOCAB)
    sampler.count(mx.array(np.array(outputs)), mx.array([4] * len(rows)))
    window = np.concatenate([np.array(outputs)[:, -1:], drafts], axis=1)
    positions = start[:, None] + np.arange(length)
    scores = sampler.scores(mx.array(logits), mx.array(positions), mx.array(window))
    assert scores.shape == (len(rows), length, VOCAB)
    for row, p in enumerate(rows):
        for j in range(length):
            output = [*outputs[row], *drafts[row, :j].tolist()]
            expected = numpy_scores(
                p, logits[row, j, :VOCAB], prompts[row], output, int(positions[row, j])
            )
            got = np.array(scores[row, j])
            finite = np.isfinite(expected)
            assert (np.isfinite(got) == finite).mean() > 0.97  # a cut may fall on a rounding tie
            both = finite & np.isfinite(got)
            np.testing.assert_allclose(got[both], expected[both], atol=2e-4)


def test_noise_of_a_row_is_that_of_the_single_call():
    seeds, positions = mx.array([5, 2**32 - 1], dtype=mx.uint32), mx.array([[3, 4], [70000, 0]])
    noise = np.array(keyed_gumbel(seeds, positions, 16))
    for row, seed in enumerate([5, 2**32 - 1]):
        for j in range(2):
            key = mx.array([seed, int(positions[row, j].item())], dtype=mx.uint32)
            np.testing.assert_array_equal(noise[row, j], np.array(mx.random.gumbel((16,), key=key)))
    assert len({n.tobytes() for n in noise.reshape(-1, 16)}) == 4


def test_neutral_rows_are_left_bit_for_bit():
    logits = mx.array(np.random.default_rng(0).standard_normal((2, 3, VOCAB)).astype(np.float32))
    column = [[[VOCAB]], [[VOCAB]]], [[[1.0]], [[1.0]]], [[[0.0]], [[0.0]]]
    got = truncate(logits, *(mx.array(c) for c in column))
    np.testing.assert_array_equal(np.array(got), np.array(logits))


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 5e-324])
def test_a_vanishing_temperature_is_greedy(temperature):
    logits = mx.array([[[1.0, 5.0, 4.999, *[0.0] * (VOCAB - 3)]]])
    sampler = Sampler([SamplingParams(max_tokens=1, temperature=temperature)], [[1]], VOCAB)
    assert sampler.draw(logits, mx.array([[3]]), mx.array([[1]])).tolist() == [[1]]


def test_ties_at_a_cut_are_all_kept():
    logits = mx.array([[[1.0, 2.0, 2.0, 2.0, 0.0]]])
    got = truncate(logits, mx.array([[[2]]]), mx.array([[[1.0]]]), mx.array([[[0.0]]]))
    assert np.isfinite(np.array(got)).tolist() == [[[False, True, True, True, False]]]


def test_logprobs_are_of_the_unprocessed_distribution():
    row = SamplingParams(
        max_tokens=1, temperature=0.3, top_k=1, logit_bias=((3, 50.0),), top_logprobs=4
    )
    plain_row = SamplingParams(max_tokens=1)
    logits = np.random.default_rng(1).standard_normal((2, 2, VOCAB + 2)).astype(np.float32)
    sampler = Sampler([row, plain_row], [[1], [1]], VOCAB)
    tokens = mx.array([[3, 5], [7, 9]])
    chosen, ids, values = (np.array(a) for a in sampler.logprobs(mx.array(logits), tokens))
    expected = logits[..., :VOCAB] - np.log(np.exp(logits[..., :VOCAB]).sum(-1, keepdims=True))
    picked = np.take_along_axis(expected, np.array(tokens)[..., None], -1)[..., 0]
    np.testing.assert_allclose(chosen, picked, atol=1e-5)
    np.testing.assert_array_equal(ids, np.argsort(-expected, axis=-1)[..., :4])
    np.testing.assert_allclose(values, np.take_along_axis(expected, ids, -1), atol=1e-5)
    assert Sampler([plain_row], [[1]], VOCAB).logprobs(mx.array(logits[:1]), tokens[:1]) is None


@pytest.mark.parametrize("penalised", [0, 1, 2])
def test_taking_and_joining_rows_keeps_their_counts(penalised):
    """Rows without penalties get zero tables when they join rows with them, and lose them after."""
    rows = [
        SamplingParams(max_tokens=9, frequency_penalty=1.0 if i == penalised else 0.0)
        for i in range(3)
    ]
    whole = Sampler(rows, [[1], [2], [3]], VOCAB)
    tokens = mx.array([[4, 5], [4, 4], [6, 4]])
    whole.count(tokens, mx.array([1, 2, 2]))
    parts = [Sampler(rows[i : i + 1], [[i + 1]], VOCAB) for i in range(3)]
    for i, part in enumerate(parts):
        part.count(tokens[i : i + 1], mx.array([[1, 2, 2][i]]))
    joined = parts[0]
    joined.extend(parts[1])
    joined.extend(parts[2])
    logits = mx.zeros((3, 1, VOCAB))
    args = mx.array([[7]] * 3), mx.array([[1]] * 3)
    expected = np.array(whole.scores(logits, *args))
    np.testing.assert_array_equal(np.array(joined.scores(logits, *args)), expected)
    taken = whole.take([2, 0])
    np.testing.assert_array_equal(
        np.array(taken.scores(logits[:2], args[0][:2], args[1][:2])), expected[[2, 0]]
    )
    assert (taken.output_counts is None) == (penalised == 1)
