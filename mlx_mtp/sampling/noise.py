"""Noise that depends on a request's seed and a token's position and on nothing else."""

from __future__ import annotations

import mlx.core as mx


def keyed_gumbel(
    seeds: mx.array, positions: mx.array, vocab_size: int, ids: mx.array | None = None
) -> mx.array:
    """Gumbel noise for the token at each position.

    `argmax(logits + noise)` then draws from softmax(logits) (the Gumbel-max trick), and draws the
    same token wherever and however often the position is computed.

    Args:
        seeds: uint32 [B].
        positions: int32 [B, T], absolute position of the token to be drawn.
        vocab_size: V.
        ids: int32 [N], tokens to draw for; None for all. Each has the noise that it has among all.

    Returns:
        float32 [B, T, V], or [B, T, N].
    """
    batch, length = positions.shape
    seeds = mx.broadcast_to(seeds[:, None], (batch, length))
    keys = mx.stack([seeds, positions.astype(mx.uint32)], axis=-1).reshape(-1, 2)
    draw = mx.vmap(lambda key: mx.random.uniform(shape=(vocab_size,), key=key))
    uniform = draw(keys).reshape(batch, length, vocab_size)
    # The two logarithms take longer than the bits: only for the tokens asked for.
    return -mx.log(-mx.log(uniform if ids is None else uniform[..., ids]))
