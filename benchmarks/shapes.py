"""Full-shape models with random weights: real timings without a download.

The shapes are those of `mlx_mtp/models/published.py`. Weights are random, so the text means
nothing and acceptance has to be set by hand; what a step costs is what it costs with real weights,
but for the experts that a router picks (here about uniformly).
"""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.models.loader import family_of
from mlx_mtp.models.published import GROUP_SIZE
from mlx_mtp.models.shards import shard


def integers(text: str) -> list[int]:
    """Of a command line: 1,2,4."""
    return [int(part) for part in text.split(",")]


def build(config: dict[str, Any], bits: int) -> tuple[LoadedModel, nn.Module]:
    """A random model with its head, and mlx-lm's own on the same arrays.

    Args:
        config: as in config.json.
        bits: 4 or 8, affine, groups of 64; routers 8 bits, as mlx-lm converts them.
    """
    family = family_of(config, "the shape")
    model, plain = (_trunk(family, config, bits) for _ in range(2))
    args = family.causal_lm(model).args
    head = family.make_head(args, moe=getattr(args, "num_experts", 0) > 0)
    _quantize(head, bits)
    for module in (model, head):
        _randomize(module)
        mx.eval(module.parameters())
    plain.update(model.parameters())
    family.patch(model)
    model.mtp = head
    model.eval()
    plain.eval()
    stored = {**config, "quantization": {"group_size": GROUP_SIZE, "bits": bits}}
    return LoadedModel(Path(), stored, {}, model, family, "random"), plain


def build_part(config: dict[str, Any], bits: int, rank: int, size: int) -> LoadedModel:
    """One rank's part of a random model with its head: of what one GPU can't hold."""
    family = family_of(config, "the shape")
    model = _trunk(family, config, bits)
    args = family.causal_lm(model).args
    head = family.make_head(args, moe=getattr(args, "num_experts", 0) > 0)
    _quantize(head, bits)
    for module in (model, head):
        _randomize(module)
    family.patch(model)
    shard(family.causal_lm(model), head, rank, size)
    model.mtp = head
    model.eval()
    for _, array in tree_flatten(model.parameters()):
        mx.eval(array)
        mx.clear_cache()
    return LoadedModel(Path(), config, {}, model, family, "random", size)


def _trunk(family: Any, config: dict[str, Any], bits: int) -> nn.Module:
    model_class, args_class = family.classes(config)
    model = model_class(args_class.from_dict(config))
    _quantize(model, bits)
    return model


def _quantize(module: nn.Module, bits: int) -> None:
    def how(path: str, child: nn.Module) -> bool | dict[str, int]:
        if not hasattr(child, "to_quantized"):
            return False
        router = path.endswith(("mlp.gate", "shared_expert_gate"))
        return {"group_size": GROUP_SIZE, "bits": 8 if router else bits}

    nn.quantize(module, class_predicate=how)


def _randomize(module: nn.Module) -> None:
    """Random values in place of what a fresh module holds, which is never computed."""
    shapes = dict(tree_flatten(module.parameters()))
    fresh = []
    for name, array in shapes.items():
        owner = name.rpartition(".")[0]
        packed, scales = shapes.get(f"{owner}.weight"), shapes.get(f"{owner}.scales")
        bits = 4
        if packed is not None and scales is not None:
            bits = packed.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
        fresh.append((name, _random(name, array, bits)))
    module.update(tree_unflatten(fresh))


def _random(name: str, array: mx.array, bits: int) -> mx.array:
    kind = name.rpartition(".")[2]
    shape = array.shape
    if array.dtype == mx.uint32:
        return mx.random.randint(0, 2**32 - 1, shape, dtype=mx.uint32)
    if kind in ("scales", "biases"):
        # Uniform codes then have a mean of 0 and a variance of one over the inner dimension.
        step = math.sqrt(12 / (4**bits - 1) / (shape[-1] * GROUP_SIZE))
        value = step if kind == "scales" else -step * (2**bits - 1) / 2
        return mx.full(shape, value, dtype=mx.bfloat16)
    if kind == "A_log":
        return mx.log(mx.random.uniform(1, 16, shape))
    if "conv1d" in name:
        return (mx.random.normal(shape) * 0.5).astype(mx.bfloat16)
    return mx.ones(shape, dtype=mx.bfloat16)
