"""The list of kernel cases: the operations to check, and the shapes to check them at.

A case is an operation (`gpu.Operation`) at a shape and type. The check before an operation's first
use, the self-test and tests all compare by `KernelCase.error`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_mtp.kernels import gated_delta, gated_delta_step, gpu, norms, residual, short_conv, topk
from mlx_mtp.kernels.cuda import decode_attention, flash_attention, gated_delta_chunks
from mlx_mtp.kernels.gdn_types import GDNShape
from mlx_mtp.kernels.metal import window_attention

OPERATIONS = (
    gated_delta.GATED_DELTA,
    short_conv.SHORT_CONV,
    gated_delta_step.GATED_DELTA_STEP,
    gated_delta_chunks.GATED_DELTA_CHUNKS,
    topk.ROUTER,
    residual.SUM_NORM,
    residual.ADD_NORM,
    norms.GATED_NORM,
    norms.GATE,
    norms.ROTATE,
    residual.ADD_MIX_NORM,
    residual.MIX_NORM,
    decode_attention.WINDOW_ATTENTION,
    flash_attention.FLASH_ATTENTION,
    window_attention.BLOCK_ATTENTION,
)


class KernelCase(NamedTuple):
    """An operation at a shape and type."""

    operation: gpu.Operation
    shape: Any
    dtype: mx.Dtype

    @property
    def applies(self) -> bool:
        """True if the kernels support the shape and type."""
        return self.operation.applies(self.shape, self.dtype)

    def error(self) -> float:
        """Returns the largest difference from the reference; it must be below `gpu.TOLERANCE`."""
        return self.operation.error(self.shape, self.dtype)

    def launches(self, tokens: int) -> list[Callable[[], Any]]:
        """Returns launches of the kernels and of the reference, for one row of `tokens` tokens.

        There are none if the operation is not timed.
        """
        make = self.operation.arguments
        if make is None:
            return []
        arguments = make(self.shape, self.dtype, tokens)
        runs = self.operation.run_kernel, self.operation.reference
        return [partial(run, *arguments) for run in runs if run is not None]


def recurrence_cases(shape: GDNShape, dtype: mx.Dtype) -> list[KernelCase]:
    """Returns the cases of a GatedDeltaNet layer."""
    return _cases(dtype, [(operation, shape) for operation in OPERATIONS[:4]])


def attention_cases(heads: tuple[int, int, int], dtype: mx.Dtype) -> list[KernelCase]:
    """Returns the cases of attention; `heads` are query heads, KV heads, and the head dimension."""
    return _cases(dtype, [(operation, heads) for operation in OPERATIONS[-3:]])


def layer_cases(args: Any, dtype: mx.Dtype) -> list[KernelCase]:
    """Returns the cases of norms and router, by the arguments of mlx-lm's model."""
    width = norms.NormShape(args.hidden_size, args.rms_norm_eps)
    heads = args.num_attention_heads, args.num_key_value_heads
    rotated = int(args.head_dim * args.partial_rotary_factor)
    values, keys = args.linear_num_value_heads, args.linear_num_key_heads
    gated = width._replace(dim=args.linear_value_head_dim, heads=values, ratio=values // keys)
    rotation = norms.NormShape(args.head_dim, width.eps, *heads, rotated, args.rope_theta)
    shapes: list[tuple[gpu.Operation, Any]] = [
        (residual.SUM_NORM, width),
        (norms.GATED_NORM, gated),
        (residual.ADD_NORM, width),
        (norms.GATE, norms.NormShape(args.head_dim, width.eps, heads[0])),
        (norms.ROTATE, rotation),
    ]
    if getattr(args, "num_experts", 0):
        chosen = args.num_experts_per_tok
        router = topk.Router(args.num_experts, chosen, args.norm_topk_prob)
        shapes += [
            (topk.ROUTER, router),
            (residual.ADD_MIX_NORM, width._replace(chosen=chosen + 1)),  # with the shared expert
            (residual.MIX_NORM, width._replace(chosen=chosen)),
        ]
    return _cases(dtype, shapes)


def _cases(dtype: mx.Dtype, shapes: list[tuple[gpu.Operation, Any]]) -> list[KernelCase]:
    where = gpu.backend()
    return [KernelCase(*each, dtype) for each in shapes if each[0].is_for(where)]
