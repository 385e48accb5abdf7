"""Tensor parallelism: splits heads of attention and GatedDeltaNet, and MLPs' inner dimensions.

Each rank keeps all norms, routers and embeddings, and its slices of all other weights. The sum over
ranks of their attention outputs, or of their MLP outputs, is the whole layer's. lm_head is split
over the vocabulary, unless it is tied to the embedding: then it is whole on each rank.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.errors import UsageError

_LINEAR = ("weight", "scales", "biases", "bias")
_OUTPUTS, _INPUTS = -2, -1  # axes of a weight; the weights of experts have one more axis in front
_MOST_RANKS = 64

Blocks = tuple[tuple[int, int], ...]
"""The blocks of an axis, each split separately, as (number of units, width of a unit)."""


class _Split(NamedTuple):
    """Tensors of a module that are split the same way. A unit, such as a head, is never split."""

    name: str
    module: nn.Module
    axis: int
    blocks: Blocks
    unit: str = "inner units"
    repeated: bool = False  # with fewer units than ranks, neighbouring ranks share a unit
    keys: tuple[str, ...] = _LINEAR

    @property
    def tensors(self) -> dict[str, mx.array]:
        return {key: self.module[key] for key in self.keys if key in self.module}

    @property
    def length(self) -> int:
        return sum(units * width for units, width in self.blocks)

    def spans(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Returns the begin and end of a rank's units in each block, along the axis."""
        spans, start = [], 0
        for units, width in self.blocks:
            first = units * rank // size
            last = max(units * (rank + 1) // size, first + 1)
            spans.append((start + first * width, start + last * width))
            start += units * width
        return spans

    def part(self, key: str, rank: int, size: int) -> mx.array:
        array = self.module[key]
        if key == "bias" and self.axis == _INPUTS:  # added once to the sum over ranks
            return array if rank == 0 else mx.zeros_like(array)
        axis = _INPUTS if key == "bias" else self.axis
        before: tuple[Any, ...] = (slice(None),) * (array.ndim + axis)
        stored = array.shape[axis]  # less than `length` for packed codes, and for groups' scales
        spans = [[at * stored // self.length for at in span] for span in self.spans(rank, size)]
        return mx.contiguous(
            mx.concatenate([array[(*before, slice(*span))] for span in spans], axis=axis)
        )

    def fault(self, size: int) -> str | None:
        """Returns why these tensors can't be split for `size` ranks; None if they can."""
        for units, _ in self.blocks:
            if units % size and not (self.repeated and size % units == 0):
                return f"{units:,} {self.unit}"
        if self.axis == _INPUTS and "signs" in self.module:
            return "a Hadamard rotation of its inputs"
        length = self.length
        for key, array in self.tensors.items() if self.axis == _INPUTS else ():
            stored = array.shape[-1]
            if key != "bias" and any(
                at * stored % length for span in self.spans(1, size) for at in span
            ):
                return f"{length:,} inputs in groups of {getattr(self.module, 'group_size', '?')}"
        return None


def shard(causal_lm: nn.Module, head: nn.Module | None, rank: int, size: int) -> None:
    """Keep only a rank's slices of the weights; no weight is read.

    Raises UsageError, which names the first tensor that can't be split, and the numbers of ranks
    for which all tensors can.
    """
    if size == 1:
        return
    splits = list(_splits(causal_lm, head))
    for split in splits:
        if why := split.fault(size):
            others = range(2, _MOST_RANKS + 1)
            counts = [str(n) for n in others if not any(each.fault(n) for each in splits)]
            works = (
                f"It can be cut for {', '.join(counts)} ranks." if counts else "One rank runs it."
            )
            tensor = f"{split.name}.{next(iter(split.tensors))}"
            message = f"The model can't be cut for {size} ranks: {tensor} has {why}. {works}"
            raise UsageError(message)
    for split in splits:
        for key in split.tensors:
            split.module[key] = split.part(key, rank, size)
    for layer in [*causal_lm.model.layers, *([] if head is None else head.layers)]:
        if "self_attn" in layer:
            attention = layer.self_attn
            attention.num_attention_heads //= size
            attention.num_key_value_heads = max(attention.num_key_value_heads // size, 1)
        else:
            mixer = layer.linear_attn
            for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"):
                setattr(mixer, name, getattr(mixer, name) // size)
            mixer.conv1d.groups //= size


def _splits(causal_lm: nn.Module, head: nn.Module | None) -> Iterator[_Split]:
    layers = [(f"layers.{n}", layer) for n, layer in enumerate(causal_lm.model.layers)]
    layers += [] if head is None else [(f"mtp.layers.{n}", x) for n, x in enumerate(head.layers)]
    for name, layer in layers:
        if "self_attn" in layer:
            yield from _of_attention(f"{name}.self_attn", layer.self_attn)
        else:
            yield from _of_gated_delta(f"{name}.linear_attn", layer.linear_attn)
        if "switch_mlp" in layer.mlp:
            for part in ("switch_mlp", "shared_expert"):
                yield from _of_mlp(f"{name}.mlp.{part}", layer.mlp[part])
        else:
            yield from _of_mlp(f"{name}.mlp", layer.mlp)
    if not causal_lm.args.tie_word_embeddings:
        tokens = ((causal_lm.args.vocab_size, 1),)
        yield _Split("lm_head", causal_lm.lm_head, _OUTPUTS, tokens, "tokens")


def _of_attention(name: str, module: nn.Module) -> Iterator[_Split]:
    heads, dim = module.num_attention_heads, module.head_dim
    kv_heads = ((module.num_key_value_heads, dim),)
    for key in ("k_proj", "v_proj"):
        yield _Split(f"{name}.{key}", module[key], _OUTPUTS, kv_heads, "heads", repeated=True)
    queries_and_gates = ((heads, 2 * dim),)
    yield _Split(f"{name}.q_proj", module.q_proj, _OUTPUTS, queries_and_gates, "heads")
    yield _Split(f"{name}.o_proj", module.o_proj, _INPUTS, ((heads, dim),), "heads")


def _of_gated_delta(name: str, module: nn.Module) -> Iterator[_Split]:
    keys, values = module.num_k_heads, module.num_v_heads
    key_dim, value_dim, ratio = module.head_k_dim, module.head_v_dim, values // keys
    channels = ((keys, key_dim), (keys, key_dim), (values, value_dim))
    widths: dict[str, Blocks] = {
        "in_proj_qkv": channels,
        "in_proj_z": ((values, value_dim),),
        "in_proj_a": ((values, 1),),
        "in_proj_b": ((values, 1),),
        # Qwen3-Next interleaves these by key head.
        "in_proj_qkvz": ((keys, 2 * key_dim + 2 * ratio * value_dim),),
        "in_proj_ba": ((keys, 2 * ratio),),
    }
    for key, blocks in widths.items():
        if key in module:
            yield _Split(f"{name}.{key}", module[key], _OUTPUTS, blocks, "heads")
    yield _Split(f"{name}.conv1d", module.conv1d, -3, channels, "heads")
    yield _Split(name, module, -1, ((values, 1),), "heads", keys=("A_log", "dt_bias"))
    yield _Split(f"{name}.out_proj", module.out_proj, _INPUTS, ((values, value_dim),), "heads")


def _of_mlp(name: str, module: nn.Module) -> Iterator[_Split]:
    inner = ((module.gate_proj.weight.shape[-2], 1),)  # Quantized weights are packed by input only.
    for key, axis in (("gate_proj", _OUTPUTS), ("up_proj", _OUTPUTS), ("down_proj", _INPUTS)):
        yield _Split(f"{name}.{key}", module[key], axis, inner)
