"""A rank's part of a model: heads of attention and GatedDeltaNet, and inner sizes of the MLPs.

Each rank keeps all norms, routers and embeddings, and the matching slices of everything else, so
that the sum of what all ranks compute after a layer's attention, and after its MLP, is the layer's
output. lm_head is cut by tokens; one that is tied to the embedding is whole.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.errors import UsageError

_LINEAR = ("weight", "scales", "biases", "bias")
_OUTPUTS, _INPUTS = -2, -1  # axes of weights, of which those of experts have one more before
_MOST_RANKS = 64

Segments = tuple[tuple[int, int], ...]
"""Consecutive parts of an axis that are cut each by itself: a number of units, and their width."""


class _Cut(NamedTuple):
    """Tensors of a module that are cut alike."""

    name: str
    module: nn.Module
    axis: int
    segments: Segments
    unit: str = "inner units"
    repeated: bool = False  # with fewer units than ranks, neighbouring ranks have the same one
    keys: tuple[str, ...] = _LINEAR

    @property
    def tensors(self) -> dict[str, mx.array]:
        return {key: self.module[key] for key in self.keys if key in self.module}

    def spans(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Where this rank's units begin and end, by segment."""
        spans, start = [], 0
        for units, width in self.segments:
            first = units * rank // size
            last = max(units * (rank + 1) // size, first + 1)
            spans.append((start + first * width, start + last * width))
            start += units * width
        return spans

    def part(self, key: str, rank: int, size: int) -> mx.array:
        array = self.module[key]
        if key == "bias" and self.axis == _INPUTS:  # of the sum
            return array if rank == 0 else mx.zeros_like(array)
        axis = _INPUTS if key == "bias" else self.axis
        length = sum(units * width for units, width in self.segments)
        before: tuple[Any, ...] = (slice(None),) * (array.ndim + axis)
        stored = array.shape[axis]  # Packed, or one for each group, it is less than the length.
        spans = [[at * stored // length for at in span] for span in self.spans(rank, size)]
        return mx.contiguous(
            mx.concatenate([array[(*before, slice(*span))] for span in spans], axis=axis)
        )

    def fault(self, size: int) -> str | None:
        """Why this can't be cut for so many ranks."""
        for units, _ in self.segments:
            if units % size and not (self.repeated and size % units == 0):
                return f"{units:,} {self.unit}"
        length = sum(units * width for units, width in self.segments)
        for key, array in self.tensors.items() if self.axis == _INPUTS else ():
            stored = array.shape[-1]
            if key != "bias" and any(
                at * stored % length for span in self.spans(1, size) for at in span
            ):
                return f"{length:,} inputs in groups of {getattr(self.module, 'group_size', '?')}"
        return None


def shard(causal_lm: nn.Module, head: nn.Module | None, rank: int, size: int) -> None:
    """Keep this rank's part; UsageError names what can't be cut. No weight is read."""
    if size == 1:
        return
    cuts = list(_cuts(causal_lm, head))
    _check(cuts, size)
    for cut in cuts:
        for key in cut.tensors:
            cut.module[key] = cut.part(key, rank, size)
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


def _check(cuts: list[_Cut], size: int) -> None:
    """UsageError for the first tensor that can't be cut, with the numbers of ranks that work."""

    def first(size: int) -> tuple[_Cut, str] | None:
        return next(((cut, why) for cut in cuts if (why := cut.fault(size))), None)

    if (found := first(size)) is not None:
        cut, why = found
        counts = [str(n) for n in range(2, _MOST_RANKS + 1) if first(n) is None]
        works = f"It can be cut for {', '.join(counts)} ranks." if counts else "One rank runs it."
        tensor = f"{cut.name}.{next(iter(cut.tensors))}"
        raise UsageError(f"The model can't be cut for {size} ranks: {tensor} has {why}. {works}")


def _cuts(causal_lm: nn.Module, head: nn.Module | None) -> Iterator[_Cut]:
    layers = [(f"layers.{n}", layer) for n, layer in enumerate(causal_lm.model.layers)]
    layers += [] if head is None else [(f"mtp.layers.{n}", x) for n, x in enumerate(head.layers)]
    for name, layer in layers:
        if "self_attn" in layer:
            yield from _of_attention(f"{name}.self_attn", layer.self_attn)
        else:
            yield from _of_gated_delta(f"{name}.linear_attn", layer.linear_attn)
        mlp, of_mlp = layer.mlp, f"{name}.mlp"
        parts = {"": mlp}
        if "switch_mlp" in mlp:
            parts = {f".{each}": mlp[each] for each in ("switch_mlp", "shared_expert")}
        for part, module in parts.items():
            yield from _of_mlp(of_mlp + part, module)
    if not causal_lm.args.tie_word_embeddings:
        size = ((causal_lm.args.vocab_size, 1),)
        yield _Cut("lm_head", causal_lm.lm_head, _OUTPUTS, size, "tokens")


def _of_attention(name: str, module: nn.Module) -> Iterator[_Cut]:
    heads, dim = module.num_attention_heads, module.head_dim
    entries = ((module.num_key_value_heads, dim),)
    for key in ("k_proj", "v_proj"):
        yield _Cut(f"{name}.{key}", module[key], _OUTPUTS, entries, "heads", repeated=True)
    yield _Cut(f"{name}.q_proj", module.q_proj, _OUTPUTS, ((heads, 2 * dim),), "heads")
    yield _Cut(f"{name}.o_proj", module.o_proj, _INPUTS, ((heads, dim),), "heads")


def _of_gated_delta(name: str, module: nn.Module) -> Iterator[_Cut]:
    keys, values = module.num_k_heads, module.num_v_heads
    key_dim, value_dim, ratio = module.head_k_dim, module.head_v_dim, values // keys
    channels = ((keys, key_dim), (keys, key_dim), (values, value_dim))
    widths: dict[str, Segments] = {
        "in_proj_qkv": channels,
        "in_proj_z": ((values, value_dim),),
        "in_proj_a": ((values, 1),),
        "in_proj_b": ((values, 1),),
        # Qwen3-Next's are interleaved by key head.
        "in_proj_qkvz": ((keys, 2 * key_dim + 2 * ratio * value_dim),),
        "in_proj_ba": ((keys, 2 * ratio),),
    }
    for key, segments in widths.items():
        if key in module:
            yield _Cut(f"{name}.{key}", module[key], _OUTPUTS, segments, "heads")
    yield _Cut(f"{name}.conv1d", module.conv1d, -3, channels, "heads")
    of_heads = ("A_log", "dt_bias")
    yield _Cut(name, module, -1, ((values, 1),), "heads", keys=of_heads)
    yield _Cut(f"{name}.out_proj", module.out_proj, _INPUTS, ((values, value_dim),), "heads")


def _of_mlp(name: str, module: nn.Module) -> Iterator[_Cut]:
    weight = module.gate_proj.weight  # whose outputs are not packed
    inner = ((weight.shape[-2], 1),)
    for key, axis in (("gate_proj", _OUTPUTS), ("up_proj", _OUTPUTS), ("down_proj", _INPUTS)):
        yield _Cut(f"{name}.{key}", module[key], axis, inner)
