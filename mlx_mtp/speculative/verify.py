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
    return AcceptResult(*_accept(sampled, window, stop_ids, remaining, finished, num_drafts))


@fused
def _accept(
    sampled: mx.array,
    window: mx.array,
    stop_ids: mx.array,
    remaining: mx.array,
    finished: mx.array,
    num_drafts: mx.array | None,
) -> AcceptResult:
    if window.shape[1] == 1:
        num_accepted = at_last = zeros(len(sampled))
        num_kept = mx.where(finished, 0, mx.minimum(remaining, 1))
        newest = sampled[:, 0]
    else:
        agreed = (sampled[:, :-1] == window[:, 1:]).astype(mx.int32)
        if num_drafts is not None:
            agreed = agreed * (mx.arange(agreed.shape[1]) < num_drafts[:, None])
        is_stop = (sampled[:, :-1, None] == stop_ids[:, None]).any(axis=-1)
        # A token is emitted after each accepted draft that is not a stop id.
        num_followed = mx.cumprod(agreed * mx.logical_not(is_stop), axis=1).sum(axis=1)
        num_kept = mx.where(finished, 0, mx.minimum(num_followed + 1, remaining))
        num_accepted = mx.minimum(mx.cumprod(agreed, axis=1).sum(axis=1), num_kept)
        at_last = mx.maximum(num_kept - 1, 0)
        newest = mx.take_along_axis(sampled, at_last[:, None], axis=1)[:, 0]
    last = mx.where(num_kept > 0, newest, window[:, 0])
    remaining = remaining - num_kept
    # For a row that emits nothing this changes nothing: it has ended, or is still in its prompt.
    stopped = (last[:, None] == stop_ids).any(axis=1)
    ended = finished | stopped | (remaining <= 0)
    return AcceptResult(num_kept, num_accepted, ended, remaining, last, at_last)
