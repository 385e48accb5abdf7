"""Prompts: the time to their first token, and the pauses that they cause in running streams."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.generate import generate_step
from mlx_lm.models.switch_layers import SwitchGLU

from benchmarks import Row, Rows, row
from benchmarks.cores import core_of, listening, random_ids, row_of
from benchmarks.shapes import build, shape_of
from benchmarks.timed import profiled, shares, within
from mlx_mtp.build import build_engine
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine import scheduler
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel

_MLX_LM_STEP = 512
_SHAPES = ("Qwen3.5-27B", "Qwen3-Next-80B-A3B-Instruct", "Qwen3.6-35B-A3B")
_PROMPTS = (8192, 32768, 60_000, 1024)  # tokens, the most important first
_TOGETHER = 8
_ALONE_SECONDS = 2.0


def prefill(
    shape: tuple[str, ...] = (),
    layers: int = 8,
    tiny: bool = False,
    prompts: tuple[int, ...] = (),
    steps: int = 2048,
    profile: bool = False,
    seconds: float = 540,
) -> Rows:
    """Time to first token: full-shape models on a GPU, or the bundled model and mlx-lm on a CPU.

    On a GPU: random weights, one prompt alone and then eight together. A few layers are enough, of
    both kinds in the model's proportion, because the time per layer is what counts. "products" is
    the time of the layers' matrix products alone for the same number of tokens, and "ratio" the
    whole time over it. --profile shows the GPU's milliseconds by part; --json has those of each
    kernel. On a CPU: the bundled model beside mlx-lm's loop on the same weights, both in chunks of
    512 tokens; ours are shorter where that is faster.

    Args:
        shape: names of published shapes (default on a GPU: the 27B, the 80B and the 35B)
        prompts: tokens of a prompt (default: 1,024 to 60,000, on a CPU 2,000 and 20,000)
        steps: tokens of a chunk
    """
    if not shape and mx.default_device() != mx.gpu:
        yield from _beside_mlx_lm(prompts or (2000, 20_000))
        return
    for each, end in shares(seconds, shape or _SHAPES):
        model = build(shape_of(each, layers, tiny))[0]
        yield f"{each}, {len(model.causal_lm.model.layers)} layers, no head"
        yield from _full_shape(model, prompts or _PROMPTS, steps, profile, end)


def _full_shape(
    model: LoadedModel, prompts: tuple[int, ...], step: int, profile: bool, end: float
) -> Iterator[Row]:
    core = core_of(model, None, prefill_step_size=step)
    first_token_seconds(core, random_ids(model.vocab_size, 2 * step, 0))  # compiles kernels
    alone: dict[int, float] = {}  # seconds of the products, by tokens of a chunk
    for count, tokens in within(end, [*itertools.product((1, _TOGETHER), prompts)]):
        total = count * tokens
        chunk = min(step, total)
        if chunk not in alone:
            alone[chunk] = _products_seconds(model, chunk)
        ids, products = random_ids(model.vocab_size, tokens, tokens), alone[chunk] * total / chunk
        seconds = min(first_token_seconds(core, ids, count) for _ in range(2 if count == 1 else 1))
        figures = 1e3 * seconds, total / seconds, 1e3 * products, seconds / products
        names = "chunk | prompts | tokens | ms | tokens/s | products | ratio"
        line, run = row(names, step, count, tokens, *figures), None
        if profile and count == 1:
            run = profiled(lambda: first_token_seconds(core, ids))  # noqa: B023
        if run is not None:
            line |= {f"{part}, GPU ms": ms for part, ms in run.parts.items()}
            line |= {"_kernels": run.kernels}
        yield line
        mx.clear_cache()


def first_token_seconds(core: EngineCore, ids: list[int], count: int = 1) -> float:
    """Returns the seconds from adding `count` prompts to the last one's first token."""
    began = time.perf_counter()
    for number in range(count):
        core.scheduler.add(row_of(f"prompt {number}", ids, 1))
    while count:
        count -= sum(bool(output.token_ids) for output in core.step())
    seconds = time.perf_counter() - began
    while not core.idle:
        core.step()
    return seconds


def _products_seconds(model: LoadedModel, tokens: int) -> float:
    """Returns the seconds of the layers' products for `tokens` tokens, launched without waiting."""
    inputs: dict[int, mx.array] = {}
    used = getattr(model.causal_lm.args, "num_experts_per_tok", 0)
    modules = ([*each.modules()] for each in model.causal_lm.model.layers)
    layers = [[c for m in each if (c := _product(m, tokens, used, inputs))] for each in modules]
    mx.eval(list(inputs.values()))
    times = []
    for _ in range(4):
        mx.synchronize()
        began = time.perf_counter()
        for layer in layers:
            mx.async_eval([call() for call in layer])
        mx.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _product(
    module: nn.Module, tokens: int, used: int, inputs: dict[int, mx.array]
) -> Callable[[], mx.array] | None:
    """Returns a call of a module if it is a product; `used` is the number of experts per token."""
    if isinstance(module, nn.QuantizedLinear):
        x = _input(inputs, tokens, module)
        return lambda: module(x)
    if not isinstance(module, SwitchGLU):
        return None
    x = _input(inputs, tokens, module.gate_proj)
    drawn = mx.random.uniform(shape=(tokens, module.gate_proj.weight.shape[0]))
    chosen = mx.argsort(drawn, axis=-1)[None, :, :used].astype(mx.uint32)
    mx.eval(chosen)
    return lambda: module(x, chosen)


def _input(inputs: dict[int, mx.array], tokens: int, layer: nn.Module) -> mx.array:
    """Returns random activations; layers of the same width share an array."""
    width = layer.scales.shape[-1] * layer.group_size
    if width not in inputs:
        drawn = mx.random.normal((1, tokens, width), key=mx.random.key(width))
        inputs[width] = drawn.astype(mx.bfloat16)
    return inputs[width]


def _beside_mlx_lm(prompts: tuple[int, ...]) -> Iterator[Row]:
    """Yields rows of the bundled model in this engine and in mlx-lm, which loops over tokens."""
    model = load_model(BUNDLED_MODEL, enable_mtp=False)
    plain, _ = mlx_lm_utils.load_model(BUNDLED_MODEL)
    plain.set_dtype(mx.float32)  # On a CPU mlx runs experts only in float32.
    core = core_of(model, None, prefill_step_size=_MLX_LM_STEP, max_decode_pause=100.0)
    for tokens in (1100, *prompts):
        ids = random_ids(model.vocab_size, tokens, tokens)
        seconds = first_token_seconds(core, ids)
        began = time.perf_counter()
        next(generate_step(mx.array(ids), plain, max_tokens=1, prefill_step_size=_MLX_LM_STEP))
        theirs = time.perf_counter() - began
        if tokens != 1100:  # The first prompt compiles kernels.
            figures = seconds, tokens / seconds, theirs, theirs / seconds
            yield row("prompt | s | tokens/s | mlx-lm, s | ratio", tokens, *figures)


def pauses(
    model: Path = BUNDLED_MODEL,
    shape: str | None = None,
    layers: int = 0,
    tiny: bool = False,
    streams: int = 8,
    prompt: int = 8000,
    pause: float = 100.0,
    prefill_step_size: int = 512,
) -> Rows:
    """Pauses of running streams while a long prompt is computed, without and with a bound.

    A long prompt arrives while streams decode, and the milliseconds between two outputs of each
    stream are measured until its first token. Without a bound, chunks have --prefill-step-size
    tokens; with a bound, they are made short enough by their cost, which each engine here learns
    anew. "together" is the maximum number of tokens of a chunk that shares a forward pass with the
    streams' windows. "alone" is a stream's time between outputs without the prompt.

    Args:
        model: directory of a checkpoint
        shape: published shape with random weights, instead of --model, on a GPU
        streams: number of decoding streams
        prompt: tokens of the long prompt
        pause: the bound in milliseconds
        prefill_step_size: maximum number of tokens of a chunk
    """
    loaded = load_model(model, enable_mtp=False)
    if shape is not None:
        loaded = build(shape_of(shape, layers, tiny))[0].without_head()
    yield f"{streams} streams beside a prompt of {prompt:,} tokens"
    step, few = prefill_step_size, scheduler.MOST_TOGETHER
    for bound in (0.0, pause):  # compiles the kernels of each chunk length
        _gaps(loaded, streams, min(8 * step, prompt), bound, step)
    for bound, together in ((0.0, 0), (pause, 0), (pause, few)):
        scheduler.MOST_TOGETHER = together
        alone, beside, seconds = _gaps(loaded, streams, prompt, bound, step)
        pauses = statistics.median(beside), statistics.quantiles(beside, n=20)[-1], max(beside)
        ms = (1e3 * each for each in (statistics.median(alone), *pauses))
        names = "bound, ms | together | alone, ms | p50 | p95 | most | prompt, s | tokens/s"
        yield row(names, bound or None, together, *ms, seconds, prompt / seconds)


def _gaps(
    model: LoadedModel, streams: int, length: int, pause: float, step: int
) -> tuple[list[float], list[float], float]:
    """Returns the streams' gaps before the prompt and during its prefill, and its seconds."""
    config = EngineConfig(prefill_step_size=step, max_decode_pause=pause, num_draft_tokens=0)
    with listening(build_engine(model, config, model.vocab_size, ())) as listener:
        names = [f"stream {number}" for number in range(streams)]
        for number, name in enumerate(names):
            listener.ask(name, random_ids(model.vocab_size, 100, number), 100_000)
        for name in names:
            listener.wait(name, 1)
        began = time.perf_counter()
        time.sleep(_ALONE_SECONDS)
        came = listener.ask("long", random_ids(model.vocab_size, length, streams), 100_000)
        listener.wait("long", 1)
        ended = listener.times["long"][0]
        alone = [gap for name in names for gap in listener.gaps(name, began, came)]
        beside = [gap for name in names for gap in listener.gaps(name, came, ended)]
    return alone, beside, ended - came
