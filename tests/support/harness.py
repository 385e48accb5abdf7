"""Plain decoding with mlx-lm's own modules as the reference, and the engine without its thread."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Self

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_mtp.cache.batch import BatchCache
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.prefill import PrefillScheduler
from mlx_mtp.engine.prompts import Prompts
from mlx_mtp.engine.request import Request, RequestOutput
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.prefix.cache import PrefixCache
from mlx_mtp.prefix.disk import PrefixStore
from mlx_mtp.prefix.policy import PrefixReuse
from mlx_mtp.ranks.leader import LeaderPrefixes, LeaderRunner
from mlx_mtp.ranks.links import Links
from mlx_mtp.ranks.messages import Begin
from mlx_mtp.sampling.grammar import Grammar
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.sampling.truncation import Truncation
from mlx_mtp.speculative.costs import MTP, CostKey, StepCosts, Table
from mlx_mtp.speculative.draft_policy import AdaptiveDrafts, DraftPolicy, FixedDrafts
from mlx_mtp.speculative.drafter import Computed, MTPDrafter
from mlx_mtp.speculative.host_sources import HostSources
from mlx_mtp.vision.placed import MAX_EMBEDDED_BYTES

MEASURED: list[str] = []  # lines that pytest prints after its summary
TIE = 1e-4  # scores closer than this can swap their order when shapes change


greedy = partial(SamplingParams, temperature=0.0)


def request(
    name: str, prompt: Iterable[int], sampling: SamplingParams, grammar: Grammar | None = None
) -> Request:
    if grammar is not None:
        sampling = replace(sampling, grammar=grammar.spec)
    return Request(name, tuple(int(t) for t in prompt), sampling, grammar=grammar)


class Plain(NamedTuple):
    """A reference answer: its tokens, and at each the score's lead over the runner-up."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


def slow_scores(
    p: SamplingParams,
    logits: np.ndarray,
    prompt: Many[int],
    output: Many[int],
    stop_ids: Many[int] = (),
    banned: Many[int] = (),
    noise: bool = True,
) -> np.ndarray:
    """Computes `Sampler.scores` for one row and position, in NumPy.

    `Truncation` is called as it is: test_truncation.py tests it.
    """
    x = logits.astype(np.float64)
    counts = np.bincount(np.array(output, dtype=int), minlength=len(x))
    for token in {*[*prompt, *output][-p.repetition_context_size :]}:
        penalty = p.repetition_penalty
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    x -= p.presence_penalty * (counts > 0) + p.frequency_penalty * counts
    for token, value in p.logit_bias:
        x[token] += value
    allowed = set(range(len(x)) if p.allowed_token_ids is None else p.allowed_token_ids)
    allowed -= set(banned)
    if len(output) < p.min_tokens:
        allowed = allowed - set(stop_ids) or allowed
    x[[token for token in range(len(x)) if token not in allowed]] = -np.inf
    if p.temperature == 0:
        return x
    warm = mx.array((x / p.temperature).astype(np.float32))[None, None]
    key = mx.array([p.noise_seed(), len(prompt) + len(output)], dtype=mx.uint32)
    cut = Truncation([p], len(x)).apply(warm)[0, 0]
    return np.array(cut + mx.random.gumbel((len(x),), key=key) if noise else cut)


class PlainMask:
    """A grammar and its budget, one token at a time, with llguidance alone."""

    def __init__(self, grammar: Grammar) -> None:
        self.matcher = grammar.matcher.deep_copy() if grammar.matcher else None
        self.words = grammar.num_words
        self.budget = grammar.budget
        self.tokens: list[int] = []

    def mask(self) -> mx.array:
        mask = np.full(4 * self.words, 255, dtype=np.uint8)
        if self.matcher is not None:
            mask = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8).copy()
        if self.budget.end and len(self.tokens) >= self.budget.max_tokens:
            (end,) = self.budget.end
            if end not in self.tokens:
                mask[:] = 0
                mask[end // 8] = 1 << (end % 8)
        return mx.array(mask)[None, None]

    def consume(self, token: int) -> None:
        self.tokens.append(token)
        assert self.matcher is None or self.matcher.consume_token(token)


def plain(model: LoadedModel, wanted: Request, vocab_size: int, stop_ids: Many[int] = ()) -> Plain:
    """Decode one token at a time with mlx-lm's modules and caches, and the same keyed noise."""
    masks = PlainMask(wanted.grammar) if wanted.grammar is not None else None
    cache = make_prompt_cache(model.model)
    sampler = Sampler([wanted.sampling], [wanted.prompt_token_ids], vocab_size, [stop_ids])
    logits = model.model(mx.array([wanted.prompt_token_ids]), cache=cache)[:, -1:]
    position, tokens, gaps = len(wanted.prompt_token_ids), [], []
    while True:
        before = mx.zeros((1, 1), dtype=mx.int32)
        where = mx.array([[position]])
        mask = None if masks is None else masks.mask()
        scores = sampler.scores(logits, where, before, mask=mask)
        ranked = np.sort(np.array(scores[0, 0]).astype(np.float64))[::-1]
        token = int(mx.argmax(scores[0, 0]).item())
        tokens.append(token)
        gaps.append(float(ranked[0] - ranked[1]))
        if len(tokens) == wanted.sampling.max_tokens or token in stop_ids:
            return Plain(tuple(tokens), tuple(gaps))
        if masks is not None:
            masks.consume(token)
        sampler.count_sampled(mx.array([[token]]), mx.array([1]), where)
        logits = model.model(mx.array([[token]]), cache=cache)
        position += 1


@dataclass
class Ties:
    """Places where answers differ from the reference at a rounding tie: allowed, but listed."""

    places: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_accepted: Counter[str] = field(default_factory=Counter)  # drafts by source

    def check(self, name: str, got: Many[int], reference: Plain) -> None:
        """Check that an answer equals the reference, or first differs from it at a tie."""
        self.num_tokens += len(reference.tokens)
        if tuple(got) == reference.tokens:
            return
        pairs = enumerate(zip(got, reference.tokens))
        first = next((i for i, (a, b) in pairs if a != b), min(len(got), len(reference.tokens)))
        gap = reference.gaps[first] if first < len(reference.gaps) else float("inf")
        assert gap < TIE, (
            f"{name}: token {first} differs and is no tie (gap {gap:.3g}): "
            f"{list(got)} instead of {list(reference.tokens)}"
        )
        self.places.append(f"{name} at token {first}, gap {gap:.2e}")

    def report(self, what: str) -> None:
        """List the ties at the end of the run; more than one in a thousand tokens is a failure."""
        MEASURED.append(f"{what}: {len(self.places)} rounding ties in {self.num_tokens} tokens")
        if self.num_accepted:
            told = ", ".join(f"{source} {n}" for source, n in self.num_accepted.items())
            MEASURED.append(f"  drafts accepted: {told}")
        MEASURED.extend(f"  {place}" for place in self.places)
        assert len(self.places) <= 1 + self.num_tokens / 1000


def cheap_drafts() -> AdaptiveDrafts:
    """Returns a policy that drafts from the first step on: one draft costs a third of a step."""
    costs = StepCosts()
    costs.load_table(curve(MTP, 1, {0: 0.03, 1: 0.04, 4: 0.07}))
    return AdaptiveDrafts(costs)


def curve(kind: str, rows: int, costs: Mapping[float, float]) -> Table:
    """Returns a cost table: of `rows` rows by drafts per row, or of chunks by length."""
    return {CostKey(kind, rows, size): cost for size, cost in costs.items()}


class Driver:
    """An `EngineCore` stepped by hand. The model's head drafts unless another drafter is given.

    `stop_ids` end every request that doesn't ignore them, and the messages in prompts.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        vocab_size: int | None = None,
        stop_ids: tuple[int, ...] = (),
        config: EngineConfig | None = None,
        drafter: MTPDrafter | None = None,
        depth: DraftPolicy | None = None,
        host_sources: HostSources | None = None,
        min_gain: int = 4,
        store: PrefixStore | None = None,
        prefills: Callable[[EngineConfig], PrefillScheduler] = PrefillScheduler,
        links: Links | None = None,
        draft_ids: Many[int] | None = None,  # the only tokens that the head drafts
        vision_limit: int = MAX_EMBEDDED_BYTES,
    ) -> None:
        config = config or EngineConfig(num_draft_tokens=2)
        if depth is None:
            fixed = config.num_draft_tokens
            depth = cheap_drafts() if fixed == "auto" else FixedDrafts(fixed)
        self.vocab_size, self.stop_ids = vocab_size or model.vocab_size, stop_ids
        if links is not None:
            links.send(Begin(self.vocab_size, model.head is not None, draft_ids))
        if drafter is None and model.head is not None:
            drafter = MTPDrafter(model, draft_ids)
        size, bits = config.prefix_cache_size, config.kv_cache_quantization
        self.prefixes, make_runner = PrefixCache(size, bits, store), ModelRunner
        if links is not None:
            self.prefixes, make_runner = LeaderPrefixes(links, size, bits, store), LeaderRunner
        step = config.prefill_step_size
        exact = config.exact
        self.reuse = PrefixReuse(self.prefixes.tree, stop_ids, step, min_gain, exact=exact)
        self.host_sources = host_sources or HostSources(config.host_sources, 1 << 20)
        clear = self.host_sources.clear
        prompts = Prompts(model, config.max_decode_pause / 1e3, vision_limit)
        self.prompts = prompts
        given = drafter, self.vocab_size, self.prefixes, clear
        self.runner = make_runner(model, *given, prompts)
        if hasattr(drafter, "new_rows"):
            tell_rows(self.runner)
        self.scheduler = Scheduler(
            config,
            depth,
            self.reuse,
            host_sources=self.host_sources,
            prefills=prefills(config),
        )
        self.core = EngineCore(self.scheduler, self.runner, overlap=config.overlap)
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.has_read = threading.Event()
        if store is not None:
            store.on_read = self.has_read.set

    def add(self, wanted: Request) -> Sequence:
        own = () if wanted.sampling.ignore_eos else self.stop_ids
        stops = (*own, *wanted.sampling.stop_token_ids)
        sequence = Sequence(wanted, stops, wanted.sampling.max_tokens)
        self.outputs[wanted.request_id] = []
        self.core.scheduler.add(sequence)
        return sequence

    def step(self) -> list[RequestOutput]:
        outputs = self.core.step()
        for output in outputs:
            self.outputs[output.request_id].append(output)
        return outputs

    def run(self, limit: int = 10_000) -> dict[str, list[int]]:
        """Step until idle; returns the tokens by request."""
        for _ in range(limit):
            if self.core.idle:
                return {name: self.tokens(name) for name in self.outputs}
            if self.core.seconds_to_wait:
                assert self.has_read.wait(self.core.seconds_to_wait)
            self.has_read.clear()
            self.step()
        raise AssertionError("the engine did not become idle")

    def run_arrivals(
        self, arrivals: Mapping[int, Many[Request]], cancels: Mapping[int, Many[str]] | None = None
    ) -> dict[str, list[int]]:
        """Run requests that arrive, and are cancelled, before the given steps."""
        cancels = cancels or {}
        for number in range(max([*arrivals, *cancels, 0]) + 1):
            for wanted in arrivals.get(number, ()):
                self.add(wanted)
            for name in cancels.get(number, ()):
                self.core.scheduler.cancel(name)
            self.step()
        return self.run()

    def tokens(self, name: str) -> list[int]:
        return [t for output in self.outputs[name] for t in output.token_ids]

    def reused(self, name: str) -> int:
        return sum(output.num_reused_tokens for output in self.outputs[name])

    def reason(self, name: str) -> str | None:
        return self.outputs[name][-1].finish_reason


def tell_rows(runner: ModelRunner) -> None:
    """Make the runner set the drafter's `new_rows`, the request ids, before each `make_state`."""
    original = runner._prefill

    def prefill(chunk):
        runner._drafter.new_rows = [row.sequence.request_id for row in chunk]
        return original(chunk)

    runner._prefill = prefill


class OracleState:
    """The known text of each row: int32 [B, L], the token at each absolute position."""

    def __init__(self, known: mx.array) -> None:
        self.known = known

    def select(self, rows: mx.array) -> Self:
        return OracleState(self.known[rows])

    def extend(self, other: Self) -> None:
        self.known = mx.concatenate([self.known, other.known])

    def settle(self, cache: BatchCache) -> None:
        pass

    def arrays(self) -> list[mx.array]:
        return [self.known]


class OracleDrafter:
    """Drafts the known text of each request, with right tokens at a share `rate` of positions."""

    def __init__(
        self, answers: Mapping[str, Many[int]], vocab_size: int, rate: float, length: int = 256
    ) -> None:
        self.answers, self.vocab_size = answers, vocab_size
        self.rate, self.length = rate, length
        self.new_rows: list[str] = []  # see `tell_rows`

    def make_state(self, cache) -> OracleState:
        table = np.zeros((len(self.new_rows), self.length), dtype=np.int32)
        for row, name in enumerate(self.new_rows):
            table[row, : len(self.answers[name])] = self.answers[name]
        return OracleState(mx.array(table))

    def propose(self, state, window: Computed, num_drafts: Many[int], sampler) -> mx.array:
        position = (window.packing.positions[window.last] + 2)[:, None] + mx.arange(max(num_drafts))
        where = mx.minimum(position, self.length - 1)
        right = mx.take_along_axis(state.known, where, axis=1)
        spoiled = (right + 1) % self.vocab_size
        mixed = (position * 7919) % 1000 < int(self.rate * 1000)
        return mx.where(mixed, right, spoiled).astype(mx.int32)
