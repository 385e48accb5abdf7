"""Answers are equal to the bit with and without drafts, batches and a cache, in 4 bits and BF16.

On a GPU, the references are the answers to each request alone, without drafts and cache. Without a
GPU, small models in float32 are compared with plain decoding, except at ties.
"""

import random
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import pytest

from benchmarks.cores import TellingDrafter
from benchmarks.shapes import build, quantize, shape_of
from mlx_mtp.bench.prompts import PromptSource
from mlx_mtp.build import build_engine, run_requests
from mlx_mtp.calibration.exactness import exactness_of
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine import runner
from mlx_mtp.kernels import gpu
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.text.tokenizer import Tokenizer
from tests.conftest import DEMO, DENSE_DEMO
from tests.support.harness import Plain, Ties, plain, request

pytestmark = pytest.mark.full

ON_GPU = gpu.backend() is not None
TOKENS = 96 if ON_GPU else 12  # maximum number of tokens of an answer
END = 2  # id that ends a turn in models with random weights
SAMPLED = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.0})
SAMPLED += ({"temperature": 0.8, "top_k": 20, "top_p": 0.9},)
DEPTHS = [(3, 32), ("auto", 32), (0, 32), (3, 1), *((k, 32) for k in (1, 2, 4, 5)), ("auto", 1)]
# Share of right drafts (None: the head's own), drafts per step, maximum rows of a batch.
OWN = [(None, *each) for each in DEPTHS]
# A random head is never right, so a share of its drafts is replaced by the reference's tokens.
FORGED = [(0.6, *each) for each in DEPTHS]
FORGED += [(rate, k, 32) for rate in (0.0, 1.0) for k in (3, "auto", 1, 5)]


class Subject(NamedTuple):
    """A model, and its prompts."""

    model: LoadedModel
    vocab_size: int
    ends: tuple[int, ...]  # ids that end a turn
    prompts: list[tuple[int, ...]]


def checkpoint(path: Path, bits: int) -> Subject:
    """Returns a model of this repository, and chats, half of them with the same system prompt."""
    model = load_model(path, enable_mtp=True, lazy=True)
    if bits != 16:
        quantize(model.model, bits)
    model.load_weights()
    tokenizer, source = Tokenizer.load(path), PromptSource(0)
    (system,) = source.next("medium", 1)
    prompts = []
    for number in range(40 if ON_GPU else 4):
        (question,) = source.next(("short", "story", "medium")[number % 3], 1)
        chat = [{"role": "system", "content": system.text}] * (number % 2)
        prompts.append(tokenizer.encode_chat([*chat, {"role": "user", "content": question.text}]))
    return Subject(model, tokenizer.vocab_size, tokenizer.eos_token_ids, prompts)


def published(shape: str) -> Subject:
    """Returns a 4-bit model of random weights and prompts; half of these have the same prefix."""
    model, _ = build(shape_of(shape, 8 if ON_GPU else 4, tiny=not ON_GPU))
    chance = random.Random(0)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(chance.randrange(10, model.vocab_size) for _ in range(length))

    shared, count = (*ids(700), END), 16 if ON_GPU else 4
    prompts = [shared * (n % 2) + ids(chance.randint(10, 800)) for n in range(count)]
    return Subject(model, model.vocab_size, (END,), prompts)


SUBJECTS = {
    "bundled, 4 bit": (lambda: checkpoint(DEMO, 4), OWN),
    "sibling, 4 bit": (lambda: checkpoint(DENSE_DEMO, 4), OWN),
    "sibling, BF16": (lambda: checkpoint(DENSE_DEMO, 16), OWN),
    "35B, 8 layers, 4 bit": (lambda: published("Qwen3.6-35B-A3B"), FORGED),
}
if not ON_GPU:
    SUBJECTS = {
        "sibling": (lambda: checkpoint(DENSE_DEMO, 16), OWN[::3]),
        "27B": (lambda: published("Qwen3.5-27B"), FORGED[::4]),
    }


class Chats:
    """First and second turns for a subject, half of them sampled, and their reference answers."""

    def __init__(self, subject: Subject) -> None:
        if (found := exactness_of(subject.model)) is not None and found.faults:
            pytest.skip(f"not exact on this Mac: {found.faults}")
        self.subject, self.references = subject, dict[str, Plain]()
        self.firsts = [self._request(*each) for each in enumerate(subject.prompts)]
        self._answer(self.firsts)
        self.nexts = []
        for number, first in enumerate(self.firsts):
            text = self.text(first)
            ended = () if text[-1] in subject.ends else subject.ends[:1]
            question = subject.prompts[number - 1][-100:]
            self.nexts.append(self._request(len(self.firsts) + number, (*text, *ended, *question)))
        self._answer(self.nexts)

    def text(self, of) -> list[int]:
        return [*of.prompt_token_ids, *self.references[of.request_id].tokens]

    def engine(self, depth, rows, rate=None, cache=True):
        s, drafter = self.subject, None
        if rate is not None and depth:
            drafter = TellingDrafter(s.model, [*map(self.text, (*self.firsts, *self.nexts))], rate)
        config = EngineConfig(depth, rows, exact=True, prefix_cache_size=(2 << 30) * cache)
        model = s.model if depth else s.model.without_head()
        return build_engine(model, config, s.vocab_size, s.ends, drafter=drafter)

    def _request(self, number, prompt):
        longest = TOKENS - TOKENS // 8 * (number % 4)
        sampling = SamplingParams(longest, seed=number, **SAMPLED[number // 2 % 4])
        return request(f"request {number}", prompt, sampling)

    def _answer(self, requests) -> None:
        s = self.subject
        if s.model.can_be_exact:
            alone = self.engine(0, 1, cache=False)
            self.references |= {n: Plain(tuple(t), ()) for n, t in play(alone, requests).items()}
            alone.stop()
        else:
            for each in requests:
                self.references[each.request_id] = plain(s.model, each, s.vocab_size, s.ends)


def play(engine, requests) -> dict[str, list[int]]:
    """Returns the tokens of requests that join and leave the engine's batches."""
    answers = {each.request_id: [] for each in requests}
    for _, output in run_requests(engine, requests):
        answers[output.request_id] += output.token_ids
    return answers


@pytest.fixture(scope="module")
def chats():
    """A function that returns the chats of a subject by name; keeps only the last one's model."""

    @lru_cache(maxsize=1)
    def of(name: str) -> Chats:
        return Chats(SUBJECTS[name][0]())

    return of


def compare(chats: Chats, case) -> Ties:
    """Compare answers with an empty prefix cache, with a full one, and of the chats' next turns."""
    rate, depth, rows = case
    engine, ties = chats.engine(depth, rows, rate), Ties()
    try:
        for cache, requests in (
            ("empty", chats.firsts),
            ("full", chats.firsts),
            ("next", chats.nexts),
        ):
            for name, tokens in play(engine, requests).items():
                ties.check(f"{case}, {cache} cache, {name}", tokens, chats.references[name])
    finally:
        engine.stop()
    return ties


@pytest.mark.parametrize(
    ("subject", "case"),
    [(name, case) for name, (_, cases) in SUBJECTS.items() for case in cases],
    ids=str,
)
def test_answers_are_the_same(chats, subject, case):
    compare(chats(subject), case).report(f"{subject}, {case}")


def test_a_draft_that_is_believed_is_a_difference(chats, monkeypatch):
    verify_window = runner.verify_window

    def believing(targets, window, **more):
        targets = mx.concatenate([window[:, 1:], targets[:, -1:]], axis=1)
        return verify_window(targets, window, **more)

    subject = chats(next(name for name in SUBJECTS if "sibling" in name))
    monkeypatch.setattr(runner, "verify_window", believing)
    with pytest.raises(AssertionError, match="differs and is no tie"):
        compare(subject, (None, 3, 32))
