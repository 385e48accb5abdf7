"""What goes into a window of the gated delta rule, and what is remembered of it."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx


class Window(NamedTuple):
    """The inputs of T recurrent steps, queries apart.

    Args:
        k: keys, l2-normalised, [B, T, Hk, Dk].
        v: values, [B, T, Hv, Dv]; Hv is a multiple of Hk.
        g: decay in [0, 1], [B, T, Hv].
        beta: write strength, [B, T, Hv].
    """

    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array

    @property
    def length(self) -> int:
        """T, the number of positions."""
        return self.k.shape[1]

    def cut(self, lengths: mx.array) -> Window:
        """The window whose positions from `lengths[b]` (int32 [B]) on leave the state alone."""
        kept = (mx.arange(self.length) < lengths[:, None])[..., None]
        return self._replace(g=mx.where(kept, self.g, 1), beta=mx.where(kept, self.beta, 0))


class Projected(NamedTuple):
    """What a GatedDeltaNet layer's input projections give for a window; R value heads share a key.

    Args:
        q, k: [B, T, Hk, Dk].
        v: [B, T, Hk, R, Dv].
        a, b: of decay and write strength, [B, T, Hk, R].
    """

    q: mx.array
    k: mx.array
    v: mx.array
    a: mx.array
    b: mx.array


class Convolution(NamedTuple):
    """A layer's weights between its projections and the recurrence.

    Args:
        weight: of the depthwise causal convolution over q, k and v, [C, K, 1].
        log_decay: A_log, [Hv].
        dt_bias: [Hv].
    """

    weight: mx.array
    log_decay: mx.array
    dt_bias: mx.array

    @property
    def size(self) -> int:
        """K."""
        return self.weight.shape[1]


class Pending(NamedTuple):
    """A window that has run, as its fold needs it.

    Args:
        k: the window's keys, [B, T, Hk, Dk].
        delta: what each position wrote along its key, float32 [B, T, Hv, Dv].
        g: decay, [B, T, Hv].
    """

    k: mx.array
    delta: mx.array
    g: mx.array

    @property
    def length(self) -> int:
        """T, the number of positions."""
        return self.k.shape[1]
