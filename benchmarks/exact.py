"""Whether answers are the same to the bit with and without drafts, alone, in batches, from a cache.

    python -m benchmarks.exact [MODEL ...] [--seconds 540]

MODEL is a checkpoint with a head, PATH:4 or PATH:8 to quantize it, PATH:16 to leave it, or the name
of a shape, whose weights are random. The reference is each request alone, without drafts and cache,
all with `--exact`. Then batches, which requests join and leave, at each depth: with an empty prefix
cache, again with a full one, and the next turn of the same chats. Half of the requests are sampled.
A random head is never right: there drafts are the reference's tokens with the probabilities 0, .6
and 1, and others else. What the model draws is never replaced.

The status is 1 if a token differs. Where nothing is exact to the bit (on a CPU), answers that part
where two candidates are closer than 1e-4 are counted as ties, and don't count as differences.
"""

import argparse
import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlx_mtp import backend

BACKEND = backend.prepare()

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.shapes import add_sizes, build, quantize, shape_of
from benchmarks.timed import shares, table, within
from mlx_mtp.bench.prompts import PromptSource
from mlx_mtp.build import build_engine
from mlx_mtp.config import DraftTokens, EngineConfig
from mlx_mtp.engine.engine import Engine, run_requests
from mlx_mtp.engine.request import Request
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.models.published import SHAPES
from mlx_mtp.sampling.grammar_masks import TokenSampler
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.speculative.drafter import Computed, HeadState, MTPDrafter
from mlx_mtp.text.tokenizer import Tokenizer

_SIBLING = "tests/data/dense-demo"
_MODELS = [f"{BUNDLED_MODEL}:4", f"{_SIBLING}:4", f"{_SIBLING}:16", "Qwen3.6-35B-A3B"]
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
Answers = dict[str, list[int]]


class Subject(NamedTuple):
    """A model, and chats for it."""

    model: LoadedModel
    vocab_size: int
    ends: tuple[int, ...]  # ids that end a turn
    prompts: list[tuple[int, ...]]
    rates: tuple[float | None, ...]  # of right drafts; None: the head's own


def subject(name: str, count: int, options: argparse.Namespace) -> Subject:
    """Load or make a model, and prompts of some ten to 1,500 tokens, of which half begin alike."""
    if name in SHAPES:
        model = build(shape_of(name, options), 4)[0]
        chance = random.Random(0)

        def ids(length: int) -> tuple[int, ...]:
            return tuple(chance.randrange(10, model.vocab_size) for _ in range(length))

        shared = *ids(_SHARED), _END
        prompts = [shared * (n % 2) + ids(chance.randint(10, 800)) for n in range(count)]
        return Subject(model, model.vocab_size, (_END,), prompts, (0.6, 0.0, 1.0))
    path, _, bits = name.rpartition(":")
    model = load_model(Path(path), enable_mtp=True, lazy=True)
    if bits != "16":
        quantize(model.model, int(bits))
    model.load_weights()
    tokenizer, source = Tokenizer.load(Path(path)), PromptSource(0)
    (system,) = source.next("medium", 1)
    prompts = []
    for number in range(count):
        (asked,) = source.next(("short", "story", "medium")[number % 3], 1)
        chat = [{"role": "system", "content": system.text}] * (number % 2)
        prompts.append(tokenizer.encode_chat([*chat, {"role": "user", "content": asked.text}]))
    return Subject(model, tokenizer.vocab_size, tokenizer.eos_token_ids, prompts, (None,))


class TellingProposer(MTPDrafter):
    """Drafts as the head does, then puts known tokens in their place at a rate, and wrong ones.

    `texts` are prompts with their answers, by the requests' seeds.
    """

    def __init__(self, model: LoadedModel, texts: list[list[int]], rate: float) -> None:
        super().__init__(model)
        self.rate, longest = rate, max(map(len, texts))
        self.known = mx.array([[*text, *[0] * (longest - len(text))] for text in texts])
        mx.eval(self.known)  # Here: the engines have threads of their own.

    def propose(
        self, state: HeadState, window: Computed, num_drafts: Sequence[int], sampler: TokenSampler
    ) -> mx.array:
        drafts = super().propose(state, window, num_drafts, sampler)
        assert isinstance(sampler, Sampler)
        known = self.known[mx.array([params.seed for params in sampler.params])]
        first = window.next_position[:, None]
        positions = first + mx.arange(drafts.shape[1])
        right = mx.take_along_axis(known, mx.minimum(positions, known.shape[1] - 1), axis=1)
        told = (positions * 7919) % 1000 < int(self.rate * 1000)
        # Computed from the head's own, so that it runs all the same.
        return mx.where((drafts >= 0) & told, right, right ^ 1).astype(mx.int32)


def play(engine: Engine, requests: list[Request]) -> tuple[Answers, int, str]:
    """Answers, the most that were running at once, and how many drafts were accepted."""
    answers: Answers = {request.request_id: [] for request in requests}
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
    return answers, most, f"{accepted:,} of {verified:,}"


def distance(
    of: Subject, request: Request, before: Sequence[int], tokens: tuple[int, int]
) -> float:
    """Between the scores of two tokens, noise included, after part of an answer."""
    ids = [*request.prompt_token_ids, *before]
    logits = of.model.model(mx.array([ids]), cache=make_prompt_cache(of.model.model))[:, -1:]
    sampler = Sampler([request.sampling], [request.prompt_token_ids], of.vocab_size)
    where, window = mx.array([[len(ids)]]), mx.zeros((1, 1), dtype=mx.int32)
    scores = sampler.scores(logits, where, window)[0, 0]
    return abs(float(scores[tokens[0]] - scores[tokens[1]]))


def compare(of: Subject, requests: list[Request], got: Answers, wanted: Answers) -> list[int]:
    """Tokens compared, those that differ, and answers that part at a tie; the first is printed."""
    compared = different = ties = 0
    for request in requests:
        name = request.request_id
        pairs = list(itertools.zip_longest(got[name], wanted[name], fillvalue=-1))
        compared += len(pairs)
        first = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            continue
        parted = pairs[first]
        gap = float("inf")
        if -1 not in parted:
            gap = distance(of, request, wanted[name][:first], parted)
        is_tie = gap < _TIE and not of.model.can_be_exact
        ties += is_tie
        different += 0 if is_tie else sum(a != b for a, b in pairs)
        if not is_tie or ties == 1:
            print(f"{name} parts at its token {first}: {parted}, {gap:.1e} apart", file=sys.stderr)
    return [compared, different, ties]


def check(name: str, end: float, options: argparse.Namespace) -> list[int]:
    """All cases of one model up to a time (`perf_counter`), printed as they come; see `compare`."""
    of = subject(name, options.requests, options)
    print(f"\n{name}: {of.model.dtype}, exact to the bit here: {of.model.can_be_exact}\n")
    heads = ["drafts", "right", "rows", "cache", "accepted", "tokens", "different", "ties"]
    row = table(*heads, "all tokens", "all different")

    def request(number: int, prompt: Sequence[int]) -> Request:
        longest = options.tokens - options.tokens // 8 * (number % 4)
        sampling = SamplingParams(longest, seed=number, **_SAMPLED[number // 2 % 4])
        return Request(f"request {number}", tuple(prompt), sampling)

    def engine(drafts: DraftTokens | None, rows: int, rate: float | None = None) -> Engine:
        room = 0 if drafts is None else _CACHE
        config = EngineConfig(drafts or 0, rows, exact=True, prefix_cache_size=room)
        model = of.model if drafts else of.model.without_head()
        told = None if rate is None or not drafts else TellingProposer(of.model, texts, rate)
        return build_engine(model, config, of.vocab_size, of.ends, proposer=told)

    firsts = [request(*each) for each in enumerate(of.prompts)]
    alone = engine(None, 1)
    wanted = play(alone, firsts)[0]
    nexts = []
    for number, (first, answer) in enumerate(zip(firsts, wanted.values())):
        text = [*first.prompt_token_ids, *answer]
        ended = [] if text[-1] in of.ends else [of.ends[0]]
        tail = of.prompts[number - 1][-_TAIL:]
        nexts.append(request(len(firsts) + number, [*text, *ended, *tail]))
    wanted |= play(alone, nexts)[0]
    alone.stop()
    texts = [[*r.prompt_token_ids, *wanted[r.request_id]] for r in (*firsts, *nexts)]
    usual = of.rates[0]
    most = options.rows
    cases: list[tuple[DraftTokens, float | None, int]] = [(3, usual, most), ("auto", usual, most)]
    cases += [(0, None, most), (3, usual, 1), *((k, usual, most) for k in (1, 2, 4, 5))]
    cases += [(drafts, rate, most) for rate in of.rates[1:] for drafts in (3, "auto", 1, 5)]
    cases.append(("auto", usual, 1))
    total = [0, 0, 0]
    for drafts, rate, rows in within(end, cases):
        running = engine(drafts, rows, rate)
        for cache, requests in (("cold", firsts), ("warm", firsts), ("next turn", nexts)):
            got, at_once, accepted = play(running, requests)
            found = compare(of, requests, got, wanted)
            total = [a + b for a, b in zip(total, found)]
            right = "" if rate is None else rate
            row(drafts or "off", right, at_once, cache, accepted, *found, *total[:2])
        running.stop()
    return total


def main() -> int:
    """Parse the command line and compare; 1 if a token differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    told = f"checkpoints or shapes; default: {' '.join(_MODELS)}"
    parser.add_argument("models", nargs="*", metavar="MODEL", default=_MODELS, help=told)
    add_sizes(parser)
    parser.add_argument("--rows", type=int, default=32, help="at once, at most")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--seconds", type=float, default=540, help="begin no case after them")
    options = parser.parse_args()
    given = shares(options.seconds, options.models)
    compared, different, ties = map(sum, zip(*(check(*each, options) for each in given)))
    print(f"\n{different:,} different tokens of {compared:,}, {ties} ties; {BACKEND}")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
