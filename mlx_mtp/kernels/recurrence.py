"""The recurrence of a GatedDeltaNet layer: which form of the gated delta rule runs a window.

Prompts run in chunks on the tensor cores if a CUDA GPU has enough shared memory, and on Metal by
mlx's own chunked form if that is faster. Everything else runs in one kernel (`gated_delta.py`), or
without a GPU in matrix products (`portable.py`).
"""

import mlx.core as mx

from mlx_mtp.kernels import gated_delta, gpu, portable
from mlx_mtp.kernels.cuda import gated_delta_chunks
from mlx_mtp.kernels.gdn_types import GDNWindow, PendingWindow
from mlx_mtp.kernels.metal import gated_delta_prompts
from mlx_mtp.kernels.view import Operand


def run_window(
    q: Operand,  # queries of the new window, l2-normalised, [B, T, Hk, Dk]
    window: GDNWindow,
    state: mx.array,  # before the previous window, float32 [B, Hv, Dv, Dk]
    previous: PendingWindow | None,  # of any length; None: there is nothing to fold
    num_kept: mx.array | None,  # positions of the previous window that each row keeps, int32 [B]
    lengths: mx.array | None = None,  # the same for the new window, if it is already known
) -> tuple[mx.array, mx.array, PendingWindow | None]:
    """Fold the previous window's accepted prefix, then run the new window on top of it.

    Returns the outputs [B, T, Hv, Dv] in q's dtype, scaled by Dk^-1/2 (from `lengths[b]` on they
    are finite but meaningless); a state; and the window that the next call must fold. Without
    `lengths` the state is the folded one, before the new window. With `lengths` it is the state
    after the first `lengths[b]` positions of the new window, and the window to fold is None.
    """
    chunked = gated_delta_prompts if gpu.backend() == "metal" else gated_delta_chunks
    if lengths is not None and chunked.fits(window):
        folded = state if num_kept is None else fold(previous, num_kept, state)
        return *chunked.run_kernel(q, window, folded, lengths), None
    step = gated_delta.run_kernel if gated_delta.fits(window) else portable.run_window
    return step(q, window, state, previous, num_kept, lengths)


def fold(previous: PendingWindow | None, num_kept: mx.array | None, state: mx.array) -> mx.array:
    """Returns the state after the first `num_kept[b]` (int32 [B]) positions of `previous`."""
    if previous is None:
        return state
    assert num_kept is not None
    by = gated_delta.fold_by_kernel if gated_delta.fits(previous) else portable.fold
    return by(previous, num_kept, state)
