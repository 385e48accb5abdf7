"""Noise that depends on a request's seed and a token's position and on nothing else."""

from __future__ import annotations

import mlx.core as mx


def keyed_gumbel(seeds: mx.array, positions: mx.array, vocab_size: int) -> mx.array:
    """Gumbel noise for the token at each position.

    `argmax(logits + noise)` then draws from softmax(logits) (the Gumbel-max trick), and draws the
    same token wherever and however often the position is computed.

    Args:
        seeds: uint32 [B].
        positions: int32 [B, T], absolute position of the token to be drawn.
        vocab_size: V.

    Returns:
        float32 [B, T, V].
    """
    batch, length = positions.shape
    seeds = mx.broadcast_to(seeds[:, None], (batch, length))
    keys = mx.stack([seeds, positions.astype(mx.uint32)], axis=-1).reshape(-1, 2)
    draw = mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))
    return draw(keys).reshape(batch, length, vocab_size)
