"""Attention of a pass's tokens to their rows' keys and values: which kernel or operation runs it.

On CUDA one kernel runs the windows of all rows of a decode step, and on Metal too in exact mode;
otherwise the rows of each buffer form a padded rectangle. A prompt's chunk has a kernel on Hopper
GPUs. On other GPUs it runs in blocks of queries for head dimensions over 128, for which mlx has no
fused operation: mlx would mask all scores, in two more passes over them, but only the scores of the
chunk's own tokens need a mask, and blocks keep the scores small. On a CPU, one row's float32 chunks
run in blocks, with the softmax of `activations`. All else is mlx's own attention.
"""

import platform
import re
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_mtp.kernels import gpu
from mlx_mtp.kernels.activations import softmax
from mlx_mtp.kernels.cuda import decode_attention, flash_attention
from mlx_mtp.kernels.cuda.attention_plan import plan_launches
from mlx_mtp.kernels.metal import window_attention

BLOCK = 512  # queries of a block; chosen by measurements of 64 to 2,048 on CUDA
_CPU_BLOCK = 32  # the same on a CPU; with larger ones more scores are in memory at once
_FUSED_DIM = 128  # maximum head dimension for which mlx fuses a chunk's attention
# With at least 4,096 keys, mlx's attention on Metal reads the KV once for all query heads of a KV
# head, for up to 8 positions and 32 pairs of a position and one of these heads. With more, at
# dimension 256, mlx runs separate operations.
_METAL_KEYS, _METAL_POSITIONS, _METAL_PAIRS, _METAL_DIM = 4096, 8, 32, 256
_METAL_FUSED, _TENSOR_UNITS = 1024, 17  # minimum queries, and minimum generation of the GPU


def is_batch_invariant(head_dim: int) -> bool:
    """Returns whether attention of this dimension can give a row the same bits in every batch."""
    if gpu.backend() == "metal":
        return window_attention.serves(head_dim)
    return gpu.backend() == "cuda" and head_dim in decode_attention.DIMS


def attend_windows(
    queries: mx.array,  # [N, heads, dim]
    positions: mx.array,  # of the queries, int32 [N]; each attends up to its own
    buffers: Sequence[mx.array],  # keys, then values: [2 * slots * KV heads * capacity, dim]
    kv_heads: int,
    rows: tuple[tuple[int, ...], ...],  # of each row: buffer, slot, capacity, first token, tokens
    longest: int,  # tokens of the longest window
    scale: float,
    exact: bool,  # a position must have the same bits in every pass
) -> mx.array | None:
    """Returns the attention of a decode step's rows, [N, heads, dim], or None without a kernel."""
    on_metal = gpu.backend() == "metal"
    operation = window_attention.BLOCK_ATTENTION if on_metal else decode_attention.WINDOW_ATTENTION
    if on_metal and not exact:
        return None
    if not fits(operation, queries, buffers[0], kv_heads, longest, scale):
        return None
    attend = window_attention.attend if on_metal else decode_attention.attend
    return attend(queries, positions, buffers, kv_heads, rows)


def plan_windows(
    queries: mx.array,
    kv: mx.array,
    kv_heads: int,
    longest: int,
    scale: float,
    rows: tuple[tuple[int, ...], ...],
) -> Any:
    """Returns the launches of `attend_windows` as a tree of arrays and numbers, or None.

    None: this is not CUDA, or its kernel does not serve these windows.

    Layers that differ only in their arrays share it, and so one compiled function.
    """
    operation = decode_attention.WINDOW_ATTENTION
    if gpu.backend() != "cuda" or not fits(operation, queries, kv, kv_heads, longest, scale):
        return None
    return plan_launches(rows, queries.shape[1] // kv_heads)


def attend_planned(
    queries: mx.array, positions: mx.array, buffers: Sequence[mx.array], kv_heads: int, plan: Any
) -> mx.array:
    """`attend_windows`, with the launches of `plan_windows`."""
    return decode_attention.attend_launches(queries, positions, buffers, kv_heads, *plan)


def fits(
    operation: gpu.Operation,
    queries: mx.array,
    kv: mx.array,
    kv_heads: int,
    longest: int,
    scale: float,
) -> bool:
    """Returns whether a kernel serves queries [N, heads, dim] in windows of up to `longest`."""
    _, heads, dim = queries.shape
    if longest > gpu.LONGEST_WINDOW or scale != dim**-0.5 or kv.dtype != queries.dtype:
        return False
    return operation.works((heads, kv_heads, dim), kv.dtype)


def attend_rectangle(
    queries: mx.array,  # [slots, T, heads, dim]
    kv: mx.array,  # [2, slots or more, KV heads, capacity, dim]
    positions: mx.array,  # int32 [slots, T]
    mask: Callable[[], mx.array],  # causal, bool [slots, 1, T, limit]; made only where it is used
    limit: int,  # positions of a slot; no query sees more
    known: int,  # lower bound of the first position, if there is one slot
    end: int | None,  # where the queries of all slots end, if equal and known to the host
    scale: float,
) -> mx.array:
    """Returns the attention of each query up to its own position, [slots, T, heads, dim]."""
    keys, values = kv  # views; an integer as the only index would copy
    if flash_attention.fits(queries, keys, scale):
        one = queries.squeeze(0), keys, values, positions.squeeze(0)
        return flash_attention.attend(*one)[None]
    keys, values = kv[:, : len(queries), :, :limit]
    rows = queries.swapaxes(1, 2)
    is_chunk = queries.shape[1] > gpu.LONGEST_WINDOW
    # Only for chunks: the host does not know where a window of a decode step begins.
    if is_chunk and attends_in_blocks(rows) and not (end and _metal_fuses(rows)):
        outputs = _in_blocks(rows, keys, values, positions.squeeze(0), known, scale)
    elif is_chunk and end and gpu.backend() != "cuda":
        # mlx's fused forms skip keys that no query sees; with a mask array they read all keys.
        given = rows, keys[:, :, :end], values[:, :, :end]
        outputs = mx.fast.scaled_dot_product_attention(*given, scale=scale, mask="causal")
    else:
        outputs = _by_mlx(rows, keys, values, scale, mask())
    return outputs.swapaxes(1, 2)


def attends_in_blocks(queries: mx.array) -> bool:
    """Returns whether a chunk's queries [slots, heads, T, dim] are computed in blocks."""
    slots, *_, dim = queries.shape
    if gpu.backend() is None:
        return slots == 1 and queries.dtype == mx.float32
    return slots == 1 and dim > _FUSED_DIM


def _metal_fuses(queries: mx.array) -> bool:
    """Returns whether mlx fuses these queries' attention here if the causal mask is no array.

    By the source of mlx 0.32.2: from M5 and macOS 26.2 on, for at least 1,024 queries.
    """
    *_, length, dim = queries.shape
    if gpu.backend() != "metal" or dim != _METAL_DIM or length < _METAL_FUSED:
        return False
    found = re.search(r"g(\d+)\w$", str(mx.device_info().get("architecture")))
    system = [int(part) for part in platform.mac_ver()[0].split(".") if part.isdigit()]
    return found is not None and int(found[1]) >= _TENSOR_UNITS and system >= [26, 2]


def _in_blocks(
    queries: mx.array,  # [1, heads, T, dim]
    keys: mx.array,  # [1, KV heads, L, dim]; L bounds the last position
    values: mx.array,
    positions: mx.array,  # of the queries, int32 [T], consecutive
    known: int,  # lower bound of the first one
    scale: float,
) -> mx.array:
    _, heads, length, dim = queries.shape
    kv_heads, limit = keys.shape[1:3]
    queries = queries * scale
    outputs: list[mx.array] = []
    on_cpu = gpu.backend() is None
    size = _CPU_BLOCK if on_cpu else BLOCK
    for first in range(0, length, size):
        end = min(first + size, length)
        masked, reach = known + first, limit - (length - end)
        block = queries[:, :, first:end].reshape(1, kv_heads, -1, dim)
        if on_cpu and outputs:  # Else mlx would compute the scores of all blocks first.
            (block,) = mx.depends([block], outputs[-1:])
        scores = block @ keys[:, :, :reach].swapaxes(2, 3)
        scores = scores.reshape(1, heads, end - first, reach)
        seen = mx.arange(masked, reach) <= positions[first:end, None]
        scores[..., masked:] = mx.where(seen, scores[..., masked:], -mx.inf)
        weights = softmax(scores) if on_cpu else mx.softmax(scores, axis=-1, precise=True)
        weights = weights.reshape(1, kv_heads, -1, reach)
        outputs.append((weights @ values[:, :, :reach]).reshape(1, heads, end - first, dim))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def _by_mlx(
    queries: mx.array,  # [slots, heads, T, dim]
    keys: mx.array,  # [slots, KV heads, limit, dim]
    values: mx.array,
    scale: float,
    mask: mx.array,  # bool [slots, 1, T, limit]
) -> mx.array:
    """Run mlx's operation; on Metal cut a window into pieces that mlx's fused form takes."""
    _, heads, length, dim = queries.shape
    most = min(_METAL_POSITIONS, _METAL_PAIRS * keys.shape[1] // heads)
    is_fused = dim == _METAL_DIM and keys.shape[2] >= _METAL_KEYS and most > 0
    if gpu.backend() != "metal" or length > gpu.LONGEST_WINDOW or length <= most or not is_fused:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    pieces = [slice(at, at + most) for at in range(0, length, most)]
    outputs = [_by_mlx(queries[:, :, own], keys, values, scale, mask[:, :, own]) for own in pieces]
    return mx.concatenate(outputs, axis=2)
