"""The cost of drafts with a reduced vocabulary, and the gain of copied drafts over the head's."""

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from benchmarks import Rows, row
from benchmarks.cores import TellingDrafter, telling
from benchmarks.shapes import build, shape_of
from benchmarks.timed import take_turns
from mlx_mtp.bench.arguments import CALIBRATION_SECONDS
from mlx_mtp.bench.measure import Asking
from mlx_mtp.bench.offline import EngineSubject
from mlx_mtp.bench.prompts import PromptSource
from mlx_mtp.build import build_engine
from mlx_mtp.cache.packing import Packing
from mlx_mtp.config import DraftTokens, EngineConfig
from mlx_mtp.engine.engine import Engine
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.speculative.drafter import Computed, MTPDrafter
from mlx_mtp.text.tokenizer import Tokenizer

_WHOLE = "whole"
_EVERY = 8  # an edit replaces one of this many sentences
_MANY = 8  # drafts in the longer of the two timed calls
_WAYS = {
    "greedy": SamplingParams(max_tokens=1, temperature=0.0),
    "sampled": SamplingParams(max_tokens=1, temperature=0.7, top_p=0.8, top_k=20),
}


def _engine(
    model: LoadedModel, tokenizer: Tokenizer, k: DraftTokens, rows: int, drafts: str, **more: Any
) -> Engine:
    config = EngineConfig(k, rows, drafts=drafts, calibration_seconds=CALIBRATION_SECONDS)
    return build_engine(model, config, tokenizer.vocab_size, tokenizer.eos_token_ids, **more)


def draft_vocab(
    shape: str = "Qwen3.5-27B",
    tiny: bool = False,
    sizes: tuple[int, ...] = (8192, 16384, 32768, 65536),
    rows: tuple[int, ...] = (1, 4, 16, 32),
    rounds: int = 5,
) -> Rows:
    """Milliseconds of one draft with a reduced draft vocabulary, on a GPU.

    A draft is a pass of the head, lm_head and the draw: a seventh of the difference between eight
    drafts and one, as the median of the rounds. The model has random weights, and the full shape
    except for its trunk, which drafts don't use: it has four layers. Only a real model shows how
    much acceptance a smaller vocabulary loses: `mlx-mtp bench offline --mtp-draft-vocab N`.

    Args:
        sizes: draft vocabulary sizes to measure beside the whole vocabulary
        rows: number of rows that draft together
    """
    model, _ = build(shape_of(shape, 4, tiny))
    drafters = {_WHOLE: MTPDrafter(model)}
    drafters |= {str(size): MTPDrafter(model, range(size)) for size in sizes}
    for count, (way, params) in itertools.product(rows, _WAYS.items()):
        calls = {
            (name, number): _draft(model, drafters[name], count, params, number)
            for name, number in itertools.product(drafters, (1, _MANY))
        }
        times, ms = take_turns(calls, rounds), dict[str, float]()
        for name in drafters:
            differences = [b - a for a, b in zip(times[name, 1], times[name, _MANY])]
            ms[name] = 1e3 * statistics.median(differences) / (_MANY - 1)
            figures = ms[name], ms[name] / ms[_WHOLE]
            yield row("rows | draw | vocabulary | ms | of the whole", count, way, name, *figures)
        mx.clear_cache()


def _draft(
    model: LoadedModel, drafter: MTPDrafter, rows: int, params: SamplingParams, count: int
) -> Callable[[], list[mx.array]]:
    """Returns a call that drafts `count` tokens per row at position 512, with the real drafter."""
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
    """Tokens per second of copying and editing long texts, with and without copied drafts.

    The engine computes every step with the bundled model, which can't copy more than a few
    sentences by itself. So its sampled tokens are replaced by the known answer, and the head's
    drafts by right ones at a given rate; the copied drafts are the engine's own. Requests run one
    at a time, and the engines take turns.

    Args:
        tokens: approximate tokens of a text
        rate: share of the head's drafts that are right
    """
    tokenizer, model = Tokenizer.load(BUNDLED_MODEL), load_model(BUNDLED_MODEL, enable_mtp=True)
    teller = TellingDrafter(model, [[0]], rate)
    with telling(teller), contextlib.ExitStack() as stack:
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
    """Returns a text of about `count` tokens, and a copy in which some sentences are replaced."""
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
