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


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X > statistic), by Wilson and Hilferty's cube-root normal approximation."""
    scaled, spread = (statistic / freedom) ** (1 / 3), 2 / (9 * freedom)
    return 0.5 * math.erfc((scaled - (1 - spread)) / math.sqrt(2 * spread))


def test_second_tokens_follow_the_exact_distribution(tiny_models):
    """Many requests with one prompt. The second token is drawn in a verify window; it is grouped
    by the first, so that every draw of a group has the same prefix."""
    model = tiny_models["qwen3_5"]
    driver = Driver(
        model,
        vocab_size=VOCAB,
        config=EngineConfig(num_draft_tokens=2, max_num_seqs=256, prefill_step_size=768),
    )
    for seed in range(DRAWS):
        sampling = SamplingParams(
            max_tokens=2, temperature=1.0, top_k=TOP_K, top_p=TOP_P, seed=seed
        )
        driver.add(request(str(seed), PROMPT, sampling))
    pairs = np.array(list(driver.run().values()))
    assert pairs.shape == (DRAWS, 2)
    assert driver.core.stats().num_draft_tokens >= DRAWS

    first = exact(np.array(model.model(mx.array([PROMPT]))[0, -1]))
    statistic, freedom = compare(np.bincount(pairs[:, 0], minlength=VOCAB), first)
    assert chi_square_tail(statistic, freedom) > 1e-3
    total, cells = 0.0, 0
    for token in np.flatnonzero(first):
        after = exact(np.array(model.model(mx.array([(*PROMPT, int(token))]))[0, -1]))
        counts = np.bincount(pairs[pairs[:, 0] == token, 1], minlength=VOCAB)
        statistic, freedom = compare(counts, after)
        total, cells = total + statistic, cells + freedom
    assert cells >= 5
    assert chi_square_tail(total, cells) > 1e-3


def compare(counts: np.ndarray, probability: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; nothing may fall outside the support."""
    assert counts[probability == 0].sum() == 0
    support = probability > 0
    expected = counts.sum() * probability[support]
    return float(((counts[support] - expected) ** 2 / expected).sum()), int(support.sum()) - 1
