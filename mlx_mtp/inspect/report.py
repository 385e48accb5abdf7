"""What `mlx-mtp inspect` prints."""

from __future__ import annotations

from mlx_mtp.cache.specs import AttentionSpec
from mlx_mtp.inspect.found import Found, find, quantization
from mlx_mtp.inspect.memory import demand, fit_rows, memory_rows
from mlx_mtp.machine import MemoryLimit, machine_memory
from mlx_mtp.units import size_text

_WIDTH = 14


def inspect_model(
    name: str | None, dtype: str = "auto", memory_limit: int | None = None
) -> list[str]:
    """Lines to print; the first says whether the model fits.

    Args:
        name: a directory or a hub id; None for the bundled model.
        dtype: that it would be served in; see `load_model`.
        memory_limit: bytes that it may take; None: what this machine has.

    Raises:
        ModelError: there is no such model, or no family serves it.
    """
    found = find(name)
    wanted = demand(found, dtype)
    limit = machine_memory()
    if memory_limit is not None:
        limit = MemoryLimit(memory_limit, "--memory-limit")
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
    return [f"{label:<{_WIDTH}}{text}" for label, text in rows.items()]


def _family(found: Found) -> str:
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
