"""Which model and context fit which Mac: computed, not measured.

    python -m benchmarks.memory_guide

Published shapes at 4 bits with their heads, planned as `serve --enable-mtp` plans at its start. No
weight is made. What Metal recommends to use of a machine's memory is the one assumption: the shares
that llama.cpp's users report (https://github.com/ggml-org/llama.cpp/issues/1870, /pull/2011).
"""

import argparse
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from benchmarks.shapes import GROUP_SIZE, SHAPES
from mlx_mtp.config import MAX_DRAFT_TOKENS, EngineConfig
from mlx_mtp.engine.memory import Footprint, footprint, plan_memory
from mlx_mtp.errors import UsageError
from mlx_mtp.machine import MemoryLimit
from mlx_mtp.models.head import MTPHead
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.models.loader import family_of
from mlx_mtp.units import size_text

_MACHINES = {32: 2 / 3, 64: 3 / 4, 128: 3 / 4}
"""GiB, and the share of them that Metal recommends to use at most."""
_MODELS = ("Qwen3.5-27B", "Qwen3.6-35B-A3B", "Qwen3-Next-80B-A3B")
_SHORT, _LONG = 8192, 32768


def shapes_of(config: dict[str, Any], bits: int) -> tuple[Footprint, int]:
    """What a model of this config takes, and most tokens that it allows.

    Args:
        config: as in config.json.
        bits: of the weights; routers have 8, as mlx-lm converts them.
    """
    family = family_of(config, "the shape")
    model_class, args_class = family.classes(config)
    model = model_class(args_class.from_dict(config))  # type: ignore[attr-defined]
    args = family.causal_lm(model).args
    head = MTPHead(
        family.head_layer(args, moe=getattr(args, "num_experts", 0) > 0),
        args.hidden_size,
        args.rms_norm_eps,
    )

    def how(path: str, child: nn.Module) -> bool | dict[str, int]:
        if not hasattr(child, "to_quantized"):
            return False
        router = path.endswith(("mlp.gate", "shared_expert_gate"))
        return {"group_size": GROUP_SIZE, "bits": 8 if router else bits}

    for module in (model, head):
        # mlx makes the arrays when they are looked at, which here they never are.
        module.set_dtype(mx.bfloat16)
        nn.quantize(module, class_predicate=how)
    model.mtp = head
    loaded = LoadedModel(Path(), config, {}, model, family, "computed", slow_few_rows=False)
    return footprint(loaded, MAX_DRAFT_TOKENS), loaded.max_model_len


def cell(shape: Footprint, allowed: int, gigabytes: int) -> str:
    """What fits a machine with so many GiB."""
    limit = MemoryLimit(int(gigabytes * 2**30 * _MACHINES[gigabytes]), "of a Mac")
    config = EngineConfig()
    try:
        plan = plan_memory(
            shape,
            limit,
            allowed=allowed,
            wanted=None,
            prefill_step_size=config.prefill_step_size,
            prefix_cache=None,
        )
    except UsageError:
        return "does not fit"
    context = f"{plan.max_model_len:,} tokens"
    lengths = [n for n in (_SHORT, _LONG) if n <= plan.max_model_len]
    rows = [f"{plan.num_rows(n, config.max_num_seqs)} of {n:,}" for n in lengths]
    return f"{context}; {' or '.join(rows)}" if rows else context


def tables(bits: int) -> str:
    """Both tables, Markdown."""
    shapes = {name: shapes_of(SHAPES[name], bits) for name in _MODELS}
    lines = [f"| model, {bits} bits | weights | head | states of a row | KV of 1,000 tokens |"]
    lines.append("|---|---|---|---|---|")
    for name, (shape, _) in shapes.items():
        caches = shape.caches
        kv = 1000 * (caches.kv_per_token + caches.head_kv_per_token)
        sizes = (shape.weights, shape.head, caches.row, kv)
        lines.append(f"| {name} | {' | '.join(map(size_text, sizes))} |")
    lines += ["", f"| model, {bits} bits | {' | '.join(f'{n} GB' for n in _MACHINES)} |"]
    lines.append(f"|---|{'---|' * len(_MACHINES)}")
    for name, (shape, allowed) in shapes.items():
        lines.append(f"| {name} | {' | '.join(cell(shape, allowed, n) for n in _MACHINES)} |")
    return "\n".join(lines)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    print(tables(parser.parse_args().bits))


if __name__ == "__main__":
    main()
