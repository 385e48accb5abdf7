"""Scores equal NumPy's in any batch; noise, joins of rows, reduced vocabularies, ranges."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_mtp.errors import InvalidRequestError
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.sampler import Sampler, keyed_gumbel
from tests.support.harness import slow_scores

VOCAB = 40

params = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    repetition_context_size=st.sampled_from([0, 1, 2, 6, 2**31]),
    allowed_token_ids=st.sampled_from([None, (5,), (3, 4, 5), tuple(range(2, VOCAB))]),
    min_tokens=st.sampled_from([0, 5, 6, 2**31]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 1.1]),
    logit_bias=st.sampled_from([(), ((3, 2.5), (7, -100.0))]),
    seed=st.integers(-(2**63), 2**63 - 1),
    choice=st.integers(0, 3),
)


@settings(max_examples=60)
@given(rows=st.lists(params, min_size=1, max_size=4), seed=st.integers(0, 999))
def test_a_window_of_a_mixed_batch_equals_each_position_alone(rows, seed):
    """Penalties count the drafts before each position."""
    random = np.random.default_rng(seed)
    length = int(random.integers(1, 5))
    prompts = [random.integers(0, VOCAB, random.integers(1, 99)).tolist() for _ in rows]
    stops = [random.integers(3, 7, random.integers(0, 9)).tolist() for _ in rows]
    outputs = [random.integers(0, VOCAB, 4).tolist() for _ in rows]
    drafts = random.integers(0, VOCAB, (len(rows), length - 1))
    logits = (3 * random.standard_normal((len(rows), length, VOCAB + 6))).astype(np.float32)
    logits[..., VOCAB:] = 99.0  # padding of the vocabulary, which must not be drawn
    begin = np.array([[len(prompt)] for prompt in prompts])

    sampler = Sampler(rows, prompts, VOCAB, stops)
    # Only the first of the tokens drawn last is kept.
    drawn = np.concatenate([outputs, random.integers(0, VOCAB, (len(rows), 2))], axis=1)
    for first, last, kept in ((0, 3, 3), (3, 6, 1)):
        at = mx.array(begin + np.arange(first, last))
        sampler.count_sampled(mx.array(drawn[:, first:last]), mx.array([kept] * len(rows)), at)
    window = np.concatenate([np.array(outputs)[:, -1:], drafts], axis=1)
    positions = begin + 4 + np.arange(length)
    scores = np.array(sampler.scores(mx.array(logits), mx.array(positions), mx.array(window)))
    assert scores.shape == (len(rows), length, VOCAB)
    for row, p in enumerate(rows):
        for j in range(length):
            output = [*outputs[row], *drafts[row, :j].tolist()]
            expected = slow_scores(p, logits[row, j, :VOCAB], prompts[row], output, stops[row])
            np.testing.assert_allclose(scores[row, j], expected, atol=2e-4)


def test_noise_of_a_row_is_that_of_the_single_call():
    """The noise equals that of mlx's generator bit for bit, also for only some of the tokens."""
    seeds, positions = mx.array([5, 2**32 - 1], dtype=mx.uint32), mx.array([[3, 4], [70000, 0]])
    for vocab in (7, 4096):
        noise = keyed_gumbel(seeds, positions, vocab)
        for row, seed in enumerate([5, 2**32 - 1]):
            for j in range(2):
                key = mx.array([seed, int(positions[row, j].item())], dtype=mx.uint32)
                assert mx.array_equal(noise[row, j], mx.random.gumbel((vocab,), key=key))
        assert len({np.array(noise[b, t]).tobytes() for b in range(2) for t in range(2)}) == 4
        ids = mx.array([0, 2, vocab - 1])
        assert mx.array_equal(keyed_gumbel(seeds, positions, vocab, ids), noise[..., ids])


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 5e-324])
def test_a_vanishing_temperature_is_greedy(temperature):
    logits = mx.array([[[1.0, 5.0, 4.999, *[0.0] * (VOCAB - 3)]]])
    sampler = Sampler([SamplingParams(max_tokens=1, temperature=temperature)], [[1]], VOCAB)
    assert sampler.draw(logits, mx.array([[3]]), mx.array([[1]])).tolist() == [[1]]


def test_logprobs_are_of_the_unprocessed_distribution():
    row = SamplingParams(
        max_tokens=1, temperature=0.3, top_k=1, logit_bias=((3, 50.0),), top_logprobs=4
    )
    plain = SamplingParams(max_tokens=1)
    logits = np.random.default_rng(1).standard_normal((2, 2, VOCAB + 2)).astype(np.float32)
    tokens = np.array([[3, 5], [7, 9]])
    sampler = Sampler([row, plain], [[1], [1]], VOCAB)
    found = sampler.logprobs(mx.array(logits), mx.array(tokens))
    expected = logits[..., :VOCAB] - np.log(np.exp(logits[..., :VOCAB]).sum(-1, keepdims=True))
    best = np.argsort(-expected, axis=-1)[..., :4]
    chosen = np.take_along_axis(expected, tokens[..., None], -1)[..., 0]
    np.testing.assert_array_equal(found[1], best)
    for ours, true in ((found[0], chosen), (found[2], np.take_along_axis(expected, best, -1))):
        np.testing.assert_allclose(np.array(ours), true, atol=1e-5)
    assert Sampler([plain], [[1]], VOCAB).logprobs(mx.array(logits), mx.array(tokens)) is None
    every = Sampler([SamplingParams(max_tokens=1, top_logprobs=20)], [[1]], 7)
    _, ids, _ = every.logprobs(mx.array(logits[:1]), mx.array(tokens[:1] % 7))
    assert sorted(ids[0, 0].tolist()) == list(range(7))


@pytest.mark.parametrize("penalised", [0, 1, 2])
def test_selecting_and_joining_rows_keeps_their_counts(penalised):
    """Rows without penalties get zero tables beside rows with tables, and drop them afterwards."""
    with_tables = SamplingParams(
        max_tokens=9,
        repetition_penalty=2.0,
        repetition_context_size=5,
        frequency_penalty=1.0,
        min_tokens=9,
        stop_token_ids=(7,),
    )
    rows = [with_tables if i == penalised else SamplingParams(max_tokens=9) for i in range(3)]
    whole = Sampler(rows, [[1], [2], [3]], VOCAB)
    tokens, counts = mx.array([[4, 5], [4, 4], [6, 4]]), mx.array([1, 2, 2])
    at = mx.array([[1, 2]] * 3)
    whole.count_sampled(tokens, counts, at)
    joined, *others = [Sampler(rows[i : i + 1], [[i + 1]], VOCAB) for i in range(3)]
    for i, part in enumerate((joined, *others)):
        part.count_sampled(tokens[i : i + 1], counts[i : i + 1], at[:1])
    for other in others:
        joined.extend(other)
    given = mx.ones((3, 1, VOCAB)), mx.array([[7]] * 3), mx.array([[1]] * 3)
    expected = whole.scores(*given)
    assert mx.array_equal(joined.scores(*given), expected)
    selected = whole.select([2, 0])
    assert mx.array_equal(selected.scores(*(a[:2] for a in given)), expected[mx.array([2, 0])])
    assert (selected.counts is None) == (penalised == 1)


@settings(max_examples=100)
@given(
    rows=st.lists(params, min_size=1, max_size=4),
    seed=st.integers(0, 999),
    num_ids=st.integers(1, VOCAB),
    num_drafts=st.integers(0, 3),
)
@example(
    rows=[SamplingParams(9, top_p=0.9, presence_penalty=0.7)], seed=0, num_ids=40, num_drafts=1
)
def test_a_reduced_draw_is_that_from_all_had_the_others_no_chance(rows, seed, num_ids, num_drafts):
    random = np.random.default_rng(seed)
    sampler = Sampler(rows, [random.integers(0, VOCAB, 3).tolist() for _ in rows], VOCAB)
    outputs = random.integers(0, VOCAB, (len(rows), 4))
    sampler.count_sampled(
        mx.array(outputs), mx.array([4] * len(rows)), mx.array([[3, 4, 5, 6]] * len(rows))
    )
    ids = np.sort(random.choice(VOCAB, num_ids, replace=False)).astype(np.int32)
    drafts = random.integers(0, VOCAB, (len(rows), num_drafts))
    window = mx.array(np.concatenate([outputs[:, -1:], drafts], axis=1).astype(np.int32))
    positions = mx.full((len(rows), 1), 7 + num_drafts)
    logits = (3 * random.standard_normal((len(rows), 1, num_ids))).astype(np.float32)
    wide = np.full((len(rows), 1, VOCAB), -np.inf, dtype=np.float32)
    wide[..., ids] = logits

    some = {"ids": mx.array(ids)}
    scores = np.array(sampler.scores(mx.array(logits), positions, window, **some))
    expected = np.array(sampler.scores(mx.array(wide), positions, window))[..., ids]
    # The sums for top_p have other lengths, so that a cut can fall on a rounding tie.
    cut = np.isfinite(scores) != np.isfinite(expected)
    assert cut.sum() <= (num_ids < VOCAB)
    np.testing.assert_array_equal(scores[~cut], expected[~cut])
    drawn = sampler.draw(mx.array(logits), positions, window, **some)
    assert drawn.dtype == mx.int32
    # If no token of `ids` is allowed, any draw will do: no draft can be accepted there.
    if not cut.any() and np.isfinite(scores).any(axis=-1).all():
        assert mx.array_equal(drawn, sampler.draw(mx.array(wide), positions, window))


@pytest.mark.parametrize(
    ("field", "wrong", "limits"),
    [
        ("max_tokens", (-1, 2**40), (0, 1)),
        ("temperature", (-0.1, float("nan"), float("inf")), (0.0,)),
        ("top_p", (0.0, 1.1), (1.0,)),
        ("top_k", (-1,), (0,)),
        ("min_p", (-0.1, 1.5), (0.0, 1.0)),
        ("repetition_penalty", (0.0, 1e-45), (0.01,)),
        ("repetition_context_size", (-1, 2**40), (0,)),
        ("min_tokens", (-1, 2**40), (0, 9)),
        ("allowed_token_ids", ((), (VOCAB,), (1,) * 70_000), ((0, VOCAB - 1),)),
        ("presence_penalty", (2.5,), (-2.0, 2.0)),
        ("frequency_penalty", (-2.5,), (-2.0, 2.0)),
        ("seed", (2**63, -(2**63) - 1), (2**63 - 1, -(2**63))),
        ("top_logprobs", (21, -1), (0, 20)),
        ("prompt_logprobs", (21, -1), (0, 20)),
        ("logit_bias", (((VOCAB, 1.0),), ((-1, 1.0),), ((2**40, 1.0),)), (((VOCAB - 1, -100.0),),)),
        ("logit_bias", (((1, 101.0),), ((1, float("nan")),), ((1, 0.0),) * 2000), (((1, 100.0),),)),
        ("stop_token_ids", ((VOCAB,), tuple(range(65))), ((0, VOCAB - 1),)),
    ],
)
def test_out_of_range_names_the_field(field, wrong, limits):
    for value in wrong:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{"max_tokens": 5, field: value}).validate(VOCAB)
        assert caught.value.param == field
    for value in limits:
        SamplingParams(**{"max_tokens": 5, field: value}).validate(VOCAB)


def test_choices_and_seeds_have_noise_of_their_own():
    seeds = [0, 1, -1, 2**32, 2**32 + 1, 2**63 - 1, -(2**63)]
    words = {
        SamplingParams(max_tokens=1, seed=s, choice=c).noise_seed() for s in seeds for c in range(4)
    }
    assert len(words) == len(seeds) * 4
    assert all(0 <= w < 2**32 for w in words)
