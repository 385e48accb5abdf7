"""Checks the sizes in a config.json before a model of these sizes is built."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_mtp.errors import ModelError
from mlx_mtp.models.family import text_config

# The minimum and maximum of each size.
_RANGES = {
    "num_hidden_layers": (1, 1024),
    "full_attention_interval": (1, 1024),
    "max_position_embeddings": (2, 1 << 31),
    "vocab_size": (1, 1 << 24),
    "linear_conv_kernel_dim": (2, 1 << 10),
    **dict.fromkeys(("num_experts", "num_experts_per_tok"), (0, 1 << 16)),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), (0, 1 << 20)),
    **dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), (1, 1 << 20)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), (1, 1 << 20)),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), (1, 1 << 20)),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), (1, 1 << 20)),
}
_MAY_BE_NULL = ("head_dim", "intermediate_size", "max_position_embeddings")
_ABOVE, _NO_MULTIPLE = "above", "not a multiple of"
_FAULTS = (  # (a, fault, b): a must not be above b, or must be a multiple of b
    ("num_experts_per_tok", _ABOVE, "num_experts"),
    ("full_attention_interval", _ABOVE, "num_hidden_layers"),
    ("num_attention_heads", _NO_MULTIPLE, "num_key_value_heads"),
    ("linear_num_value_heads", _NO_MULTIPLE, "linear_num_key_heads"),
)
_OF_TENSORS = frozenset(_RANGES) - {"full_attention_interval", "max_position_embeddings"}
_LAYER = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d{1,9})\.")


def check_sizes(
    config: Mapping[str, Any], path: Path, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """Raise ModelError for impossible sizes, or sizes that contradict the weights' `shapes`."""
    inner = text_config(config)
    nulls = {name for name in _MAY_BE_NULL if inner.get(name) is None}
    sizes = {name: inner[name] for name in sorted(_RANGES.keys() & inner.keys() - nulls)}

    def refuse(fault: str) -> None:
        raise ModelError(f"{path / 'config.json'}: {fault}")

    for name, value in sizes.items():
        low, high = _RANGES[name]
        if type(value) is not int or not low <= value <= high:
            refuse(f"{name} is {value!r:.40}, but must be {low} to {high}.")
    for name, fault, other in _FAULTS:
        if {name, other} <= sizes.keys():
            one, two = sizes[name], sizes[other]
            if one > two if fault is _ABOVE else one % two:
                refuse(f"{name} is {one}, {fault} {other}, {two}.")
    if shapes is None:
        return
    layers = 1 + max((int(m[1]) for name in shapes if (m := _LAYER.match(name))), default=-1)
    if sizes.get("num_hidden_layers", layers) != layers:
        refuse(f"num_hidden_layers is {sizes['num_hidden_layers']}; the weights have {layers}.")
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    for name in sizes.keys() & _OF_TENSORS:
        if sizes[name] > largest:
            refuse(f"{name} is {sizes[name]}, but no tensor has a dimension above {largest}.")
