"""What is done to the logits before a token is drawn, in this pinned order:

penalties, bias, mask, temperature, top_k, top_p, min_p, noise. Every function leaves a row whose
parameters are neutral exactly as it was, so that a row's tokens don't depend on its neighbours.
"""

from __future__ import annotations

import mlx.core as mx


def apply_penalties(
    logits: mx.array,
    counts: mx.array,
    seen: mx.array,
    repetition: mx.array,
    presence: mx.array,
    frequency: mx.array,
) -> mx.array:
    """Repetition, presence and frequency penalties.

    Args:
        logits: float32 [B, T, V].
        counts: int32 [B, T, V], occurrences in the output before each position.
        seen: bool [B, T, V], token is in the prompt or in the output before the position.
        repetition, presence, frequency: float32 [B, 1, 1].
    """
    repeated = mx.where(logits > 0, logits / repetition, logits * repetition)
    logits = mx.where(seen, repeated, logits)
    return logits - presence * (counts > 0) - frequency * counts


def mask_out(logits: mx.array, mask: mx.array, ids: mx.array | None = None) -> mx.array:
    """Set the tokens that a mask forbids to minus infinity.

    Args:
        logits: float32 [B, T, V], or [B, T, N] of the tokens `ids` alone.
        mask: uint8 [B, T, bytes], a bit for each token, the lowest first; at least V bits.
        ids: int32 [N], which tokens the logits are of; None: all.
    """
    bits = (mask[..., None] >> mx.arange(8, dtype=mx.uint8)) & 1
    bits = bits.reshape(*mask.shape[:-1], -1)
    if ids is not None:
        bits = bits[..., ids]
    assert bits.shape[-1] >= logits.shape[-1], "the mask is of another vocabulary"
    allowed = bits[..., : logits.shape[-1]].astype(mx.bool_)
    return mx.where(allowed, logits, -mx.inf)


def truncate(logits: mx.array, top_k: mx.array, top_p: mx.array, min_p: mx.array) -> mx.array:
    """Set tokens outside top_k, then top_p, then min_p to minus infinity.

    Each cut keeps all tokens that tie with the last one it keeps. This sorts the whole vocabulary:
    it is the reference of `truncation.Truncation`, which keeps the same tokens.

    Args:
        logits: float32 [B, T, V], already divided by the temperature.
        top_k: int32 [B, 1, 1], V to keep all.
        top_p: float32 [B, 1, 1]; of the distribution left by top_k, the smallest set of most
            probable tokens that reaches this is kept.
        min_p: float32 [B, 1, 1], share of the most probable token's probability.
    """
    ordered = mx.sort(logits, axis=-1)[..., ::-1]
    return keep_from(logits, threshold(ordered, top_k, top_p, min_p))


def threshold(
    ordered: mx.array,
    top_k: mx.array,
    top_p: mx.array,
    min_p: mx.array,
    *,
    everything: mx.array | None = None,
) -> mx.array:
    """The least logit that `truncate` keeps, float32 [B, T, 1].

    Args:
        ordered: float32 [B, T, N], the N largest logits, the largest first; all without
            `everything`.
        top_k: int32 [B, 1, 1], at most N.
        top_p, min_p: as for `truncate`.
        everything: float32 [B, T, V], the logits that `ordered` are the largest of. The result is
            that from all of them in order, bit for bit where the sums behind top_p are made one
            after the other. More ties with the top_k-th than N has room for are added to these
            sums as one product, which may round differently.
    """
    rank = mx.arange(ordered.shape[-1])
    by_k = mx.take_along_axis(ordered, mx.broadcast_to(top_k - 1, (*ordered.shape[:2], 1)), axis=-1)
    in_k = ordered >= by_k
    left = mx.where(in_k, ordered, -mx.inf)
    probabilities = mx.softmax(left, axis=-1, precise=True)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    reached = top_p
    if everything is not None:
        # Then the last one in order is a tie as well. By far the most often it is 0 times that.
        beyond = _count(everything >= by_k) - _count(in_k)
        reached = top_p * (1.0 + beyond * probabilities[..., -1:])
    # The most probable token always stays; top_p = 1 keeps all, whatever the sum rounds to.
    in_p = (before < reached) | (rank == 0) | (top_p >= 1.0)
    by_p = mx.min(mx.where(in_p, left, mx.inf), axis=-1, keepdims=True)
    return mx.maximum(mx.maximum(by_k, by_p), min_p_threshold(ordered[..., :1], min_p))


def min_p_threshold(best: mx.array, min_p: mx.array) -> mx.array:
    """The least logit that min_p alone keeps, given the largest one: float32 [B, T, 1]."""
    return mx.where(min_p > 0, best + mx.log(min_p), -mx.inf)


def keep_from(logits: mx.array, least: mx.array) -> mx.array:
    """Set the logits [B, T, V] that are below the least one [B, T, 1] to minus infinity."""
    return mx.where(logits >= least, logits, -mx.inf)


def _count(which: mx.array) -> mx.array:
    return mx.sum(which, axis=-1, keepdims=True)
