"""Where drafts come from: sources by name, and a reduced draft vocabulary."""

import pytest

from mlx_mtp.build import build_engine
from mlx_mtp.config import EngineConfig
from mlx_mtp.errors import UsageError
from mlx_mtp.models.model import DraftHead
from mlx_mtp.speculative.draft_sources import SOURCES
from mlx_mtp.speculative.drafter import MTPDrafter
from mlx_mtp.text.tokenizer import Tokenizer
from tests.conftest import DEMO
from tests.engine.cases import EOS, make_requests, proposer_for
from tests.engine.test_engine import Client
from tests.harness import SamplingParams as Sampling
from tests.harness import Ties, greedy, plain, request
from tests.test_demo_model import DATA, drive
from tests.test_demo_model import EOS as DEMO_EOS
from tests.test_demo_model import VOCAB as DEMO_VOCAB
from tests.tiny_models import VOCAB


@pytest.mark.parametrize("depth", [2, "auto"])
def test_another_source_drafts_without_a_head(tiny_models, references, monkeypatch, depth):
    """A source is a factory and a line in `SOURCES`; prefixes from the cache are used with it."""
    model, requests = tiny_models["qwen3_next"].without_head(), make_requests("sampled")
    reference = references("qwen3_next", "sampled")
    oracle = proposer_for("mixed", model, reference, requests)
    monkeypatch.setitem(SOURCES, "oracle", lambda model, draft_ids: oracle)
    config = EngineConfig(
        num_draft_tokens=depth, draft_source="oracle", prefix_cache_size=1 << 30, max_num_seqs=4
    )
    client = Client(build_engine(model, config, VOCAB, (EOS,)))
    assert client.engine.info.mtp_enabled
    for _ in range(2):
        client.outputs.clear()
        for each in requests:
            client.engine.submit(each)
        client.wait(*(each.request_id for each in requests))
        for name, expected in reference.items():
            assert tuple(client.tokens(name)) == expected.tokens
    stats = client.engine.stats()
    client.engine.stop()
    assert stats.num_accepted_tokens > 0
    assert stats.prefix_cache.hits > 0


def test_acceptance_of_the_bundled_model_with_fewer_tokens(demo_model):
    """Greedy and sampled rows together."""
    tokenizer = Tokenizer.load(DEMO)
    requests = []
    for number, each in enumerate(DATA["prompts"][:4]):
        sampled = Sampling(16, temperature=0.9, top_p=0.95, frequency_penalty=0.2, seed=number)
        sampling = greedy(16) if number % 2 else sampled
        requests.append(request(str(number), tokenizer.encode(each["prompt"]), sampling))
    answers = {r.request_id: plain(demo_model, r, DEMO_VOCAB, DEMO_EOS) for r in requests}

    def accepted(ids) -> int:
        head = None if ids is None else DraftHead(demo_model, ids)
        driver, ties = drive(demo_model, requests, MTPDrafter(demo_model, head)), Ties()
        for name, tokens in driver.run().items():
            ties.check(f"bundled model {name}", tokens, answers[name])
        return driver.core.scheduler.stats().num_accepted_tokens

    given = {token for answer in answers.values() for token in answer.tokens}
    everything = accepted(None)
    assert everything > 15
    assert accepted(range(DEMO_VOCAB)) == everything
    # Without any token of the answers no draft can be right; with those alone most still are.
    assert accepted([i for i in range(DEMO_VOCAB) if i not in given]) == 0
    assert accepted(sorted(given)) > 0.9 * everything


def test_wrong_draft_ids_and_sources_are_refused(tiny_models, caplog):
    caplog.set_level("INFO", logger="mlx_mtp")
    model = tiny_models["qwen3_5"]
    for ids, more, message in (
        ([], {}, "draft_ids names no token"),
        ([3, 96], {}, "token 96, but this model's token ids are 0 to 95"),
        ([True], {}, "token True"),
        ([4, 5, 4], {}, "token 4 twice"),
        ([1, 2], {"model": model.without_head()}, "doesn't draft here"),
        ([1, 2], {"proposer": object()}, "doesn't draft here"),
        (None, {"config": EngineConfig(draft_source="magic")}, "'magic'; it must be one of mtp"),
    ):
        given = {"model": model, "config": EngineConfig(), "draft_ids": ids} | more
        with pytest.raises(UsageError, match=message):
            build_engine(tokenizer_vocab_size=VOCAB, eos_token_ids=(EOS,), **given)
    build_engine(model, EngineConfig(), VOCAB, (EOS,), draft_ids=range(40, 60))
    assert "Drafts come from 20 of 96 tokens" in caplog.text
