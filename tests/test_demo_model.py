"""The bundled model and its dense sibling: MTP changes no token, heads and answers are right."""

import itertools
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.speculative.drafter import DeferredWrites, MTPDrafter
from mlx_mtp.text.parsing.events import ToolArguments, ToolStart
from mlx_mtp.text.parsing.formats import OutputFormat
from mlx_mtp.text.tokenizer import Tokenizer
from tests.conftest import DEMO, DENSE_DEMO
from tests.support.harness import MEASURED, Driver, OracleDrafter, Ties, greedy, plain, request
from tests.support.harness import SamplingParams as Sampling
from tests.support.quick import full

DATA = json.loads((Path(__file__).parent / "data" / "demo_prompts.json").read_text())
EOS = (4089, 4087)
VOCAB = 4096
OPEN_TASKS = {"story", "description", "explanation", "advice", "letter", "diary", "poem"}


@dataclass(frozen=True)
class Bundled:
    """A model of this repository with its head."""

    name: str
    model: LoadedModel
    tokenizer: Tokenizer
    # Held-out prompts of the trainer's generator with their tasks, which take turns.
    texts: list[dict[str, str]]

    def prompts(self, count: int | None = None) -> list[list[int]]:
        return [self.tokenizer.encode(each["prompt"]) for each in self.texts[:count]]

    def text(self, tokens: list[int]) -> str:
        return b"".join(map(self.tokenizer.text_bytes, tokens)).decode()


@pytest.fixture(scope="module")
def moe(demo_model) -> Bundled:
    return Bundled("moe", demo_model, Tokenizer.load(DEMO), DATA["prompts"])


@pytest.fixture(scope="module")
def dense() -> Bundled:
    texts = json.loads((DENSE_DEMO / "prompts.json").read_text())["prompts"]
    model = load_model(DENSE_DEMO, enable_mtp=True)
    return Bundled("dense", model, Tokenizer.load(DENSE_DEMO), texts)


@pytest.fixture(scope="module", params=["moe", "dense"])
def bundled(request) -> Bundled:
    return request.getfixturevalue(request.param)


def drive(model, wanted, drafter=None, **settings) -> Driver:
    config = EngineConfig(**{"num_draft_tokens": 3, "max_num_seqs": 16, **settings})
    driver = Driver(model, vocab_size=VOCAB, stop_ids=EOS, config=config, drafter=drafter)
    for each in wanted:
        driver.add(each)
    return driver


@pytest.mark.parametrize("count", [4, pytest.param(None, marks=pytest.mark.full)])
def test_prompts_of_32_tokens_equal_plain_decoding(bundled, count):
    prompts = bundled.prompts(count)
    wanted = [request(str(i), ids, greedy(32)) for i, ids in enumerate(prompts)]
    got = drive(bundled.model, wanted).run()
    ties = Ties()
    for each in wanted:
        reference = plain(bundled.model, each, VOCAB, EOS)
        ties.check(f"{bundled.name} prompt {each.request_id}", got[each.request_id], reference)
    ties.report(f"bundled {bundled.name} model, {len(wanted)} prompts, k = 3")


@pytest.fixture(scope="module")
def sixty(bundled):
    """Sixty requests, greedy or sampled, and the answers of plain decoding."""

    @cache
    def of(sampled: bool):
        wanted = []
        for i, ids in enumerate(bundled.prompts(60)):
            sampling = Sampling(32, temperature=1.2, top_p=0.95, seed=i) if sampled else greedy(32)
            wanted.append(request(str(i), ids, sampling))
        return wanted, {r.request_id: plain(bundled.model, r, VOCAB, EOS) for r in wanted}

    return of


@pytest.mark.full
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rate", [None, 0.0, 0.6, 1.0], ids=["head", "reject", "mixed", "force"])
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_every_depth_and_acceptance(sixty, bundled, depth, rate, sampled):
    wanted, references = sixty(sampled)
    drafter, ties = None, Ties()
    if rate is not None:
        answers = {r.request_id: r.prompt_token_ids for r in wanted}
        answers = {name: (*ids, *references[name].tokens) for name, ids in answers.items()}
        drafter = OracleDrafter(answers, VOCAB, rate, length=1024)
    for batch in (wanted[:3], wanted):
        driver = drive(bundled.model, batch, drafter, num_draft_tokens=depth)
        for name, tokens in driver.run().items():
            ties.check(f"k={depth} {rate} {name}", tokens, references[name])
    ties.report(f"bundled {bundled.name} model, k = {depth}, acceptance {rate or 'of the head'}")


class Numbered(DeferredWrites):
    """Deferred writes that also keep the number of each row's request."""

    def __init__(self, write, numbers: mx.array) -> None:
        super().__init__(write)
        self.numbers = numbers

    def select(self, rows):
        return Numbered(self._write, self.numbers[rows])

    def extend(self, other) -> None:
        super().extend(other)
        self.numbers = mx.concatenate([self.numbers, other.numbers])


class Recorder(MTPDrafter):
    """Drafts with the head, records each draft by request and position, and makes it wrong."""

    def __init__(self, model) -> None:
        super().__init__(model)
        self.seen: list[tuple[int, int, int]] = []
        self.new_rows: list[str] = []

    def make_state(self, cache):
        state = super().make_state(cache)
        return Numbered(state._write, mx.array([int(name) for name in self.new_rows]))

    def propose(self, state, window, num_draft_tokens, sampler):
        drafts = super().propose(state, window, num_draft_tokens, sampler)
        if drafts.shape[1]:
            positions = window.packing.positions[window.last] + 2
            self.seen += zip(*(a.tolist() for a in (state.numbers, positions, drafts[:, 0])))
        return (drafts + 1) % VOCAB


SHARES = {"closed": (0.98, 1.0), "open": (0.6, 0.95)}


@pytest.mark.parametrize(
    ("bundled", "kind", "count"),
    [
        ("moe", "open", 7),
        ("dense", "closed", 7),
        *(full(*each, 28) for each in itertools.product(("moe", "dense"), SHARES)),
    ],
    indirect=["bundled"],
)
def test_teacher_forced_acceptance(bundled, kind, count):
    """The share of positions in greedy text where the first draft is the trunk's next token."""
    texts = [p["prompt"] for p in bundled.texts if (p["task"] in OPEN_TASKS) == (kind == "open")]
    prompts = [*map(bundled.tokenizer.encode, texts[:count])]
    wanted = [request(str(i), ids, greedy(64)) for i, ids in enumerate(prompts)]
    recorder = Recorder(bundled.model)
    driver = drive(bundled.model, wanted, recorder, num_draft_tokens=1, overlap=False)
    answers = driver.run()
    assert driver.core.scheduler.stats().num_accepted_tokens == 0
    said = [[*ids, *answers[str(i)]] for i, ids in enumerate(prompts)]
    seen = [(said[i][at], draft) for i, at, draft in recorder.seen if at < len(said[i])]
    agreed, total = sum(token == draft for token, draft in seen), len(seen)
    MEASURED.append(f"{bundled.name}, {kind} text, teacher-forced, depth 1: {agreed}/{total}")
    assert total > 10 * count
    low, high = SHARES[kind]
    assert low < agreed / total <= high


def test_sixteen_tool_requests_at_once(bundled):
    """One of the models writes calls as JSON, the other as tags."""
    tool, cities, tokenizer = DATA["weather_tool"], DATA["cities"], bundled.tokenizer
    wanted = []
    for city in cities:
        message = {"role": "user", "content": f"What is the weather in {city} in celsius?"}
        ids = tokenizer.encode(tokenizer.render_chat([message], [tool]), add_special_tokens=False)
        wanted.append(request(city, ids, greedy(120)))
    assert len(wanted) == 16
    got = drive(bundled.model, wanted).run()
    form = OutputFormat.of_template(bundled.tokenizer.template)
    schemas = {"get_weather": tool["function"]["parameters"]}
    for city in cities:
        parser = form.parser(thinking=False, schemas=schemas)
        events = [*parser.feed(bundled.text(got[city])), *parser.finish()]
        assert [e.name for e in events if isinstance(e, ToolStart)] == ["get_weather"], events
        arguments = "".join(e.text for e in events if isinstance(e, ToolArguments))
        assert json.loads(arguments) == {"city": city, "unit": "celsius"}


@pytest.mark.parametrize(("count", "whole"), [(2, 1), pytest.param(16, 15, marks=pytest.mark.full)])
def test_needles_come_back_whole(moe, count, whole):
    """A secret from the first turn is repeated 600 tokens and several turns later."""
    wanted = []
    for index, messages in enumerate(DATA["needles"][:count]):
        ids = moe.tokenizer.encode_chat(messages)
        assert len(ids) > 600 and len(messages) >= 11
        wanted.append(request(str(index), ids, greedy(60)))
    assert len(wanted) == count
    got = drive(moe.model, wanted, prefill_step_size=256).run()
    kept = 0
    for each in wanted:
        text = moe.text(got[each.request_id])
        assert text == moe.text(plain(moe.model, each, VOCAB, EOS).tokens)
        kept += text == "The secret phrase is 'silver platypus 22'."
    assert kept >= whole
