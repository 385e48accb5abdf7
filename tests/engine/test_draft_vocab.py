"""A reduced draft vocabulary changes no token: what it lacks is only never drafted."""

from __future__ import annotations

import mlx.nn as nn
import numpy as np
import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.build import build_engine
from mlx_mtp.engine.calibration import fingerprint
from mlx_mtp.errors import UsageError
from mlx_mtp.models.draft_head import DraftHead
from mlx_mtp.models.loader import load_model
from mlx_mtp.server.tokenizer import Tokenizer
from mlx_mtp.speculative.proposer import MTPProposer
from tests.conftest import DEMO
from tests.engine.cases import EOS, STEP, make_requests
from tests.harness import Driver, Ties, greedy, plain, request
from tests.harness import SamplingParams as Sampling
from tests.test_demo_model import DATA, drive
from tests.test_demo_model import EOS as DEMO_EOS
from tests.test_demo_model import VOCAB as DEMO_VOCAB
from tests.tiny_models import FAMILIES, VOCAB, Layout, write_checkpoint


@pytest.fixture(scope="module")
def ties():
    found = Ties()
    yield found
    found.report("random models, reduced draft vocabulary")


LONG = [pytest.param(each, marks=pytest.mark.full) for each in ("tied", "4 bit")]


@pytest.fixture(scope="module", params=["own", "tied 4 bit", *LONG])
def lm_head(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, lm_head, tmp_path_factory):
    path = tmp_path_factory.mktemp("draft-vocab")
    write_checkpoint(path, Layout(request.param, tied="tied" in lm_head))
    model = load_model(path, enable_mtp=True)
    if "4 bit" in lm_head:
        ends = ("embed_tokens", "lm_head")
        nn.quantize(model.causal_lm, 32, 4, class_predicate=lambda path, _: path.endswith(ends))
    return model


def small_driver(model, ids=None, *, depth: int = 3) -> Driver:
    return Driver(
        model,
        vocab_size=VOCAB,
        stop_ids=(EOS,),
        config=EngineConfig(num_draft_tokens=depth, prefill_step_size=STEP),
        proposer=MTPProposer(model, None if ids is None else DraftHead(model, ids)),
    )


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_the_tokens_are_those_of_plain_decoding(model, lm_head, ties, sampled):
    """Penalties and bias among the sampled; rows join while others decode."""
    requests = make_requests(sampled)[:6]
    random = np.random.default_rng(5)
    references = {r.request_id: plain(model, r, VOCAB, (EOS,)) for r in requests}
    for ids in ([EOS], random.choice(VOCAB, VOCAB // 2, replace=False).tolist()):
        got = small_driver(model, ids).run_arrivals({0: requests[:3], 3: requests[3:]})
        for name, reference in references.items():
            ties.check(f"{lm_head}, {len(ids)} tokens, {name}", got[name], reference)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_a_vocabulary_of_all_tokens_drafts_the_same(model, sampled):
    """Also where a draft is accepted: each step keeps as many."""
    kept = []
    for ids in (None, range(VOCAB)):
        driver = small_driver(model, ids)
        driver.run_arrivals({0: make_requests(sampled)[:5]})
        kept.append(
            {n: [len(o.token_ids) for o in outputs] for n, outputs in driver.outputs.items()}
        )
    assert kept[0] == kept[1]


@pytest.fixture(scope="module")
def demo_requests():
    tokenizer = Tokenizer.load(DEMO)
    prompts = [tokenizer.encode(p["prompt"]) for p in DATA["prompts"][:6]]
    return [
        request(
            str(i),
            ids,
            greedy(16)
            if i % 2
            else Sampling(16, temperature=0.9, top_p=0.95, frequency_penalty=0.2, seed=i),
        )
        for i, ids in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def demo_answers(demo_model, demo_requests):
    return {r.request_id: plain(demo_model, r, DEMO_VOCAB, DEMO_EOS) for r in demo_requests}


def run_demo(model, requests, answers, ids) -> Driver:
    """Greedy and sampled rows together; checks the tokens."""
    head = None if ids is None else DraftHead(model, ids)
    driver = drive(model, requests, MTPProposer(model, head))
    got, ties = driver.run(), Ties()
    for name, reference in answers.items():
        ties.check(f"bundled model {name}", got[name], reference)
    return driver


def test_acceptance_of_the_bundled_model(demo_model, demo_requests, demo_answers):
    def accepted(ids) -> int:
        driver = run_demo(demo_model, demo_requests, demo_answers, ids)
        stats = driver.core.stats()
        assert stats.num_draft_tokens > 0
        return stats.num_accepted_tokens

    said = {token for answer in demo_answers.values() for token in answer.tokens}
    everything = accepted(None)
    assert everything > 20
    assert accepted(range(DEMO_VOCAB)) == everything
    # Without any token of the answers no draft can be right; with those alone most still are.
    assert accepted([i for i in range(DEMO_VOCAB) if i not in said]) == 0
    assert accepted(sorted(said)) > 0.9 * everything


def engine(model, draft_ids, **more):
    return build_engine(model, EngineConfig(), VOCAB, (EOS,), draft_ids=draft_ids, **more)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "draft_ids names no token"),
        ([3, 96], "token 96, but this model's token ids are 0 to 95"),
        ([-1], "token -1"),
        ([True], "token True"),
        ([4, 5, 4], "token 4 twice"),
    ],
)
def test_wrong_ids_are_refused(tiny_models, ids, message):
    with pytest.raises(UsageError, match=message):
        engine(tiny_models["qwen3_5"], ids)


def test_ids_without_a_head_that_drafts_are_refused(tiny_models, tmp_path):
    write_checkpoint(tmp_path, Layout("qwen3_5", with_head=False))
    with pytest.raises(UsageError, match="doesn't draft here"):
        engine(load_model(tmp_path, enable_mtp=False), [1, 2])
    model = tiny_models["qwen3_5"]
    with pytest.raises(UsageError, match="doesn't draft here"):
        engine(model, [1, 2], proposer=MTPProposer(model))


def test_the_log_tells_what_the_copy_takes(tiny_models, caplog):
    caplog.set_level("INFO", logger="mlx_mtp")
    engine(tiny_models["qwen3_5"], range(40, 60))
    assert "Drafts come from 20 of 96 tokens" in caplog.text
    assert "takes 0.0 MB" in caplog.text
    engine(tiny_models["qwen3_5"], range(96))
    assert "Drafts come from all 96 tokens" in caplog.text


def test_step_costs_are_kept_apart(tiny_models):
    """Those with fewer draft tokens are lower and must not be used without."""
    model = tiny_models["qwen3_5"]
    marks = {fingerprint(model), fingerprint(model, 20), fingerprint(model, 30)}
    assert len(marks) == 3
