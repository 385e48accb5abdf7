"""Windows of few rows are run as windows of 8 on CUDA; what is added must change nothing."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.config import EngineConfig
from tests.engine.cases import EOS, make_requests
from tests.harness import Driver, Ties
from tests.tiny_models import VOCAB


@pytest.fixture
def filling(tiny_models):
    """A dense model that takes itself for a quantized one on CUDA."""
    return dataclasses.replace(tiny_models["qwen3_5"], slow_few_rows=True)


def test_what_is_run_as_what(filling, tiny_models):
    lengths = {(b, t): filling.window_length(b, t) for b in range(1, 9) for t in range(1, 9)}
    for (batch, length), run in lengths.items():
        rows = batch * length
        assert run >= length
        assert run == length if not 4 <= rows < 8 else batch * run >= 8
        assert tiny_models["qwen3_5"].window_length(batch, length) == length


def test_logits_of_few_rows_are_those_rows(filling, tiny_models):
    size = filling.causal_lm.args.hidden_size
    hidden = mx.random.normal((3, 2, size), key=mx.random.key(0))
    expected = tiny_models["qwen3_5"].logits(hidden)
    np.testing.assert_allclose(
        np.array(filling.logits(hidden)), np.array(expected), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_tokens_equal_plain_decoding(filling, references, depth, sampled):
    reference = references("qwen3_5", sampled)
    requests = make_requests(sampled)
    driver = Driver(
        filling,
        vocab_size=VOCAB,
        stop_ids=(EOS,),
        config=EngineConfig(num_draft_tokens=depth, prefill_step_size=4),
    )
    # Prompts of a few tokens and rows that come and go: every number of rows from 1 to 6.
    got = driver.run_arrivals({3 * i: [r] for i, r in enumerate(requests[:6])})
    ties = Ties()
    for name, tokens in got.items():
        ties.check(f"few rows k={depth} {name}", tokens, reference[name])
