"""Full-shape models with random weights: real timings without a download.

The shapes are those of `mlx_mtp/models/published.py`. Weights are random, so the text is
meaningless and acceptance has to be set by hand. A step costs the same as with real weights, except
that a router picks other experts (here about uniformly). On a CPU weights are float32, because mlx
runs mixtures of experts there in no other type.
"""

import functools
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_mtp.errors import UsageError
from mlx_mtp.machine import machine_memory, wire_memory
from mlx_mtp.models.gemm.measure import choose_routes
from mlx_mtp.models.loader import family_of
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.models.published import GROUP_SIZE, SHAPES
from mlx_mtp.models.tensor_parallel import shard

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2}
_HEADS |= {"linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
_TINY = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64, **_HEADS}
_EXPERTS = ("moe_intermediate_size", "shared_expert_intermediate_size")
_TINY_EXPERTS = {"num_experts": 16, **dict.fromkeys(_EXPERTS, 128)}
_BITS = 4  # of the random weights
_FEWEST_COLUMNS = 192  # see `quantize`


def shape_of(name: str, layers: int = 0, tiny: bool = False) -> dict[str, Any]:
    """Returns a published config.json with `layers` layers (0: all); `tiny` has small sizes."""
    if name not in SHAPES:
        raise UsageError(f"{name} is no shape; there are {', '.join(SHAPES)}.")
    if mx.default_device() != mx.gpu and not (tiny or layers):
        raise UsageError("A whole model needs a GPU; --tiny tries the command on a CPU.")
    config = SHAPES[name]
    inner = config.get("text_config", config)
    if tiny:
        inner = inner | _TINY | (_TINY_EXPERTS if "num_experts" in inner else {})
    if tiny or layers:
        inner = inner | {"num_hidden_layers": layers or 4}
    return config | ({"text_config": inner} if "text_config" in config else inner)


def build(config: dict[str, Any], rank: int = 0, size: int = 1) -> tuple[LoadedModel, nn.Module]:
    """Returns a random model with its head, ready to serve, and mlx-lm's model.

    Without ranks, both models share the arrays of the trunk.

    Args:
        config: as in config.json.
        rank, size: this rank and the number of ranks; each rank holds a shard of the model.
    """
    _use_memory()
    family = family_of(config, "the shape")
    model, plain = (_trunk(family, config) for _ in range(2))
    args = family.causal_lm(model).args
    head = family.make_head(args, moe=getattr(args, "num_experts", 0) > 0)
    quantize(head)
    for module in (model, head):
        _randomize(module)
    family.patch(model)
    if size > 1:
        shard(family.causal_lm(model), head, rank, size)
    model.mtp = head
    model.eval()
    plain.eval()
    for _, array in tree_flatten(model.parameters()):
        mx.eval(array)
        mx.clear_cache()
    stored = {**config, "quantization": {"group_size": GROUP_SIZE, "bits": _BITS}}
    loaded = LoadedModel(Path(), stored, {}, model, family, "random", size)
    choose_routes(model, loaded.dtype)
    if size == 1:  # Each rank has only a shard.
        names = {name for name, _ in tree_flatten(plain.parameters())}
        plain.update(tree_unflatten([a for a in tree_flatten(model.parameters()) if a[0] in names]))
    return loaded, plain


@functools.cache
def _use_memory() -> None:
    """Set mlx's memory limit, as `serve` does, while all of the memory is free."""
    wire_memory(machine_memory())


def _trunk(family: Any, config: dict[str, Any]) -> nn.Module:
    model_class, args_class = family.classes(config)
    model = model_class(args_class.from_dict(config))
    quantize(model)
    return model


def quantize(module: nn.Module, bits: int = _BITS) -> None:
    """Quantize as mlx-lm does: affine, in groups of 64, routers in 8 bits.

    On CUDA, narrow layers of the bundled and of tiny models get 6 bits, for which mlx has another
    kernel: according to its source, the kernel of 4 and 8 bits (mlx 0.32.4, qmm_sm80) reads past
    the end of weights and activations of fewer than 3 * 64 columns. No published model has such
    layers.
    """

    def how(path: str, child: nn.Module) -> bool | dict[str, int]:
        if not hasattr(child, "to_quantized"):
            return False
        router = path.endswith(("mlp.gate", "shared_expert_gate"))
        narrow = child.weight.shape[-1] < _FEWEST_COLUMNS and mx.cuda.is_available()
        return {"group_size": GROUP_SIZE, "bits": 6 if narrow else 8 if router else bits}

    nn.quantize(module, class_predicate=how)


def _randomize(module: nn.Module) -> None:
    """Replace a fresh module's arrays, which are never computed, by random values."""
    shapes = dict(tree_flatten(module.parameters()))
    fresh = []
    for name, array in shapes.items():
        owner = name.rpartition(".")[0]
        packed, scales = shapes.get(f"{owner}.weight"), shapes.get(f"{owner}.scales")
        bits = _BITS
        if packed is not None and scales is not None:
            bits = packed.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
        fresh.append((name, _random(name, array, bits)))
    module.update(tree_unflatten(fresh))


def _random(name: str, array: mx.array, bits: int) -> mx.array:
    kind = name.rpartition(".")[2]
    shape = array.shape
    dtype = mx.bfloat16 if mx.default_device() == mx.gpu else mx.float32
    if array.dtype == mx.uint32:
        return mx.random.randint(0, 2**32 - 1, shape, dtype=mx.uint32)
    if kind in ("scales", "biases"):
        # The dequantized weights then have a mean of 0 and a variance of 1 / (inner dimension).
        step = math.sqrt(12 / (4**bits - 1) / (shape[-1] * GROUP_SIZE))
        value = step if kind == "scales" else -step * (2**bits - 1) / 2
        return mx.full(shape, value, dtype=dtype)
    if kind == "A_log":
        return mx.log(mx.random.uniform(1, 16, shape))
    if "conv1d" in name:
        return (mx.random.normal(shape) * 0.5).astype(dtype)
    return mx.ones(shape, dtype=dtype)
