"""Which of a verify window's tokens each row keeps, decided on the device."""

from typing import NamedTuple

import mlx.core as mx


class AcceptResult(NamedTuple):
    """What each row keeps of a window.

    `num_kept` tokens are emitted: the accepted drafts and one recovered or bonus token, cut at a
    stop id or at the row's limit; none by a row that had finished before.
    """

    num_kept: mx.array  # int32 [B]
    num_accepted: mx.array  # int32 [B], how many of the emitted tokens were drafts
    finished: mx.array  # bool [B], the row emits nothing from here on
    remaining: mx.array  # int32 [B], tokens each row may still emit
    last: mx.array  # int32 [B], the last token each row has emitted


def accept(
    targets: mx.array,
    window: mx.array,
    *,
    stop_ids: mx.array,
    remaining: mx.array,
    finished: mx.array,
    num_drafts: mx.array | None = None,
) -> AcceptResult:
    """Compare drafts with the tokens that the model drew itself.

    Token j of a row is valid only if every draft before it is accepted, so a row keeps the drafts
    up to the first that differs, and the model's own token there.

    Args:
        targets: int32 [B, T], the token drawn after each position of the window.
        window: int32 [B, T], the last emitted token and T-1 drafts.
        stop_ids: int32 [B, S], padded with -1.
        remaining, finished: int32 and bool [B], as an `AcceptResult` has them, before the window.
        num_drafts: int32 [B], how many of a row's drafts count; None: all of them.
    """
    agreed = (targets[:, :-1] == window[:, 1:]).astype(mx.int32)
    if num_drafts is not None:
        agreed = agreed * (mx.arange(agreed.shape[1]) < num_drafts[:, None])
    num_agreed = mx.cumprod(agreed, axis=1).sum(axis=1).astype(mx.int32)
    allowed = mx.minimum(num_agreed + 1, remaining)
    is_stop = (targets[..., None] == stop_ids[:, None]).any(axis=-1)
    stop_in = is_stop & (mx.arange(targets.shape[1]) < allowed[:, None])
    stopped = stop_in.any(axis=1)
    num_kept = mx.where(stopped, mx.argmax(stop_in, axis=1).astype(mx.int32) + 1, allowed)
    num_kept = mx.where(finished, 0, num_kept)
    remaining = remaining - num_kept
    at_last = mx.maximum(num_kept - 1, 0)[:, None]
    newest = mx.take_along_axis(targets, at_last, axis=1)[:, 0]
    return AcceptResult(
        num_kept=num_kept,
        num_accepted=mx.minimum(num_agreed, num_kept),
        finished=finished | stopped | (remaining <= 0),
        remaining=remaining,
        last=mx.where(num_kept > 0, newest, window[:, 0]),
    )
