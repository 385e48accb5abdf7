"""Engines with different drafts, which answer the same prompts of the bundled model in turns."""

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from benchmarks import Row, Rows, row
from benchmarks.cores import TellingDrafter
from benchmarks.shapes import build, shape_of
from benchmarks.timed import take_turns
from mlx_mtp.bench.answer import TimedAnswer
from mlx_mtp.bench.arguments import CALIBRATION_SECONDS
from mlx_mtp.bench.measure import Asking, Summary, measure, summarize
from mlx_mtp.bench.offline import EngineSubject
from mlx_mtp.bench.prompts import Prompt, PromptSource
from mlx_mtp.build import build_engine
from mlx_mtp.cache.packing import Packing
from mlx_mtp.config import DraftTokens, EngineConfig
from mlx_mtp.engine.engine import Engine
from mlx_mtp.errors import UsageError
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import DraftVocabulary, LoadedModel
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.speculative.drafter import Computed, MTPDrafter
from mlx_mtp.text.tokenizer import Tokenizer

_OFF, _WHOLE = "off", "whole"
_SENTENCES = 5  # of a text to copy
_EVERY = 8  # sentence that an edit replaces
_MANY = 8  # drafts of a long recursion
_WAYS = {
    "greedy": SamplingParams(max_tokens=1, temperature=0.0),
    "sampled": SamplingParams(max_tokens=1, temperature=0.7, top_p=0.8, top_k=20),
}
Work = Callable[[int, Prompt], str]
"""The text of the n-th of some prompts at once, in place of a story's."""


def _engine(
    model: LoadedModel, tokenizer: Tokenizer, k: DraftTokens, rows: int, drafts: str, **more: Any
) -> Engine:
    config = EngineConfig(k, rows, drafts=drafts, calibration_seconds=CALIBRATION_SECONDS)
    return build_engine(model, config, tokenizer.vocab_size, tokenizer.eos_token_ids, **more)


class _Contender(EngineSubject):
    """An engine that does some work, and notes its tokens per second of processor time."""

    work: Work | None = None
    cpu_rates: list[float]

    def ask(self, prompts: Many[Prompt]) -> list[TimedAnswer]:
        """As its base; the other engines are idle meanwhile."""
        if self.work is not None:
            prompts = [p._replace(text=self.work(n, p)) for n, p in enumerate(prompts)]
        began = time.process_time()
        answers = super().ask(prompts)
        tokens = sum(answer.num_tokens for answer in answers)
        self.cpu_rates.append(tokens / (time.process_time() - began))
        return answers


def depth(
    rounds: int = 7,
    rows: tuple[int, ...] = (1, 4, 16),
    depths: tuple[int, ...] = (0, 1, 2, 3, 4),
    max_tokens: int = 128,
    work: Literal["story", "mix", "closed"] = "story",
    heads: Literal["own", "spoiled", "both"] = "both",
) -> Rows:
    """Tokens per second with MTP off, at fixed depths and with `auto`, without HTTP.

    Greedy answers of the bundled model; the contenders take turns, round after round, each with a
    fresh set of requests and the costs and acceptance that it has learned so far. Figures are
    medians of the rounds, ratios those to "off" in the same round. Contenders of a fixed depth
    draft with the head alone; "mtp" is `auto` without copies. Then `auto` over the best fixed
    depth: the best of one half of the rounds is compared in the other half. On a machine that
    others use too, OPENBLAS_NUM_THREADS=1 takes most of the noise.

    Args:
        rounds: at least 2
        rows: answers at once
        work: stories, stories beside copies of a text, or tasks with one right answer
        heads: the model's own, or one with random weights, of whose drafts none is right
    """
    if rounds < 2:
        raise UsageError("--rounds is at least 2: auto is compared with the best of other rounds.")
    for head in ("own", "spoiled") if heads == "both" else (heads,):
        model = load_model(BUNDLED_MODEL, enable_mtp=True)
        names = [*map(str, depths), "mtp", "auto"]
        if head == "spoiled":
            _spoil(model)
            names = ["0", "1", "auto"]
        best = []
        for count in rows:
            figures = _in_turns(model, names, count, rounds, max_tokens, _WORK[work])
            best.append(row("head | rows", head, count) | _over_best(figures))
            for name, of in figures.items():
                cpu = [a / b for a, b in zip(of["cpu_rates"], figures[_OFF]["cpu_rates"])]
                ratios = of["rate_ratio"], statistics.median(cpu), of["accepted"]
                columns = "head | rows | depth | tokens/s | ratio | by processor time | accepted"
                yield row(f"{columns} | _all", head, count, name, of["rate"], *ratios, of)
        yield from best


def _in_turns(
    model: LoadedModel, names: Many[str], rows: int, rounds: int, max_tokens: int, work: Work | None
) -> dict[str, Summary]:
    """By name what `summarize` has of a contender, and its `rates` and `cpu_rates` by round."""
    tokenizer, contenders = Tokenizer.load(BUNDLED_MODEL), list[_Contender]()
    with contextlib.ExitStack() as stack:
        for name in (_OFF, *names):
            k: DraftTokens = 0 if name == _OFF else int(name) if name.isdigit() else "auto"
            drafts = "mtp" if name == "mtp" else "mtp,copy"
            trunk = model.without_head() if name == _OFF else model
            engine = _engine(trunk, tokenizer, k, rows, drafts)
            contender = _Contender(name, engine, tokenizer, Asking(max_tokens))
            contender.work, contender.cpu_rates = work, []
            contenders.append(stack.enter_context(contender))
        waves = measure(contenders, [("story", rows)], rounds, warmups=1, seed=0)
    figures = {each["subject"]: each for each in summarize(waves, [_OFF, *names], _OFF)}
    for contender in contenders:
        rates = [wave.tokens_per_second for wave in waves if wave.subject == contender.name]
        figures[contender.name] |= {"rates": rates, "cpu_rates": contender.cpu_rates[-rounds:]}
    return figures


def _over_best(figures: Mapping[str, Summary]) -> Row:
    """The ratio of auto to the best depth in all rounds, by wall time and by processor time.

    The best of several depths is also the luckiest in the rounds that it was chosen by. So half of
    the rounds is compared with the depth that was best in the other half, and the other way round.
    """
    depths = [name for name in figures if name not in ("auto", "mtp")]
    rounds = range(len(figures["auto"]["rates"]))
    compared_rates: dict[str, list[tuple[float, float]]] = {"rates": [], "cpu_rates": []}
    chosen = []
    for compared, others in itertools.permutations((rounds[::2], rounds[1::2])):
        speeds = {each: sum(figures[each]["cpu_rates"][n] for n in others) for each in depths}
        best = max(depths, key=lambda each: speeds[each])
        chosen.append(best)
        for kind, pairs in compared_rates.items():
            pairs += [(figures["auto"][kind][n], figures[best][kind][n]) for n in compared]
    line = row("best depth", " and ".join(dict.fromkeys(chosen)))
    for name, pairs in zip(("auto over it", "by processor time"), compared_rates.values()):
        ours, theirs = (statistics.harmonic_mean(rates) for rates in zip(*pairs))
        line[name] = ours / theirs
    return line


def _spoil(model: LoadedModel) -> None:
    """Replace the head's matrices by random ones of the same size."""
    assert model.head is not None
    mx.random.seed(0)
    weights = [
        (name, mx.random.normal(value.shape, dtype=value.dtype) * mx.std(value))
        for name, value in tree_flatten(model.head.parameters())
        if value.ndim > 1
    ]
    model.head.update(tree_unflatten(weights))
    mx.eval(model.head.parameters())  # Here: the engines have threads of their own.


def _mix(number: int, prompt: Prompt) -> str:
    """Every other story is a text to copy."""
    if number % 2:
        return prompt.text
    (source,) = PromptSource(prompt.seed).next("medium", 1)
    return "Repeat this text exactly: " + ". ".join(source.text.split(". ")[:_SENTENCES]) + "."


def _closed(number: int, prompt: Prompt) -> str:
    """Sorting and sums, with numbers that depend on the prompt."""
    chance = random.Random(prompt.seed)
    first, second, *more = (chance.randint(1, 99) for _ in range(5))
    if number % 2:
        return f"Sort these numbers: {', '.join(map(str, (first, second, *more)))}."
    return f"What is {first} + {second}?"


_WORK: dict[str, Work | None] = {"story": None, "mix": _mix, "closed": _closed}


def draft_vocab(
    shape: str = "Qwen3.5-27B",
    tiny: bool = False,
    sizes: tuple[int, ...] = (8192, 16384, 32768, 65536),
    rows: tuple[int, ...] = (1, 4, 16, 32),
    rounds: int = 5,
) -> Rows:
    """Milliseconds of one draft with a reduced draft vocabulary, on a GPU.

    A pass of the head, lm_head and the draw: what eight drafts take more than one does, medians of
    the rounds. A model with random weights has a head, embedding and lm_head of the full shape; its
    trunk, which drafts don't use, has four layers. What acceptance a smaller vocabulary loses only
    a real model can tell: `mlx-mtp bench offline --mtp-draft-vocab N`.

    Args:
        sizes: of the vocabularies beside the whole one
        rows: that draft at once
    """
    model, _ = build(shape_of(shape, 4, tiny))
    heads = {_WHOLE: None, **{str(size): DraftVocabulary(model, range(size)) for size in sizes}}
    for count, (way, params) in itertools.product(rows, _WAYS.items()):
        calls = {
            (name, number): _draft(model, heads[name], count, params, number)
            for name, number in itertools.product(heads, (1, _MANY))
        }
        times, ms = take_turns(calls, rounds), dict[str, float]()
        for name in heads:
            differences = [b - a for a, b in zip(times[name, 1], times[name, _MANY])]
            ms[name] = 1e3 * statistics.median(differences) / (_MANY - 1)
            figures = ms[name], ms[name] / ms[_WHOLE]
            yield row("rows | draw | vocabulary | ms | of the whole", count, way, name, *figures)
        mx.clear_cache()


def _draft(
    model: LoadedModel, head: DraftVocabulary | None, rows: int, params: SamplingParams, count: int
) -> Callable[[], list[mx.array]]:
    """Drafts of the drafter itself, at position 512."""
    drafter = MTPDrafter(model, head)
    cache = model.make_cache(rows)
    state = drafter.make_state(cache)
    sampler = Sampler([params] * rows, [[0]] * rows, model.vocab_size)
    hidden_size = model.causal_lm.args.hidden_size
    dtype = model.causal_lm.model.norm.weight.dtype
    hidden = mx.random.normal((rows, hidden_size), key=mx.random.key(0)).astype(dtype)
    targets, ones = mx.full((rows,), 17, dtype=mx.int32), mx.ones(rows, dtype=mx.int32)

    def step() -> list[mx.array]:
        cache.reserve([513 + count] * rows)
        packing = Packing(cache.layout, 512 * ones, [1] * rows)
        window = Computed(hidden, targets, slice(None), packing, cache)
        drafts = drafter.propose(state, window, [count] * rows, sampler)
        return [drafts, *state.arrays(), *cache.arrays()]

    return step


def copying(
    tokens: tuple[int, ...] = (500, 1000, 2000), rate: float = 0.75, rounds: int = 2
) -> Rows:
    """Tokens per second of copies and edits of long texts, copies beside the head over the head.

    The bundled model computes every step, in the engine, but can't copy a text of more than some
    sentences by itself. So what it draws is replaced by the answer, and the head's drafts by the
    right ones at a given rate; what is copied is the engine's own. One request at a time; the
    contenders take turns.

    Args:
        tokens: about so many in a text
        rate: share of the head's drafts that are right
    """
    tokenizer, model = Tokenizer.load(BUNDLED_MODEL), load_model(BUNDLED_MODEL, enable_mtp=True)
    teller, draw = TellingDrafter(model, [[0]], rate), Sampler.draw

    def forced(sampler: Sampler, logits: mx.array, at: mx.array, *more: Any, **also: Any) -> Any:
        drawn = draw(sampler, logits, at, *more, **also)
        return mx.where(drawn >= 0, teller.at(at, sampler), drawn)  # Computed all the same.

    Sampler.draw = forced  # type: ignore[assignment, method-assign]
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, Sampler, "draw", draw)
        engines = []
        for name in ("mtp", "mtp,copy"):
            engine = _engine(model, tokenizer, "auto", 1, name, drafter=teller)
            engines.append(stack.enter_context(EngineSubject(name, engine, tokenizer, Asking(64))))
        ratios = []
        for number, kind, count in itertools.product(range(-1, rounds), ("copy", "edit"), tokens):
            before, edited = _text_and_edit(number + 1, count, tokenizer)
            prompt = tokenizer.encode_chat([{"role": "user", "content": f"{kind}: {before}"}])
            answer = tokenizer.encode(before if kind == "copy" else edited)
            teller.tell([[*prompt, *answer, 0]])
            sampling = SamplingParams(len(answer), temperature=0.0, ignore_eos=True)
            rates = {}
            for subject in engines[:: 1 if number % 2 else -1]:
                ((timed, outputs),) = subject.ask_token_ids([(prompt, sampling)])
                assert [t for out in outputs for t in out.token_ids] == list(answer)
                rates[subject.name] = timed.decoding_rate or 0.0
            if number >= 0:  # The first round warms up.
                ratios.append(rates["mtp,copy"] / rates["mtp"])
                figures = rates["mtp"], rates["mtp,copy"], ratios[-1]
                names = "round | answer | tokens | mtp, tokens/s | mtp,copy, tokens/s | ratio"
                yield row(names, number + 1, kind, count, *figures)
        yield f"mtp,copy over mtp: {statistics.median(ratios):.3f}, the median of all"


def _text_and_edit(seed: int, count: int, tokenizer: Tokenizer) -> tuple[str, str]:
    """A text of about so many tokens, and the same with other sentences here and there."""
    endless, sentences, length = _sentences(PromptSource(seed)), list[str](), 0
    while length < count:
        sentences.append(next(endless))
        length += len(tokenizer.encode(sentences[-1]))
    edited = [next(endless) if n % _EVERY == 3 else each for n, each in enumerate(sentences)]
    return " ".join(sentences), " ".join(edited)


def _sentences(source: PromptSource) -> Iterator[str]:
    while True:
        for text in source.next("medium", 1)[0].text.split("\n\n")[0].split(". "):
            yield text.rstrip(".") + "."
