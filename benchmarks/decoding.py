"""Decode steps of full-shape models with random weights; acceptance is drawn at random."""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator

from benchmarks import Row, Rows, row
from benchmarks.cores import ENDLESS, MakeRunner, core_of, decode, random_ids, row_of
from benchmarks.shapes import build, shape_of
from benchmarks.timed import Profile, profiled, shares, within
from mlx_mtp.distributed import all_reduce, world
from mlx_mtp.engine import runner as runner_module
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.memory import footprint
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.models.family import text_config
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel, module_nbytes
from mlx_mtp.ranks.follower import follow
from mlx_mtp.ranks.leader import LeaderPrefixes, LeaderRunner
from mlx_mtp.ranks.links import Link, Links, connect
from mlx_mtp.ranks.messages import Begin
from mlx_mtp.speculative.drafter import MTPDrafter
from mlx_mtp.speculative.verify import AcceptResult, verify_window

_PROMPT = 64  # prompt tokens that are really computed
_WARM_STEPS = 16  # steps of a new shape compile kernels, even after the first few
_PROFILED_STEPS = 4
_PARTS = ("products", "experts", "attention")  # parts of the GPU's time that are shown
_MLX_LM_CONTEXT = 512  # longest compared; mlx-lm's rows are shorter, which favours it


class Steps(NamedTuple):
    """Measurements of decode steps."""

    ms: float  # median of a step
    rate: float  # tokens per second of all rows
    per_step: float  # tokens per step and row
    nbytes: int = 0  # of the KV cache
    profile: Profile | None = None  # of `_PROFILED_STEPS` steps

    def columns(self, rows: int, depth: int | None, acceptance: float) -> Row:
        """Returns table columns; "expected" is the long-run tokens per second at `acceptance`."""
        expected = rows * sum(acceptance**n for n in range((depth or 0) + 1)) / self.ms * 1e3
        names = "ms a step | tokens a step | tokens/s | expected"
        return row(names, self.ms, self.per_step, self.rate, expected)


@contextlib.contextmanager
def _accepting(rate: float) -> Iterator[None]:
    """Makes each draft agree with its target with probability `rate`, whatever the target is."""
    keys = iter(mx.random.split(mx.random.key(0), 1 << 16))  # one per step

    def verify(targets: mx.array, window: mx.array, **limits: mx.array) -> AcceptResult:
        drafts = window[:, 1:]
        if drafts.size:
            agreed = (mx.random.uniform(shape=drafts.shape, key=next(keys)) < rate) & (drafts >= 0)
            other = mx.where(targets[:, :-1] == drafts, targets[:, :-1] ^ 1, targets[:, :-1])
            forged = mx.where(agreed, drafts, other)
            targets = mx.concatenate([forged, targets[:, -1:]], axis=1)
        return verify_window(targets, window, **limits)

    runner_module.verify_window = verify  # type: ignore[assignment, attr-defined]
    try:
        yield
    finally:
        runner_module.verify_window = verify_window  # type: ignore[attr-defined]


def decoding_core(
    model: LoadedModel, *, depth: int | None, contexts: list[int], **how: Any
) -> EngineCore:
    """Returns a core of prefilled rows, stretched to `contexts` tokens; `how` is for `core_of`.

    Most of the KV that the rows attend to is zero.
    """
    core = core_of(model, depth, max_num_seqs=len(contexts), prefill_step_size=512, **how)
    prompts = [random_ids(model.vocab_size, _PROMPT, n) for n in range(len(contexts))]
    rows = [row_of(str(n), ids) for n, ids in enumerate(prompts)]
    decode(core, rows)
    for _ in range(2):
        core.step()
    batch = core.runner.batches.decoding
    assert batch is not None
    more = {each: context - _PROMPT for each, context in zip(rows, contexts)}
    batch.cache.offset = batch.cache.offset + mx.array([more[each] for each in batch.sequences])
    for each in rows:
        each.num_cached += more[each]
        each.max_cached += more[each]
    return core


def _timed(step: Callable[[], Any], steps: int) -> tuple[list[float], list[Any]]:
    """Returns the seconds and the results of `steps` steps, after steps that compile kernels."""
    for _ in range(_WARM_STEPS):
        step()
    times, results = [time.perf_counter()], []
    for _ in range(steps):
        results.append(step())
        times.append(time.perf_counter())
    return [b - a for a, b in pairwise(times)], results


def _measure(
    model: LoadedModel, depth: int | None, contexts: list[int], steps: int, **how: Any
) -> Steps:
    """Measure steps of rows of `contexts` tokens; `profile=True` in `how` adds the GPU's time."""
    profile = how.pop("profile", False)
    core = decoding_core(model, depth=depth, contexts=contexts, **how)
    times, results = _timed(core.step, steps)
    tokens = sum(len(output.token_ids) for outputs in results for output in outputs)
    batch = core.runner.batches.decoding
    assert batch is not None
    nbytes = sum(a.nbytes for c in batch.cache.kv_caches() for a in c.arrays)
    ms, per_step = 1e3 * statistics.median(times), tokens / steps / len(contexts)
    run = profiled(lambda: [core.step() for _ in range(_PROFILED_STEPS)]) if profile else None
    mx.clear_cache()
    return Steps(ms, tokens / sum(times), per_step, nbytes, run)


def _measure_mlx_lm(plain: nn.Module, vocab: int, rows: int, steps: int) -> Steps:
    """Measure steps of mlx-lm's BatchGenerator; its rate is from the median step, which favours it.

    Prompts are as short as ours before stretching, as mlx-lm loops over their tokens on CUDA.
    """
    generator = BatchGenerator(plain, max_tokens=ENDLESS, completion_batch_size=rows)
    generator.insert([random_ids(vocab, _PROMPT, number) for number in range(rows)])
    while len(generator.next()[1]) < rows:
        pass
    median = statistics.median(_timed(generator.next, steps)[0])
    generator.close()
    mx.clear_cache()
    return Steps(1e3 * median, rows / median, 1.0)


def full_shape(
    shape: tuple[str, ...] = ("Qwen3-Next-80B-A3B-Instruct", "Qwen3.5-27B"),
    layers: int = 0,
    tiny: bool = False,
    cases: tuple[tuple[int, int], ...] = ((1, 512), (16, 512), (16, 32768), (32, 512)),
    depths: tuple[int, ...] = (3,),
    acceptance: float = 0.9,
    steps: int = 24,
    mlx_lm: bool = True,
    profile: bool = False,
    bandwidth: float = 4.3,
    seconds: float = 540,
) -> Rows:
    """Decode steps of full-shape models with random weights beside mlx-lm's, on a GPU.

    Each case runs mlx-lm's BatchGenerator on the same weights, this engine without a head, and this
    engine with drafts. Drafts of random weights are never right, so acceptance is drawn at the
    given rate: drafting, verification and rejection are computed as usual, and the text is
    meaningless. Over 24 steps the number of accepted drafts varies by some 10%, so "expected" is
    the tokens per second at the rate's long-run mean. "added" is the difference to a step of the
    same number of rows at the first context. --profile adds the launches and the GPU's milliseconds
    of a step by part, and, without drafts, the time of the products over that of reading their
    weights once. The bytes that experts read are not known here, because with random weights the
    tokens of a step choose similar experts: see the scenario `products`.

    Args:
        cases: rows x context
        depths: drafts per step
        steps: number of measured steps
        mlx_lm: measure mlx-lm too
    """
    names: dict[str, int | None] = {"mlx-lm": 0, "off": None}
    names |= {f"k = {depth}": depth for depth in depths}
    with _accepting(acceptance):
        for each, end in shares(seconds, shape):
            model, plain = build(shape_of(each, layers, tiny))
            yield f"{each}, {mx.get_active_memory() / 1e9:.1f} GB"
            measured: dict[tuple[int, int, str], Steps] = {}
            for rows, context, name in within(end, [(*c, n) for c in cases for n in names]):
                if name != "mlx-lm":
                    contexts = [context] * rows
                    result = _measure(model, names[name], contexts, steps, profile=profile)
                elif mlx_lm and context <= _MLX_LM_CONTEXT:
                    result = _measure_mlx_lm(plain, model.vocab_size, rows, steps)
                else:
                    continue
                measured[rows, context, name] = result
                line = row("shape | rows | context | engine", each, rows, context, name)
                line |= result.columns(rows, names[name], acceptance)
                theirs, off = (measured.get((rows, context, n)) for n in ("mlx-lm", "off"))
                first = next(of for (r, _, n), of in measured.items() if (r, n) == (rows, name))
                line["over mlx-lm"] = line["expected"] / theirs.rate if theirs else None
                line["step over off"] = result.ms / off.ms if off else None
                line["added, ms"] = result.ms - first.ms
                if result.profile is not None:
                    ms = {part: ms / _PROFILED_STEPS for part, ms in result.profile.parts.items()}
                    line["launches"] = result.profile.num_launches / _PROFILED_STEPS
                    line |= {"GPU, ms": sum(ms.values())} | {part: ms[part] for part in _PARTS}
                    once = _product_bytes(model) / bandwidth / 1e9
                    line["over reading"] = ms["products"] / once if name == "off" else None
                yield line


def _product_bytes(model: LoadedModel) -> int:
    """Returns the bytes of weights that the matrix products of a step without a head read."""
    nbytes = 0
    for module in model.causal_lm.modules():
        if isinstance(module, nn.QuantizedLinear) or module is model.output_layer:
            nbytes += module_nbytes(module)
        if getattr(module, "joins_shared", False):  # Computed with the routed experts.
            nbytes -= module_nbytes(module.shared_expert)
    return nbytes


def rows(
    shape: str | None = None,
    layers: int = 0,
    tiny: bool = False,
    rows: tuple[int, ...] = (1, 3, 7, 15),
    short: int = 512,
    long: tuple[int, ...] = (8192, 24_576, 61_440),
    depths: tuple[int, ...] = (0, 2),
    acceptance: float = 0.9,
    steps: int = 16,
) -> Rows:
    """Decode steps of short rows beside a long row, against the steps of each alone.

    The rows are of the bundled model, or of a shape on a GPU. Ideal is a step of the short rows
    alone followed by a step of the long row alone. "KV" is the allocated KV cache, and "of its
    rows" its ratio to the KV that the rows hold, each rounded up to 256 tokens. Rows are stretched
    to their lengths, so the text is meaningless; acceptance is drawn at random.

    Args:
        rows: number of short rows
        short: tokens of a short row
        long: tokens of the long row
        depths: drafts per step
        steps: number of measured steps
    """
    model = load_model(BUNDLED_MODEL, enable_mtp=True)
    if shape is not None:
        model, _ = build(shape_of(shape, layers, tiny))
    overlap = mx.default_device() != mx.cpu
    with _accepting(acceptance):
        for depth, length, count in product(depths, long, rows):
            contexts = {"short": [short] * count, "long": [length]}
            contexts["both"] = [*contexts["short"], length]
            of = {n: _measure(model, depth, c, steps, overlap=overlap) for n, c in contexts.items()}
            line = row("short rows | long row | depth", count, length, depth)
            for name, result in of.items():
                line |= row(f"{name}, ms | {name}, tokens/s", result.ms, result.rate)
            ideal, nbytes = of["short"].ms + of["long"].ms, of["both"].nbytes
            caches = footprint(model, depth).caches
            tokens = sum(-(-(n + steps) // 256) * 256 for n in contexts["both"])  # at the end
            held = tokens * (caches.kv_per_token + caches.head_kv_per_token)
            figures = ideal / of["both"].ms, nbytes / 1e6, nbytes / held
            yield line | row("of ideal | KV, MB | of its rows", *figures)


def ranks(
    shape: str = "Qwen3.5-27B",
    layers: int = 0,
    tiny: bool = False,
    rows: tuple[int, ...] = (1, 4, 16),
    depths: tuple[int, ...] = (3, 1, 2),
    acceptance: float = 0.9,
    steps: int = 16,
    seconds: float = 540,
) -> Rows:
    """Decode steps of a full-shape model with random weights on one or several ranks.

    mlx.launch -n 2 --backend nccl -- python -m benchmarks ranks --shape Qwen3.5-397B-A17B

    Without mlx.launch one rank is measured. Rank 0 measures, and the other ranks follow it.
    Acceptance is drawn as in `full_shape`.

    Args:
        rows: number of decoding rows
        depths: drafts per step; MTP off is measured first
        steps: number of measured steps
    """
    end = time.perf_counter() + seconds
    mx.random.seed(0)  # Every rank takes its shard of the same model.
    config, mine = shape_of(shape, layers, tiny), world()
    inner = text_config(config)
    yield f"rank {mine.rank} of {mine.size} makes its weights"
    model = build(config, mine.rank, mine.size)[0]
    make_runner: MakeRunner = ModelRunner
    if mine.size > 1:
        links = connect(mine, {"shape": shape}, 0, sys.exit)
        sums = _time_sums(inner["hidden_size"])
        if isinstance(links, Link):
            follow(model, links)
            return
        make_runner = partial(_led, links)
        yield f"a sum over ranks: {sums:.0f} us"
    memory = f"{mx.get_active_memory() / 1e9:.1f} GB a rank"
    yield f"{shape}, {inner['num_hidden_layers']} layers, {mine.size} ranks: {memory}"
    with _accepting(acceptance):
        for depth, count in within(end, [*product((None, *depths), rows)]):
            result = _measure(model, depth, [_PROMPT] * count, steps, make_runner=make_runner)
            line = row("rows | engine", count, "off" if depth is None else f"k = {depth}")
            yield line | result.columns(count, depth, acceptance)
    if mine.size > 1:
        links.close()
        time.sleep(1.0)  # Lets the other ranks read the end of their links.


def _led(
    links: Links, model: LoadedModel, drafter: MTPDrafter | None, vocab_size: int
) -> ModelRunner:
    links.send(Begin(vocab_size, drafter is not None, None))
    return LeaderRunner(model, drafter, vocab_size, LeaderPrefixes(links))


def _time_sums(hidden: int, count: int = 200) -> float:
    """Returns the microseconds of one all-reduce of a row's hidden state, in a dependent chain."""
    x = mx.ones((1, hidden), dtype=mx.bfloat16)
    for _ in range(2):
        began = time.perf_counter()
        for _ in range(count):
            x = all_reduce(x) * 0.5
        mx.eval(x)
    return (time.perf_counter() - began) / count * 1e6
