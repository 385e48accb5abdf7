"""The command `mlx-mtp inspect`. Nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlx_mtp.flags import Flag, add_flags, size
from mlx_mtp.options import DTYPE, MODEL_FLAG

if TYPE_CHECKING:
    from mlx_mtp.inspect.found import Found


def add_inspect(subparsers: Any) -> None:
    """Register `inspect`; its parsed namespace has a `run` that takes it and returns a status."""
    parser = subparsers.add_parser(
        "inspect",
        help="show whether a model fits this machine and whether it has its MTP head",
        description="Show whether a model fits this machine and up to which context, what it is, "
        "whether it has its MTP head, and the next command to type. No weights are downloaded.",
    )
    add_flags(
        parser,
        MODEL_FLAG,
        replace(
            DTYPE,
            help="plan the memory for computing in this type",
            default_text="auto, the type serve would use",
        ),
        Flag(
            "--memory-limit SIZE",
            "plan for this much memory, such as 48GB",
            size,
            default_text="what this machine has",
        ),
    )
    parser.set_defaults(run=run_inspect)


def run_inspect(options: argparse.Namespace) -> int:
    """Print what a model is, first whether it fits; returns the exit status."""
    from mlx_mtp import backend

    backend.prepare()
    from mlx_mtp.inspect.found import find, quantization
    from mlx_mtp.inspect.memory import demand, fit_rows, memory_rows
    from mlx_mtp.machine import memory_limit
    from mlx_mtp.units import size_text

    found = find(options.model)
    wanted, limit = demand(found, options.dtype), memory_limit(options.memory_limit)
    num_bytes, num_files = found.trunk
    files = f"{num_files} file" if num_files == 1 else f"{num_files} files"
    rows = {
        **fit_rows(wanted, limit),
        "model": found.name,
        "family": _family(found),
        "quantization": quantization(found.target.config),
        "weights": f"{size_text(num_bytes)} in {files}" if num_files else "none found",
        "MTP head": found.head or "none",
        **memory_rows(wanted),
        "next": _next(found),
    }
    print("\n".join(f"{label:<14}{text}" for label, text in rows.items()))
    return 0


def _family(found: Found) -> str:
    from mlx_mtp.cache.specs import AttentionSpec

    args = found.target.args
    layers = found.target.family.layer_specs(args)
    attention = sum(isinstance(layer, AttentionSpec) for layer in layers)
    experts = layers[0].mlp.num_experts
    return (
        f"{found.target.config['model_type']}: {len(layers)} layers, {attention} of "
        f"them with attention; hidden size {args.hidden_size}, vocabulary {args.vocab_size:,}, "
        + (f"{experts} experts" if experts else "dense")
    )


def _next(found: Found) -> str:
    if found.head:
        return f"mlx-mtp serve {found.name} --enable-mtp"
    base = found.base or "<the original Hugging Face model>"
    return (
        f"mlx-mtp add-mtp-weights --mlx-model-path {found.name} --source-model {base}; "
        f"or without the head: mlx-mtp serve {found.name}"
    )
