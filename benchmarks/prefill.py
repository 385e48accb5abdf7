"""Seconds from a prompt to its first token, alone: full-shape models on a GPU, and on a CPU.

    python -m benchmarks.prefill [--shape Qwen3.5-27B] [--layers 0]    # on a GPU
    python -m benchmarks.prefill --prompts 2000,20000                  # on a CPU

On a GPU: random weights, one prompt alone and then eight together. Few layers are enough, of both
kinds in the model's proportion: a layer's time is what counts; `--layers 0` takes all. "products"
is the time that the layers' matrix products take by themselves for as many tokens, and what else
there is shows in the ratio to it. `--profile` shows the GPU's milliseconds by part, and the kernels
that took most, by torch, whose profiler may slow down what is measured after it. On a CPU: the
bundled model beside mlx-lm's loop on the same weights, both in chunks of 512; ours shorter where
that is faster.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

from mlx_mtp import backend

BACKEND = backend.prepare()

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.generate import generate_step
from mlx_lm.models.switch_layers import SwitchGLU

from benchmarks.shapes import add_shape, build, integers, shape_of
from benchmarks.timed import PARTS, profiled, shares, table, within
from mlx_mtp.bench.report import render
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.draft_policy import FixedDrafts

_MLX_LM_STEP = 512

_SHAPES = ["Qwen3.5-27B", "Qwen3-Next-80B-A3B-Instruct", "Qwen3.6-35B-A3B"]
_PROMPTS = [8192, 32768, 60_000, 1024]  # the figures that are wanted most first
_TOGETHER = 8
_KERNELS = 8  # that are printed


def engine_core(model: LoadedModel, step: int, pause: float = 0.0) -> EngineCore:
    """An engine without a head."""
    scheduler = Scheduler(
        EngineConfig(prefill_step_size=step, max_decode_pause=pause), FixedDrafts(0)
    )
    return EngineCore(scheduler, ModelRunner(model, None, model.vocab_size), overlap=True)


def prompt_seconds(core: EngineCore, ids: list[int], count: int = 1) -> float:
    """From adding so many prompts to the last one's first token."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    began = time.perf_counter()
    for number in range(count):
        core.scheduler.add(Sequence(Request(f"prompt {number}", tuple(ids), sampling), (), 1))
    while count:
        count -= sum(bool(output.token_ids) for output in core.step())
    found = time.perf_counter() - began
    while not core.idle:
        core.step()
    return found


def prompt(model: LoadedModel, tokens: int) -> list[int]:
    """Random token ids."""
    ids = mx.random.randint(10, model.vocab_size, (tokens,), key=mx.random.key(tokens))
    return np.array(ids).tolist()


def products_seconds(model: LoadedModel, tokens: int) -> float:
    """Of the layers' products for so many tokens, all launched at once."""
    inputs: dict[int, mx.array] = {}
    used = getattr(model.causal_lm.args, "num_experts_per_tok", 0)
    layers = [_products(each, tokens, used, inputs) for each in model.causal_lm.model.layers]
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


def _products(
    module: nn.Module, tokens: int, used: int, inputs: dict[int, mx.array]
) -> list[Callable[[], mx.array]]:
    if isinstance(module, SwitchGLU):
        x = _input(inputs, tokens, module.gate_proj)
        most = module.gate_proj.weight.shape[0]
        chosen = mx.argsort(mx.random.uniform(shape=(tokens, most)), axis=-1)[:, :used]
        chosen = chosen.astype(mx.uint32)[None]
        mx.eval(chosen)
        return [lambda: module(x, chosen)]
    if isinstance(module, nn.QuantizedLinear):
        x = _input(inputs, tokens, module)
        return [lambda: module(x)]
    children = module.children().values()
    found = (c for each in children for c in (each if isinstance(each, list) else [each]))
    modules = (c for c in found if isinstance(c, nn.Module))
    return [call for c in modules for call in _products(c, tokens, used, inputs)]


def _input(inputs: dict[int, mx.array], tokens: int, layer: nn.Module) -> mx.array:
    """Random activations, one array for all layers of a width."""
    width = layer.scales.shape[-1] * layer.group_size
    if width not in inputs:
        drawn = mx.random.normal((1, tokens, width), key=mx.random.key(width))
        inputs[width] = drawn.astype(mx.bfloat16)
    return inputs[width]


def measure(shape: str, end: float, options: argparse.Namespace) -> None:
    """A table: each length of chunk and prompt, up to a time (`perf_counter`)."""
    model = build(shape_of(shape, options), options.bits)[0]
    layers = len(model.causal_lm.model.layers)
    print(f"\n{shape}, {options.bits} bit, {layers} layers, no head\n")
    heads = ["chunk", "prompts", "tokens", "ms", "tokens/s", "products", "ratio"]
    row = table(*heads, *(f"{part}, GPU ms" for part in PARTS))
    cores: dict[int, EngineCore] = {}
    alone: dict[int, float] = {}  # seconds of the products by a chunk's tokens
    lengths = [(count, tokens) for count in (1, _TOGETHER) for tokens in options.prompts]
    cases = [(step, *each) for each in lengths for step in options.steps]
    for step, count, tokens in within(end, cases):
        total = count * tokens
        chunk = min(step, total)
        if step not in cores:
            cores[step] = engine_core(model, step)
            prompt_seconds(cores[step], prompt(model, 2 * step))  # compiles kernels
        if chunk not in alone:
            alone[chunk] = products_seconds(model, chunk)
        core, ids = cores[step], prompt(model, tokens)
        products = alone[chunk] * total / chunk
        seconds = min(prompt_seconds(core, ids, count) for _ in range(2 if count == 1 else 1))
        profile = None
        if options.profile and count == 1:
            profile = profiled(lambda: prompt_seconds(core, ids))  # noqa: B023
        parts = [] if profile is None else [f"{ms:.0f}" for ms in profile.parts.values()]
        figures = f"{1e3 * seconds:.0f}", f"{total / seconds:,.0f}", f"{1e3 * products:.0f}"
        ratio = f"{seconds / products:.2f}"
        row(f"{step:,}", count, f"{tokens:,}", *figures, ratio, *(parts or [""] * len(PARTS)))
        if profile is not None and tokens == max(options.prompts):
            for name, ms, launches in profile.kernels[:_KERNELS]:
                print(f"{ms:8.1f} ms {launches:6} {name[:100]}", file=sys.stderr)
        mx.clear_cache()


def beside_mlx_lm(prompts: list[int]) -> str:
    """A table of the bundled model and mlx-lm's own, which computes all of a prompt in a loop."""
    model = load_model(BUNDLED_MODEL, enable_mtp=False)
    plain, _ = mlx_lm_utils.load_model(BUNDLED_MODEL)
    plain.set_dtype(mx.float32)  # On a CPU mlx runs experts in no other type.
    core = engine_core(model, _MLX_LM_STEP, pause=100.0)
    rows = []
    for tokens in (1100, *prompts):  # The first compiles.
        ids = prompt(model, tokens)
        seconds = prompt_seconds(core, ids)
        began = time.perf_counter()
        step = generate_step(mx.array(ids), plain, max_tokens=1, prefill_step_size=_MLX_LM_STEP)
        next(step)
        theirs = time.perf_counter() - began
        figures = f"{seconds:.2f}", f"{tokens / seconds:.0f}", f"{theirs:.2f}"
        rows.append([f"{tokens:,}", *figures, f"{theirs / seconds:.1f}"])
        print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    return render(["prompt", "s", "tokens/s", "mlx-lm, s", "ratio"], rows[1:])


def main() -> None:
    """Parse the command line, measure, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_shape(parser, layers=8, nargs="+", help=f"on a GPU: {', '.join(_SHAPES)}")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--prompts", type=integers, help="tokens")
    parser.add_argument("--steps", type=integers, default=[2048], help="tokens of a chunk")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--seconds", type=float, default=540, help="begin no case after them")
    options = parser.parse_args()
    if options.shape is None and mx.default_device() != mx.gpu:
        print(beside_mlx_lm(options.prompts or [2000, 20_000]))
        return
    options.prompts = options.prompts or _PROMPTS
    for shape, end in shares(options.seconds, options.shape or _SHAPES):
        measure(shape, end, options)


if __name__ == "__main__":
    main()
