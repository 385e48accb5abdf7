"""Decides on the device which tokens of a verify window each row emits."""

from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.kernels.gpu import fused, zeros


class AcceptResult(NamedTuple):
    """What each row emits: the accepted drafts and the bonus token, up to the answer's end."""

    num_kept: mx.array  # int32 [B], number of emitted tokens
    num_accepted: mx.array  # int32 [B], number of emitted tokens that were drafts
    finished: mx.array  # bool [B], True if the row's answer has ended
    remaining: mx.array  # int32 [B], maximum number of tokens each row can still emit
    last: mx.array  # int32 [B], the last token each row has emitted, now or before
    at_last: mx.array  # int32 [B], index of `last` in `sampled`; 0 if none was emitted


def verify_window(
    sampled: mx.array,  # int32 [B, T], the token sampled after each position of the window
    window: mx.array,  # int32 [B, T], the last emitted token and T-1 drafts
    *,
    stop_ids: mx.array,  # int32 [B, S], S > 0, padded with -1
    remaining: mx.array,  # int32 [B], before the window
    finished: mx.array,  # bool [B], before the window
    num_drafts: mx.array | None = None,  # int32 [B], drafts of each row; None: T-1
) -> AcceptResult:
    """Accept the drafts before the first one that differs from its sampled token.

    The sampled token after the accepted drafts is emitted, too; later ones are invalid, as they
    follow a rejected draft. Drafts and tokens are compared for equality at any temperature: both
    are drawn with the noise of their position, so no rejection sampling is needed.
    """
    arguments = sampled, window, stop_ids, remaining, finished, num_drafts
    return AcceptResult(*_verify_window(*arguments))


@fused
def _verify_window(
    sampled: mx.array,
    window: mx.array,
    stop_ids: mx.array,
    remaining: mx.array,
    finished: mx.array,
    num_drafts: mx.array | None,
) -> AcceptResult:
    if window.shape[1] == 1:
        return _verify_token(sampled[:, 0], window[:, 0], stop_ids, remaining, finished)
    agreed = (sampled[:, :-1] == window[:, 1:]).astype(mx.int32)
    if num_drafts is not None:
        agreed = agreed * (mx.arange(agreed.shape[1]) < num_drafts[:, None])
    num_agreed = mx.cumprod(agreed, axis=1).sum(axis=1).astype(mx.int32)
    allowed = mx.minimum(num_agreed + 1, remaining)
    is_stop = (sampled[..., None] == stop_ids[:, None]).any(axis=-1)
    stop_in = is_stop & (mx.arange(sampled.shape[1]) < allowed[:, None])
    stopped = stop_in.any(axis=1)
    num_kept = mx.where(stopped, mx.argmax(stop_in, axis=1).astype(mx.int32) + 1, allowed)
    num_kept = mx.where(finished, 0, num_kept)
    remaining = remaining - num_kept
    at_last = mx.maximum(num_kept - 1, 0)
    newest = mx.take_along_axis(sampled, at_last[:, None], axis=1)[:, 0]
    return AcceptResult(
        num_kept=num_kept,
        num_accepted=mx.minimum(num_agreed, num_kept),
        finished=finished | stopped | (remaining <= 0),
        remaining=remaining,
        last=mx.where(num_kept > 0, newest, window[:, 0]),
        at_last=at_last,
    )


def _verify_token(
    sampled: mx.array,  # int32 [B]
    last: mx.array,  # int32 [B], the last token emitted before
    stop_ids: mx.array,
    remaining: mx.array,
    finished: mx.array,
) -> AcceptResult:
    """Verify a window without drafts, in fewer operations."""
    emits = mx.logical_not(finished | (remaining <= 0))
    num_kept = emits.astype(mx.int32)
    remaining = remaining - num_kept
    is_stop = (sampled[:, None] == stop_ids).any(axis=1)
    none = zeros(len(sampled))
    return AcceptResult(
        num_kept=num_kept,
        num_accepted=none,
        finished=finished | (is_stop & emits) | (remaining <= 0),
        remaining=remaining,
        last=mx.where(emits, sampled, last),
        at_last=none,
    )
