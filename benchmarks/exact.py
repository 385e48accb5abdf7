"""Whether answers are the same to the bit with and without drafts, batches and a cache."""

import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from benchmarks import Row, Rows, row
from benchmarks.cores import TellingDrafter
from benchmarks.shapes import build, quantize, shape_of
from benchmarks.timed import shares, within
from mlx_mtp.bench.prompts import PromptSource
from mlx_mtp.build import build_engine, run_requests
from mlx_mtp.config import DraftTokens, EngineConfig
from mlx_mtp.engine.engine import Engine
from mlx_mtp.engine.request import Request
from mlx_mtp.errors import BenchError
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.models.published import SHAPES
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.text.tokenizer import Tokenizer

_SIBLING = "tests/data/dense-demo"
_MODELS = (f"{BUNDLED_MODEL}:4", f"{_SIBLING}:4", f"{_SIBLING}:16", "Qwen3.6-35B-A3B")
_END = 2  # of a turn, where weights are random
_SHARED = 700  # tokens that half of those prompts begin with
_TAIL = 100  # tokens of the next turn
_TIE = 1e-4
_CACHE = 2 << 30
_SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
]
_Answers = dict[str, list[int]]


class _Subject(NamedTuple):
    """A model, and chats for it."""

    model: LoadedModel
    vocab_size: int
    ends: tuple[int, ...]  # ids that end a turn
    prompts: list[tuple[int, ...]]
    rates: tuple[float | None, ...]  # of right drafts; None: the head's own


def exact(
    *models: str,
    layers: int = 0,
    tiny: bool = False,
    rows: int = 32,
    requests: int = 40,
    tokens: int = 96,
    seconds: float = 540,
) -> Rows:
    """Whether answers are the same to the bit with and without drafts, batches and a cache.

    The reference is each request alone, without drafts and cache, all with `--exact`. Then
    batches, which requests join and leave, at each depth: with an empty prefix cache, again with a
    full one, and the next turn of the same chats. Half of the requests are sampled. A random head
    is never right: there drafts are the reference's tokens with the probabilities 0, .6 and 1
    ("right"), and others else. What the model draws is never replaced.

    The status is 1 if a token differs. Where nothing is exact to the bit (on a CPU), answers that
    part where two candidates are closer than 1e-4 are ties, and no differences.

    Args:
        models: checkpoints with a head, PATH:4 or PATH:8 to quantize one and PATH:16 to leave it,
            or names of shapes, whose weights are random (default: the bundled model and its
            sibling in 4 bits, the sibling in BF16, and the 35B's shape)
        rows: at once, at most
        requests: number of the first turns
        tokens: of an answer, at most
    """
    compared = different = ties = 0
    for name, end in shares(seconds, models or _MODELS):
        subject = _subject(name, requests, layers, tiny)
        bits = f"exact to the bit here: {subject.model.can_be_exact}"
        yield f"{name}: {subject.model.dtype}, {bits}"
        for line in _check(subject, end, rows, tokens):
            compared += line["tokens"]
            different += line["different"]
            ties += line["ties"]
            yield line | row("all tokens | all different", compared, different)
    result = f"{different:,} different tokens of {compared:,}, {ties} ties"
    yield result
    if different:
        raise BenchError(f"{result}.")


def _subject(name: str, count: int, layers: int, tiny: bool) -> _Subject:
    """Load or make a model, and prompts of some ten to 1,500 tokens, of which half begin alike."""
    if name in SHAPES:
        model = build(shape_of(name, layers, tiny), 4)[0]
        chance = random.Random(0)

        def ids(length: int) -> tuple[int, ...]:
            return tuple(chance.randrange(10, model.vocab_size) for _ in range(length))

        shared = *ids(_SHARED), _END
        prompts = [shared * (n % 2) + ids(chance.randint(10, 800)) for n in range(count)]
        return _Subject(model, model.vocab_size, (_END,), prompts, (0.6, 0.0, 1.0))
    path, _, bits = name.rpartition(":")
    model = load_model(Path(path), enable_mtp=True, lazy=True)
    if bits != "16":
        quantize(model.model, int(bits))
    model.load_weights()
    tokenizer, source = Tokenizer.load(Path(path)), PromptSource(0)
    (system,) = source.next("medium", 1)
    prompts = []
    for number in range(count):
        (question,) = source.next(("short", "story", "medium")[number % 3], 1)
        chat = [{"role": "system", "content": system.text}] * (number % 2)
        prompts.append(tokenizer.encode_chat([*chat, {"role": "user", "content": question.text}]))
    return _Subject(model, tokenizer.vocab_size, tokenizer.eos_token_ids, prompts, (None,))


def _check(of: _Subject, end: float, most: int, tokens: int) -> Iterator[Row]:
    """All cases of one model up to a time (`perf_counter`)."""

    def request(number: int, prompt: Sequence[int]) -> Request:
        longest = tokens - tokens // 8 * (number % 4)
        sampling = SamplingParams(longest, seed=number, **_SAMPLED[number // 2 % 4])
        return Request(f"request {number}", tuple(prompt), sampling)

    def engine(drafts: DraftTokens | None, rows: int, rate: float | None = None) -> Engine:
        room = 0 if drafts is None else _CACHE
        config = EngineConfig(drafts or 0, rows, exact=True, prefix_cache_size=room)
        model = of.model if drafts else of.model.without_head()
        drafter = None if rate is None or not drafts else TellingDrafter(of.model, texts, rate)
        return build_engine(model, config, of.vocab_size, of.ends, drafter=drafter)

    firsts = [request(*each) for each in enumerate(of.prompts)]
    alone = engine(None, 1)
    reference = _play(alone, firsts)[0]
    nexts = []
    for number, (first, answer) in enumerate(zip(firsts, reference.values())):
        text = [*first.prompt_token_ids, *answer]
        ended = [] if text[-1] in of.ends else [of.ends[0]]
        tail = of.prompts[number - 1][-_TAIL:]
        nexts.append(request(len(firsts) + number, [*text, *ended, *tail]))
    reference |= _play(alone, nexts)[0]
    alone.stop()
    texts = [[*r.prompt_token_ids, *reference[r.request_id]] for r in (*firsts, *nexts)]
    usual = of.rates[0]
    cases: list[tuple[DraftTokens, float | None, int]] = [(3, usual, most), ("auto", usual, most)]
    cases += [(0, None, most), (3, usual, 1), *((k, usual, most) for k in (1, 2, 4, 5))]
    cases += [(drafts, rate, most) for rate in of.rates[1:] for drafts in (3, "auto", 1, 5)]
    cases.append(("auto", usual, 1))
    for drafts, rate, rows in within(end, cases):
        running = engine(drafts, rows, rate)
        for cache, requests in (("cold", firsts), ("warm", firsts), ("next turn", nexts)):
            answers, *counts = _play(running, requests)
            names = "drafts | right | cache | rows | verified | accepted"
            line = row(names, drafts or "off", rate, cache, *counts)
            yield line | _compare(of, requests, answers, reference)
        running.stop()


def _play(engine: Engine, requests: list[Request]) -> tuple[_Answers, int, int, int]:
    """Answers, the most that were running at once, and drafts that were verified and accepted."""
    answers: _Answers = {request.request_id: [] for request in requests}
    running, most, verified, accepted = set[str](), 0, 0, 0
    for _, output in run_requests(engine, requests):
        name = output.request_id
        answers[name] += output.token_ids
        verified += output.num_draft_tokens
        accepted += output.num_accepted_tokens
        running.add(name)
        most = max(most, len(running))
        if output.finish_reason is not None:
            running.remove(name)
    return answers, most, verified, accepted


def _compare(of: _Subject, requests: list[Request], answers: _Answers, reference: _Answers) -> Row:
    """Tokens compared, those that differ, and answers that part at a tie; the first is printed."""
    compared = different = ties = 0
    for request in requests:
        name = request.request_id
        pairs = list(itertools.zip_longest(answers[name], reference[name], fillvalue=-1))
        compared += len(pairs)
        first = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            continue
        parted = pairs[first]
        gap = float("inf")
        if -1 not in parted:
            gap = _distance(of, request, reference[name][:first], parted)
        is_tie = gap < _TIE and not of.model.can_be_exact
        ties += is_tie
        different += 0 if is_tie else sum(a != b for a, b in pairs)
        if not is_tie or ties == 1:
            print(f"{name} parts at its token {first}: {parted}, {gap:.1e} apart", file=sys.stderr)
    return row("tokens | different | ties", compared, different, ties)


def _distance(
    of: _Subject, request: Request, before: Sequence[int], tokens: tuple[int, int]
) -> float:
    """Between the scores of two tokens, noise included, after part of an answer."""
    ids = [*request.prompt_token_ids, *before]
    logits = of.model.model(mx.array([ids]), cache=make_prompt_cache(of.model.model))[:, -1:]
    sampler = Sampler([request.sampling], [request.prompt_token_ids], of.vocab_size)
    where, window = mx.array([[len(ids)]]), mx.zeros((1, 1), dtype=mx.int32)
    scores = sampler.scores(logits, where, window)[0, 0]
    return abs(float(scores[tokens[0]] - scores[tokens[1]]))
