"""The requests that equality is tested with, and synthetic acceptance of their drafts."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_mtp.engine.request import Request
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.proposer import MTPProposer
from tests.harness import Driver, OracleProposer, Plain, greedy, request
from tests.tiny_models import VOCAB

EOS = 1
STEP = 16  # small, so that prompts are cut into several chunks

SAMPLED = (
    SamplingParams(max_tokens=20, temperature=1.0, seed=7),
    SamplingParams(max_tokens=17, temperature=0.7, top_k=8, top_p=0.9, seed=-3),
    SamplingParams(max_tokens=24, temperature=1.5, min_p=0.05, seed=2**62, frequency_penalty=0.8),
    SamplingParams(max_tokens=9, temperature=0.9, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(max_tokens=22, temperature=1.0, seed=7, choice=1, logit_bias=((5, 4.0),)),
)


def make_requests(sampled: bool) -> list[Request]:
    """Eight prompts, from one token to several chunks; a length of k + 1 for every k among them."""
    random = np.random.default_rng(11)
    lengths = (1, 2, 3, 4, 6, 17, 37, 16)
    requests = []
    for index, length in enumerate(lengths):
        sampling = SAMPLED[index % 5] if sampled else greedy(6 + 3 * index)
        requests.append(request(f"r{index}", random.integers(2, VOCAB, length), sampling))
    return requests


def proposer_for(acceptance: str, references: dict[str, Plain], requests: list[Request]):
    """None: the model's own head."""
    if acceptance == "head":
        return None
    answers = {
        r.request_id: (*r.prompt_token_ids, *references[r.request_id].tokens) for r in requests
    }
    rate = {"reject": 0.0, "force": 1.0, "mixed": 0.6}[acceptance]
    return OracleProposer(answers, VOCAB, rate)


def check_head_cache(driver: Driver, model: LoadedModel, name: str) -> None:
    """The head's KV of a running row is as if written in one go; the driver is run to its end."""
    batch = driver.runner.batches.decoding
    batch.draft_state.catch_up()
    row = [s.request_id for s in batch.sequences].index(name)
    held = int(batch.cache.offset[row].item())
    keys, values = (
        np.array(a) for a in (batch.draft_state.cache.keys, batch.draft_state.cache.values)
    )
    driver.run()
    prompt = next(s.prompt for s in batch.sequences if s.request_id == name)
    text = [*prompt, *driver.tokens(name)][: held + 1]
    proposer = MTPProposer(model)
    state = proposer.make_state(["reference"])
    proposer.propose(
        state,
        hidden=model.causal_lm.model(mx.array([text[:-1]])),
        targets=mx.array([text[1:]]),
        start=mx.array([0]),
        num_kept=mx.array([held]),
        num_draft_tokens=0,
        limit=held,
        sampler=batch.sampler,
    )
    state.catch_up()
    for ours, reference in ((keys, state.cache.keys), (values, state.cache.values)):
        ours, reference = ours[row, :, :held], np.array(reference[0, :, :held])
        np.testing.assert_allclose(ours, reference, atol=1e-3)
