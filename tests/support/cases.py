"""Requests, drafters and policies for tests that compare answers with plain decoding."""

import json
import random
from collections.abc import Callable

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_mtp.cache.packing import Packing
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.prefill import PrefillScheduler
from mlx_mtp.engine.request import Request
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.prefix.disk import PrefixStore
from mlx_mtp.sampling.params import GrammarSpec, SamplingParams
from mlx_mtp.speculative.draft_policy import Choice, RowDrafting
from mlx_mtp.speculative.drafter import Computed, MTPDrafter
from tests.support.grammars import compiled
from tests.support.harness import Driver, OracleDrafter, Plain, Ties, greedy, plain, request
from tests.support.prefixes import flush
from tests.support.tiny_models import VOCAB

EOS = 1
STEP = 16  # small, so that prompts are cut into several chunks

SAMPLED = (
    SamplingParams(max_tokens=20, temperature=1.0, seed=7),
    SamplingParams(max_tokens=17, temperature=0.7, top_k=8, top_p=0.9, seed=-3),
    SamplingParams(max_tokens=24, temperature=1.5, min_p=0.05, seed=2**62, frequency_penalty=0.8),
    SamplingParams(max_tokens=9, temperature=0.9, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(max_tokens=22, temperature=1.0, seed=7, choice=1, logit_bias=((5, 4.0),)),
)
PERSON = {
    "type": "object",
    "properties": {
        "ab": {"type": "string", "maxLength": 6},
        "n": {"type": "integer"},
        "ok": {"type": "boolean"},
    },
    "required": ["ab", "n", "ok"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"enum": ["ab", "abab", 12, True]}, "minItems": 2, "maxItems": 5}
SPECS = (
    GrammarSpec("json_schema", json.dumps(PERSON)),
    GrammarSpec("json_schema", json.dumps(LIST)),
    GrammarSpec("json_object"),
    GrammarSpec("regex", "(ab)+[0-9]{2,6}(x|yz)*"),
    GrammarSpec("choice", json.dumps(["ab", "abab12", "true", "tru"])),
    GrammarSpec("lark", 'start: <tool_call> "a"+ %json {"type": "integer"} <tool_call>'),
    GrammarSpec("regex", "[0-9]{3}", free_until="</think>"),
    GrammarSpec("json_schema", json.dumps(LIST), free_until="</think>", free_tokens=7),
    GrammarSpec("free", free_until="</think>", free_tokens=5),
)


def arrays_of(tree) -> list[mx.array]:
    """Returns the arrays of a tree of tuples and lists."""
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]


def make_requests(kind: str) -> list[Request]:
    """Returns requests with prompts from one token to several chunks, and k + 1 for every k.

    With grammars there are more: one request for each grammar, mixed with three free ones.
    """
    generator = np.random.default_rng(11)
    lengths = (1, 2, 3, 4, 6, 17, 50, 16)
    specs: list[GrammarSpec | None] = [None] * len(lengths)
    if kind.endswith("grammars"):
        lengths += (3, 9, 18, 4)
        specs = [SPECS[i - i // 4] if i % 4 != 3 else None for i in range(len(lengths))]
    requests = []
    for index, (length, spec) in enumerate(zip(lengths, specs, strict=True)):
        prompt = generator.integers(4, VOCAB, length)
        sampling = greedy(6 + 3 * (index % 8) if spec is None else 24)
        if kind.startswith("sampled"):
            sampling = SAMPLED[index % len(SAMPLED)]
        grammar = None if spec is None else compiled(spec)
        requests.append(request(f"r{index}", prompt, sampling, grammar))
    return requests


def drafter_for(
    drafts: str, model: LoadedModel, references: dict[str, Plain], requests: list[Request]
):
    """Returns the model's own head, with all or half of the tokens, or drafts of a known rate."""
    if drafts == "head":
        return MTPDrafter(model)
    if drafts == "half":
        return MTPDrafter(model, range(EOS, VOCAB, 2))
    answers = {
        r.request_id: (*r.prompt_token_ids, *references[r.request_id].tokens) for r in requests
    }
    return OracleDrafter(answers, VOCAB, {"reject": 0.0, "force": 1.0, "mixed": 0.6}[drafts])


class Erratic:
    """A policy with random drafts at every step and row, now and then without look-ahead.

    Rows often have no drafts, and sometimes the host's: the row's own run, or nonsense if it has
    none.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.choices: dict[int, float] = {}
        self.reason = None
        self.planned: list[int] = []

    def choose(self, rows: list[RowDrafting], *, steady: bool, waiting: int = 0) -> Choice:
        assert rows
        even = self.random.random() < 0.5
        first = self.depth(steady)
        head = [first if even else self.depth(steady) for _ in rows]
        head = [own if row.fixed is None else row.fixed for row, own in zip(rows, head)]
        self.planned.append(max(head))
        sync = self.random.random() < 0.3
        return Choice(tuple(head), tuple(map(self.on_host, rows)), sync)

    def depth(self, steady: bool) -> int:
        return self.random.choice((0, 0, 0, 1, 2, 3, 5, 8))

    def on_host(self, row: RowDrafting) -> int:
        if not row.host or self.random.random() < 0.5:
            return 0
        row.read()
        ((row.source, drafter),) = row.host.items()
        drafter.next_run = drafter.next_run or (5, 6)
        return self.random.randint(1, 16)

    def observe(self, head, shape, seconds) -> None:
        pass


class RandomChunks(PrefillScheduler):
    """Plans chunks of random lengths, up to the prefill step size."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.random = random.Random(5)

    def most_tokens(self, context: float = 0, left: int = 0, *, beside: bool) -> int:
        return self.random.randint(1, self._step)


def check_head_cache(driver: Driver, model: LoadedModel, name: str) -> None:
    """Check a running row's head KV against that of one pass; runs the driver to its end."""
    batch = driver.runner.batches.decoding
    batch.settle()
    row = [s.request_id for s in batch.sequences].index(name)
    held = int(batch.cache.offset[row].item())
    ours = [np.array(a[:, :held]) for a in batch.cache.head.row(batch.cache.layout.places[row])]
    driver.run()
    prompt = next(s.prompt for s in batch.sequences if s.request_id == name)
    text = [*prompt, *driver.tokens(name)][: held + 1]
    drafter = MTPDrafter(model)
    cache = model.make_cache(1)
    state = drafter.make_state(cache)
    cache.reserve([held])
    hidden = model.causal_lm.model(mx.array([text[:-1]]))
    packing = Packing(cache.layout, mx.array([0]), [held])
    whole = Computed(hidden[0], mx.array(text[1:]), mx.array([held - 1]), packing, cache)
    drafter.propose(state, whole, [0], batch.sampler)
    state.settle(cache)
    for mine, theirs in zip(ours, cache.head.row(cache.layout.places[0]), strict=True):
        np.testing.assert_allclose(mine, np.array(theirs[:, :held]), atol=1e-3)


ROOM = 64 << 20


def words(seed: int, count: int) -> list[int]:
    """Returns `count` random tokens, none of which ends a turn."""
    return [int(t) for t in np.random.default_rng(seed).integers(2, VOCAB, count)]


def driver(
    model: LoadedModel,
    depth: int | str = 2,
    store: PrefixStore | None = None,
    vocab_size: int = VOCAB,
    min_gain: int = 4,
    prefills: Callable[[EngineConfig], PrefillScheduler] = PrefillScheduler,
    **settings: object,
) -> Driver:
    settings = {"prefill_step_size": STEP, "prefix_cache_size": ROOM} | settings
    config = EngineConfig(num_draft_tokens=depth, **settings)
    run = Driver(
        model,
        vocab_size=vocab_size,
        stop_ids=(EOS,),
        config=config,
        min_gain=min_gain,
        store=store,
        prefills=prefills,
    )
    run.store = store
    return run


def ask(run: Driver, *wanted: Request) -> None:
    """Run requests together to their ends, and wait until their prefixes are on the disk."""
    for each in wanted:
        run.add(each)
    run.run()
    assert run.store is None or flush(run.store)


def check(run: Driver, model: LoadedModel, ties: Ties, *wanted: Request) -> None:
    for each in wanted:
        stops = () if each.sampling.ignore_eos else (EOS,)
        reference = plain(model, each, VOCAB, stops)
        ties.check(each.request_id, run.tokens(each.request_id), reference)
