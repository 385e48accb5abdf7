"""Stacks: the weights of layers that share their input, as one array, so one launch serves them.

Each stacked layer keeps its own arrays, which are views of its stack's. In the layer's dictionary
the stack's arrays have the same names after an underscore, so that they are not its parameters.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextMLP, Qwen3NextSparseMoeBlock
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from mlx_mtp.kernels.formats import Weight, weight_of

PARTS = "gate_proj", "up_proj"  # of an MLP or experts; their products are combined
_STACKED = nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear


def stack_weights(model: nn.Module, applies: Callable[[Weight], bool] = lambda _: True) -> None:
    """Stack the weights of a model's MLPs and mixtures, and of the layers of `module.stacked`.

    Weights stay as they are if their formats or shapes differ too much, or if `applies` is False.
    """
    modules, groups = model.modules(), list[list[nn.Module]]()
    for block in modules:
        if isinstance(block, Qwen3NextSparseMoeBlock):
            both = block.switch_mlp, block.shared_expert
            groups.append([block.gate, block.shared_expert_gate])
            groups.append([owner[name] for owner in both for name in PARTS])
            groups.append([owner.down_proj for owner in both])
    for module in modules:  # If the experts of a mixture can't be stacked together, they are alone.
        names = PARTS if isinstance(module, Qwen3NextMLP | SwitchGLU) else ()
        groups.append([module[name] for name in getattr(module, "stacked", names)])
    for layers in groups:
        if layers and stacked_weight(*layers) is None and _can_be_stacked(layers, applies):
            _stack(layers)


def stacked_weight(*layers: nn.Module) -> Weight | None:
    """Returns the weight of layers that follow each other in a stack; None if they don't.

    The weight of layers [N, K] is [sum of N, K], also in a stack of experts [E, N, K].
    """
    first = layers[0]
    if len(layers) == 1:
        return weight_of(first)
    whole = first.get("_weight")
    if whole is None or any(layer.get("_weight") is not whole for layer in layers):
        return None
    if any(a.stack_at + _count(a) != b.stack_at for a, b in pairwise(layers)):
        return None
    end = layers[-1].stack_at + _count(layers[-1])
    arrays = {key: _part(first, key, first.stack_at, end) for key in _keys(first)}
    return Weight.of(arrays, weight_of(first).form)


def unstack(layer: nn.Module) -> None:
    """Set the arrays of a stacked layer to views of its stack's arrays."""
    for key in _keys(layer):
        layer[key] = _part(layer, key, layer.stack_at, layer.stack_at + _count(layer))


def _stack(layers: Sequence[nn.Module]) -> None:
    most, first = max(layer.weight.ndim for layer in layers), 0
    for layer in layers:
        layer.stack_at = first
        first += len(layer.weight) if layer.weight.ndim == most else 1
    for key in _keys(layers[0]):
        # No name keeps the layers' own arrays, so that `clear_cache` frees them below.
        whole = mx.concatenate(
            [layer[key] if layer[key].ndim == most else layer[key][None] for layer in layers]
        )
        mx.eval(whole)
        for layer in layers:
            layer[f"_{key}"] = whole
    for layer in layers:
        unstack(layer)
        mx.eval(*(layer[key] for key in _keys(layer)))
    mx.clear_cache()


def _can_be_stacked(layers: Sequence[nn.Module], applies: Callable[[Weight], bool]) -> bool:
    if not all(isinstance(layer, _STACKED) and "bias" not in layer for layer in layers):
        return False
    weights = [weight_of(layer) for layer in layers]
    of_experts = any(weight.codes.ndim == 3 for weight in weights)
    kinds = {
        (weight.form, *((a.shape[-2 if of_experts else -1 :], a.dtype) for a in weight[:3]))
        for weight in weights
    }
    return len(kinds) == 1 and all(map(applies, weights))


def _keys(layer: nn.Module) -> list[str]:
    return [key for key in ("weight", "scales", "biases") if key in layer]


def _count(layer: nn.Module) -> int:
    """Returns the length of a stacked layer's part of the stack's first axis."""
    return len(layer.weight) if layer.weight.ndim == layer["_weight"].ndim else 1


def _part(layer: nn.Module, key: str, first: int, end: int) -> mx.array:
    """Returns items of the stack's array `key`, with the axes of the layer's own."""
    whole: mx.array = layer[f"_{key}"]
    part = whole if end - first == len(whole) else whole[first:end]
    return part if layer[key].ndim == whole.ndim else part.reshape(-1, whole.shape[-1])
