"""Sampled output is distributed as it should be, with MTP on."""

import math

import mlx.core as mx
import numpy as np

from mlx_mtp.config import EngineConfig
from mlx_mtp.sampling.params import SamplingParams
from tests.harness import Driver, request
from tests.tiny_models import VOCAB

DRAWS = 4_000
PROMPT = (5, 9, 31)
TOP_K, TOP_P = 12, 0.95


def exact(logits: np.ndarray) -> np.ndarray:
    """top_k, then top_p of what it leaves, then renormalised."""
    x = np.where(logits >= np.sort(logits)[-TOP_K], logits.astype(np.float64), -np.inf)
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= TOP_P]] = 0.0
    return p / p.sum()


def test_second_tokens_follow_the_exact_distribution(tiny_models):
    """Many requests with one prompt; the second token is drawn in a verify window."""
    model = tiny_models["qwen3_5"]
    config = EngineConfig(num_draft_tokens=2, max_num_seqs=256, prefill_step_size=768)
    driver = Driver(model, vocab_size=VOCAB, config=config)
    for seed in range(DRAWS):
        sampling = SamplingParams(2, temperature=1.0, top_k=TOP_K, top_p=TOP_P, seed=seed)
        driver.add(request(str(seed), PROMPT, sampling))
    pairs = np.array(list(driver.run().values()))
    assert driver.core.stats().num_draft_tokens >= DRAWS

    def after(*tokens: int) -> np.ndarray:
        return exact(np.array(model.model(mx.array([(*PROMPT, *tokens)]))[0, -1]))

    # Of first tokens, and of second ones grouped by the first: Pearson's statistic has the mean
    # and half the variance of its degrees of freedom.
    first = after()
    groups = [(pairs[:, 0], first)]
    groups += [(pairs[pairs[:, 0] == t, 1], after(int(t))) for t in np.flatnonzero(first)]
    statistic, freedom = 0.0, 0
    for tokens, probability in groups:
        counts, support = np.bincount(tokens, minlength=VOCAB), probability > 0
        assert counts[~support].sum() == 0
        expected = len(tokens) * probability[support]
        statistic += float(((counts[support] - expected) ** 2 / expected).sum())
        freedom += int(support.sum()) - 1
    assert freedom >= 5
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
