"""The head's drafts from a reduced vocabulary."""

import pytest

from mlx_mtp.build import build_engine
from mlx_mtp.config import EngineConfig
from mlx_mtp.errors import UsageError
from mlx_mtp.speculative.drafter import MTPDrafter
from mlx_mtp.text.tokenizer import Tokenizer
from tests.conftest import DEMO
from tests.support.cases import EOS
from tests.support.harness import SamplingParams as Sampling
from tests.support.harness import Ties, greedy, plain, request
from tests.support.tiny_models import VOCAB
from tests.test_demo_model import DATA, drive
from tests.test_demo_model import EOS as DEMO_EOS
from tests.test_demo_model import VOCAB as DEMO_VOCAB


def test_acceptance_of_the_bundled_model_with_fewer_tokens(demo_model):
    """Greedy and sampled rows run together."""
    tokenizer = Tokenizer.load(DEMO)
    requests = []
    for number, each in enumerate(DATA["prompts"][:4]):
        sampled = Sampling(16, temperature=0.9, top_p=0.95, frequency_penalty=0.2, seed=number)
        sampling = greedy(16) if number % 2 else sampled
        requests.append(request(str(number), tokenizer.encode(each["prompt"]), sampling))
    answers = {r.request_id: plain(demo_model, r, DEMO_VOCAB, DEMO_EOS) for r in requests}

    def accepted(ids) -> int:
        driver, ties = drive(demo_model, requests, MTPDrafter(demo_model, ids)), Ties()
        for name, tokens in driver.run().items():
            ties.check(f"bundled model {name}", tokens, answers[name])
        return driver.core.scheduler.stats().num_accepted_tokens

    given = {token for answer in answers.values() for token in answer.tokens}
    everything = accepted(None)
    assert everything > 15
    assert accepted(range(DEMO_VOCAB)) == everything
    # Without the answers' tokens no draft can be right; with only these tokens most still are.
    assert accepted([i for i in range(DEMO_VOCAB) if i not in given]) == 0
    assert accepted(sorted(given)) > 0.9 * everything


def test_wrong_draft_ids_are_refused(tiny_models, caplog):
    caplog.set_level("INFO", logger="mlx_mtp")
    model = tiny_models["qwen3_5"]
    for ids, more, message in (
        ([], {}, "draft_ids names no token"),
        ([3, 96], {}, "token 96, but this model's token ids are 0 to 95"),
        ([True], {}, "token True"),
        ([4, 5, 4], {}, "token 4 twice"),
        ([1, 2], {"model": model.without_head()}, "doesn't draft here"),
        ([1, 2], {"drafter": object()}, "doesn't draft here"),
    ):
        given = {"model": model, "config": EngineConfig(), "draft_ids": ids} | more
        with pytest.raises(UsageError, match=message):
            build_engine(tokenizer_vocab_size=VOCAB, eos_token_ids=(EOS,), **given)
    build_engine(model, EngineConfig(), VOCAB, (EOS,), draft_ids=range(40, 60))
    assert "Drafts come from 20 of 96 tokens" in caplog.text
