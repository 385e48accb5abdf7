"""Seconds from a prompt to its first token, alone: full-shape models on a GPU, and on a CPU.

    python -m benchmarks.prefill --shape Qwen3-Next-80B-A3B-Instruct --layers 8    # on a GPU
    python -m benchmarks.prefill --prompts 2000,20000                              # on a CPU

On a GPU: random weights, chunks of each length. Few layers are enough, of both kinds in the model's
proportion: a layer's time is what counts. "products" is the time that the layers' matrix products
take by themselves for as many tokens, and what else there is shows in the ratio to it. With torch
installed, `--profile` adds up the GPU's time by kernel. On a CPU: the bundled model beside mlx-lm's
loop on the same weights, both in chunks of 512; ours shorter where that is faster.
"""

import argparse
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from mlx_mtp import backend

BACKEND = backend.prepare()

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.generate import generate_step
from mlx_lm.models.switch_layers import SwitchGLU

from benchmarks.shapes import build, integers
from mlx_mtp.bench.report import render
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.models.few_rows import use_few_rows
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.published import SHAPES
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.worth import FixedDepth

_MLX_LM_STEP = 512

# The parts of a prompt by the names of kernels; the first that fits.
_PARTS = (
    ("recurrence", r"gated_delta"),
    ("attention", r"softmax|sdpa|attention|fmha"),
    ("experts", r"gather|gather_qmm|grouped"),
    ("products", r"gemm|qmm|qmv|gemv|cutlass|dequant|xmma|nvjet|splitK"),
    ("rest", r""),
)


def shortened(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same shape with fewer layers."""
    if "text_config" in config:
        return config | {"text_config": shortened(config["text_config"], layers)}
    return config | {"num_hidden_layers": layers}


def engine_core(model: LoadedModel, step: int, pause: float = 0.0) -> EngineCore:
    """An engine without a head."""
    scheduler = Scheduler(
        EngineConfig(prefill_step_size=step, max_decode_pause=pause), FixedDepth(0)
    )
    return EngineCore(scheduler, ModelRunner(model, None, model.vocab_size), overlap=True)


def prompt_seconds(core: EngineCore, ids: list[int]) -> float:
    """From adding a prompt to its first token."""
    request = Request("prompt", tuple(ids), SamplingParams(max_tokens=1, temperature=0.0))
    began = time.perf_counter()
    core.add(Sequence(request, (), 1))
    while not any(output.token_ids for output in core.step()):
        pass
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
    layers = [_products(each, tokens, inputs) for each in model.causal_lm.model.layers]
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
    module: nn.Module, tokens: int, inputs: dict[int, mx.array]
) -> list[Callable[[], mx.array]]:
    if isinstance(module, SwitchGLU):
        x = _input(inputs, tokens, module.gate_proj)
        most = module.gate_proj.weight.shape[0]
        # As many of each token as the families' routers choose.
        used = 10 if most == 512 else 8
        chosen = mx.argsort(mx.random.uniform(shape=(tokens, most)), axis=-1)[:, :used]
        chosen = chosen.astype(mx.uint32)[None]
        mx.eval(chosen)
        return [lambda: module(x, chosen)]
    if isinstance(module, nn.QuantizedLinear):
        x = _input(inputs, tokens, module)
        return [lambda: module(x)]
    children = module.children().values()
    found = (c for each in children for c in (each if isinstance(each, list) else [each]))
    return [
        call for c in found if isinstance(c, nn.Module) for call in _products(c, tokens, inputs)
    ]


def _input(inputs: dict[int, mx.array], tokens: int, layer: nn.Module) -> mx.array:
    """Random activations, one array for all layers of a width."""
    width = layer.scales.shape[-1] * layer.group_size
    if width not in inputs:
        drawn = mx.random.normal((1, tokens, width), key=mx.random.key(width))
        inputs[width] = drawn.astype(mx.bfloat16)
    return inputs[width]


def profiled(run: Callable[[], object]) -> tuple[dict[str, float], list[tuple[str, float, int]]]:
    """Milliseconds of the GPU by part, and by kernel."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.zeros(1).cuda()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        mx.synchronize()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = kernels[event.name]
            entry[0] += event.device_time / 1e3
            entry[1] += 1
    parts = dict.fromkeys((name for name, _ in _PARTS), 0.0)
    for name, (ms, _) in kernels.items():
        parts[next(part for part, found in _PARTS if re.search(found, name))] += ms
    ordered = sorted(kernels.items(), key=lambda item: -item[1][0])
    return parts, [(name, ms, int(count)) for name, (ms, count) in ordered]


def measure(model: LoadedModel, prompts: list[int], steps: list[int], *, profile: bool) -> str:
    """A table: each length of prompt and chunk."""
    rows = []
    heads = ["prompt", "chunk", "tokens/s", "ms", "products", "ratio"]
    for step in steps:
        core = engine_core(model, step)
        prompt_seconds(core, prompt(model, 2 * step))
        alone = products_seconds(model, step) / step
        for tokens in prompts:
            ids = prompt(model, tokens)
            seconds = min(prompt_seconds(core, ids) for _ in range(2))
            figures = [f"{1e3 * seconds:.0f}", f"{1e3 * alone * tokens:.0f}"]
            row = [f"{tokens:,}", f"{step:,}", f"{tokens / seconds:.0f}", *figures]
            rows.append([*row, f"{seconds / alone / tokens:.2f}"])
            if profile and tokens == max(prompts):
                parts, kernels = profiled(lambda: prompt_seconds(core, ids))  # noqa: B023
                print(
                    f"{tokens} in chunks of {step}:", {n: round(ms, 1) for n, ms in parts.items()}
                )
                for name, ms, count in kernels[:16]:
                    print(f"  {ms:8.2f} ms {count:6} {name[:120]}")
            mx.clear_cache()
            print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    return render(heads, rows)


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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=[*SHAPES], default="Qwen3-Next-80B-A3B-Instruct")
    parser.add_argument("--layers", type=int, default=8, help="of the model; a multiple of 4")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--prompts", type=integers, default=[1024, 8192], help="tokens")
    parser.add_argument("--steps", type=integers, default=[512, 1024, 2048])
    parser.add_argument("--profile", action="store_true", help="the GPU's time by kernel")
    options = parser.parse_args()
    if mx.default_device() != mx.gpu:
        print(beside_mlx_lm(options.prompts))
        return
    model, _ = build(shortened(dict(SHAPES[options.shape]), options.layers), options.bits)
    use_few_rows(model.model, model.dtype)
    print(f"{options.shape}, {options.bits} bit, {options.layers} layers, no head")
    print(measure(model, options.prompts, options.steps, profile=options.profile))


if __name__ == "__main__":
    main()
