"""The bundled model: MTP changes no token of it, its head is right, and its answers hold."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.server.tokenizer import Tokenizer
from mlx_mtp.speculative.proposer import MTPProposer
from tests.conftest import DEMO
from tests.harness import MEASURED, Driver, OracleProposer, Ties, greedy, plain, request
from tests.harness import SamplingParams as Sampling

DATA = json.loads((Path(__file__).parent / "data" / "demo_prompts.json").read_text())
FIGURES = json.loads((DEMO / "metrics.json").read_text())["eval"]
EOS = (4089, 4087)
VOCAB = 4096


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


def drive(model, wanted, proposer=None, **settings) -> Driver:
    driver = Driver(
        model,
        vocab_size=VOCAB,
        stop_ids=EOS,
        config=EngineConfig(**{"num_draft_tokens": 3, "max_num_seqs": 16, **settings}),
        proposer=proposer,
    )
    for each in wanted:
        driver.add(each)
    return driver


def prompts(tokenizer: Tokenizer, count: int | None = None) -> list[list[int]]:
    """Held-out prompts of the trainer's generator, all 39 tasks in turn."""
    return [tokenizer.encode(p["prompt"]) for p in DATA["prompts"][:count]]


@pytest.mark.parametrize("count", [39, pytest.param(200, marks=pytest.mark.full)])
def test_prompts_of_32_tokens_equal_plain_decoding(demo_model, tokenizer, count):
    wanted = [request(str(i), ids, greedy(32)) for i, ids in enumerate(prompts(tokenizer, count))]
    got = drive(demo_model, wanted).run()
    ties = Ties()
    for each in wanted:
        reference = plain(demo_model, each, VOCAB, EOS)
        ties.check(f"demo prompt {each.request_id}", got[each.request_id], reference)
    ties.report(f"bundled model, {count} prompts, k = 3")


@pytest.fixture(scope="module")
def sixty(demo_model, tokenizer):
    """Sixty requests, greedy or sampled, and plain decoding's answers to them."""

    @cache
    def of(sampled: bool):
        wanted = []
        for i, ids in enumerate(prompts(tokenizer, 60)):
            sampling = Sampling(32, temperature=1.2, top_p=0.95, seed=i) if sampled else greedy(32)
            wanted.append(request(str(i), ids, sampling))
        return wanted, {r.request_id: plain(demo_model, r, VOCAB, EOS) for r in wanted}

    return of


@pytest.mark.full
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("acceptance", ["head", "reject", "mixed", "force"])
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_every_depth_and_acceptance(sixty, demo_model, depth, acceptance, sampled):
    wanted, references = sixty(sampled)
    proposer = None
    if acceptance != "head":
        answers = {
            r.request_id: (*r.prompt_token_ids, *references[r.request_id].tokens) for r in wanted
        }
        rate = {"reject": 0.0, "force": 1.0, "mixed": 0.6}[acceptance]
        proposer = OracleProposer(answers, VOCAB, rate, length=1024)
    ties = Ties()
    for batch in (wanted[:3], wanted):
        driver = drive(demo_model, batch, proposer, num_draft_tokens=depth)
        for name, tokens in driver.run().items():
            ties.check(f"k={depth} {acceptance} {name}", tokens, references[name])
    ties.report(f"bundled model, k = {depth}, {acceptance}")


@pytest.mark.full
def test_tokens_per_step_are_the_trainers(demo_model, tokenizer):
    """Within 2% of the figure that the trainer measured with its PyTorch twin."""
    wanted = [request(str(i), ids, greedy(400)) for i, ids in enumerate(prompts(tokenizer))]
    driver = drive(demo_model, wanted)
    driver.run()
    stats = driver.core.stats()
    per_step = 1 + stats.num_accepted_tokens / stats.num_drafts
    MEASURED.append(f"bundled model, tokens per step at k = 3: {per_step:.4f}")
    assert per_step == pytest.approx(FIGURES["mtp"]["tokens_per_step_k3"], rel=0.02)


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return b"".join(map(tokenizer.text_bytes, tokens)).decode()


class Recorder(MTPProposer):
    """Drafts with the head, notes each draft by the position it is for, and spoils it."""

    def __init__(self, model) -> None:
        super().__init__(model)
        self.seen: list[tuple[mx.array, mx.array]] = []

    def propose(self, state, *, start, num_kept, **more):
        drafts = super().propose(state, start=start, num_kept=num_kept, **more)
        if drafts.shape[1]:
            self.seen.append((start + num_kept + 1, drafts[:, 0]))
        return (drafts + 1) % VOCAB


@pytest.mark.parametrize("count", [13, pytest.param(39, marks=pytest.mark.full)])
def test_teacher_forced_acceptance(demo_model, tokenizer, count):
    """At every position of greedy text the first draft is what the trunk says next, above 0.99."""
    agreed = total = 0
    for index, ids in enumerate(prompts(tokenizer, count)):
        recorder = Recorder(demo_model)
        driver = drive(
            demo_model, [request("a", ids, greedy(64))], recorder, num_draft_tokens=1, overlap=False
        )
        text = [*ids, *driver.run()["a"]]
        assert driver.core.stats().num_accepted_tokens == 0, index
        for position, draft in recorder.seen:
            where = int(position.item())
            if where < len(text):
                total += 1
                agreed += text[where] == int(draft.item())
    MEASURED.append(f"bundled model, teacher-forced acceptance, depth 1: {agreed}/{total}")
    assert total > 15 * count
    assert agreed / total > 0.99


def test_sixteen_tool_requests_at_once(demo_model, tokenizer):
    wanted = []
    for city in DATA["cities"]:
        message = {"role": "user", "content": f"What is the weather in {city} in celsius?"}
        ids = tokenizer.encode_chat([message], tools=[DATA["weather_tool"]])
        wanted.append(request(city, ids, greedy(120)))
    assert len(wanted) == 16
    got = drive(demo_model, wanted).run()
    for city in DATA["cities"]:
        text = text_of(tokenizer, got[city])
        assert text.startswith("<tool_call>\n"), text
        assert text.endswith("\n</tool_call>"), text
        call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        expected = {"name": "get_weather", "arguments": {"city": city, "unit": "celsius"}}
        assert call == expected


def test_sixteen_needles_come_back_whole(demo_model, tokenizer):
    """A secret told in the first turn, asked for 600 tokens and several turns later.

    MTP must say what plain decoding says, so it may lose the phrase only where the model itself
    does: one of these sixteen ('silver platzasus 22').
    """
    wanted = []
    for index, messages in enumerate(DATA["needles"]):
        ids = tokenizer.encode_chat(messages)
        assert len(ids) > 600
        assert len(messages) >= 11
        wanted.append(request(str(index), ids, greedy(60)))
    assert len(wanted) == 16
    got = drive(demo_model, wanted, prefill_step_size=256).run()
    whole = 0
    for each in wanted:
        text = text_of(tokenizer, got[each.request_id])
        assert text == text_of(tokenizer, plain(demo_model, each, VOCAB, EOS).tokens)
        whole += text == "The secret phrase is 'silver platypus 22'."
    assert whole >= 15
