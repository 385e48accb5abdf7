"""Attention of a prompt's chunk in mlx operations, where mlx has no fused form.

That is on GPUs for head dimensions over 128. mlx then masks all scores, which takes two more passes
over them; a chunk needs a mask only where its own tokens are. Blocks of queries keep the scores
small.
"""

import mlx.core as mx

from mlx_mtp.kernels.gpu import backend

BLOCK = 512  # queries of a block; measured on CUDA, beside 64 to 2,048
_FUSED_DIM = 128  # mlx has a fused form up to here


def fits(queries: mx.array) -> bool:
    """Whether it is used for such queries, [slots, heads, T, D]."""
    slots, *_, dim = queries.shape
    return slots == 1 and dim > _FUSED_DIM and backend() is not None


def attend(
    queries: mx.array,  # [1, heads, T, D]
    keys: mx.array,  # [1, KV heads, L, D]; L bounds the last position
    values: mx.array,
    positions: mx.array,  # of the queries, int32 [T], consecutive
    known: int,  # no more than the first of them
    scale: float,
) -> mx.array:
    """Attention of each query up to its own position, [1, heads, T, D]."""
    _, heads, length, dim = queries.shape
    kv_heads, limit = keys.shape[1:3]
    queries = queries * scale
    outputs = []
    for first in range(0, length, BLOCK):
        end = min(first + BLOCK, length)
        masked, reach = known + first, limit - (length - end)
        own = queries[:, :, first:end].reshape(1, kv_heads, -1, dim)
        scores = own @ keys[:, :, :reach].swapaxes(2, 3)
        scores = scores.reshape(1, heads, end - first, reach)
        seen = mx.arange(masked, reach) <= positions[first:end, None]
        scores[..., masked:] = mx.where(seen, scores[..., masked:], -mx.inf)
        weights = mx.softmax(scores, axis=-1, precise=True).reshape(1, kv_heads, -1, reach)
        outputs.append((weights @ values[:, :, :reach]).reshape(1, heads, end - first, dim))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
