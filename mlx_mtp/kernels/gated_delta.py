"""The gated delta rule over a window, and the fold of an accepted prefix.

The rule (Yang et al., "Gated Delta Networks", 2024, equation 10) writes one rank-one term a
position, `state <- g state + delta k^T`, so a window is remembered by its (k, delta, g), and the
next call folds the accepted prefix in before it runs its own window.

On a GPU one kernel runs all of it. A warp holds R rows of one head's state, its lanes splitting
Dk, so that the two dot products of a position are a five-step shuffle. The state is read once and
written once. Elsewhere it is matrix products (`portable.py`).
"""

import mlx.core as mx

from mlx_mtp.kernels import gpu, portable, self_check
from mlx_mtp.kernels.window import Pending, Shape, Window

_BODY = """
    const int first = grid_y * R;
    const int n = grid_z;
    if (first >= Dv) {
      return;
    }
    const int b = n / Hv;
    const int hv = n % Hv;
    const int hk = hv / (Hv / Hk);
    const int num_previous = previous_k_shape[1];
    const int length = k_shape[1];
    constexpr int N = Dk / 32;
    const float scale = 1.0f / sqrt(static_cast<float>(Dk));

    float s[R][N];
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < N; ++i) {
        s[r][i] = state[(n * Dv + first + r) * Dk + N * lane + i];
      }
    }

    // What the row keeps of the previous window: one rank-one term a position.
    for (int t = 0; t < num_kept[b]; ++t) {
      const int at = b * num_previous + t;
      const float decay = static_cast<float>(previous_g[at * Hv + hv]);
      const auto keys = previous_k + b * previous_k_strides[0] + t * previous_k_strides[1]
          + hk * previous_k_strides[2];
      float key[N];
      for (int i = 0; i < N; ++i) {
        key[i] = static_cast<float>(keys[N * lane + i]);
      }
      for (int r = 0; r < R; ++r) {
        const float d = static_cast<float>(previous_delta[(at * Hv + hv) * Dv + first + r]);
        for (int i = 0; i < N; ++i) {
          s[r][i] = fma(key[i], d, s[r][i] * decay);
        }
      }
    }
    if (!ADVANCE) {
      for (int r = 0; r < R; ++r) {
        for (int i = 0; i < N; ++i) {
          state_out[(n * Dv + first + r) * Dk + N * lane + i] = s[r][i];
        }
      }
    }

    const int valid = ADVANCE ? lengths[b] : length;
    for (int t = 0; t < length; ++t) {
      const int at = b * length + t;
      const int out = (at * Hv + hv) * Dv + first;
      if (t >= valid) {
        // Not left as it was: a NaN there would reach other rows through masked attention.
        for (int r = lane; r < R; r += 32) {
          y[out + r] = static_cast<InT>(0.0f);
        }
        continue;
      }
      const float decay = static_cast<float>(g[at * Hv + hv]);
      const float strength = static_cast<float>(beta[at * Hv + hv]);
      const auto keys = k + b * k_strides[0] + t * k_strides[1] + hk * k_strides[2];
      const auto queries = q + b * q_strides[0] + t * q_strides[1] + hk * q_strides[2];
      const auto values = v + b * v_strides[0] + t * v_strides[1] + hv * v_strides[2];
      float key[N];
      float query[N];
      for (int i = 0; i < N; ++i) {
        key[i] = static_cast<float>(keys[N * lane + i]);
        query[i] = static_cast<float>(queries[N * lane + i]);
      }
      float memory[R];
      for (int r = 0; r < R; ++r) {
        memory[r] = 0.0f;
        for (int i = 0; i < N; ++i) {
          s[r][i] = s[r][i] * decay;
          memory[r] = fma(s[r][i], key[i], memory[r]);
        }
      }
      for (int other = 16; other > 0; other /= 2) {
        for (int r = 0; r < R; ++r) {
          memory[r] += SHUFFLE_XOR(memory[r], other);
        }
      }
      float result[R];
      for (int r = 0; r < R; ++r) {
        const float d = (static_cast<float>(values[first + r]) - memory[r]) * strength;
        result[r] = 0.0f;
        for (int i = 0; i < N; ++i) {
          s[r][i] = fma(key[i], d, s[r][i]);
          result[r] = fma(s[r][i], query[i], result[r]);
        }
        if (!ADVANCE && lane == 0) {
          delta[out + r] = d;
        }
      }
      for (int other = 16; other > 0; other /= 2) {
        for (int r = 0; r < R; ++r) {
          result[r] += SHUFFLE_XOR(result[r], other);
        }
      }
      if (lane == 0) {
        for (int r = 0; r < R; ++r) {
          y[out + r] = static_cast<InT>(result[r] * scale);
        }
      }
    }
    if (ADVANCE) {
      for (int r = 0; r < R; ++r) {
        for (int i = 0; i < N; ++i) {
          state_out[(n * Dv + first + r) * Dk + N * lane + i] = s[r][i];
        }
      }
    }
"""

# q, k and v may be slices; all else must be contiguous, as the kernel leaves it.
_KERNEL = gpu.Kernel(
    "gated_delta",
    [
        *("q", "k", "v", "g", "beta", "state"),
        *("previous_k", "previous_delta", "previous_g", "num_kept", "lengths"),
    ],
    ["y", "state_out", "delta"],
    _BODY,
    self_check.gated_delta,
    ["key_dim"],
)


def run(
    q: mx.array,  # queries of the new window, l2-normalised, [B, T, Hk, Dk]
    window: Window,  # its other inputs
    state: mx.array,  # before the previous window, float32 [B, Hv, Dv, Dk]
    previous: Pending | None,  # the window before, of any length; None: nothing to fold
    num_kept: mx.array | None,  # how much of it each row keeps, int32 [B]
    lengths: mx.array | None = None,  # how much of the new window each row keeps, if that is known
) -> tuple[mx.array, mx.array, Pending | None]:
    """Fold the previous window's accepted prefix, then run the new window on top of it.

    Returns its outputs [B, T, Hv, Dv] in q's dtype, scaled by Dk^-1/2; those from `lengths[b]` on
    are finite but mean nothing. Without `lengths` also the state after the fold, and the new
    window, to be folded next time; else the state after each row's last position.
    """
    step = launch if fits(window) else portable.step
    return step(q, window, state, previous, num_kept, lengths)


def fold(previous: Pending | None, num_kept: mx.array | None, state: mx.array) -> mx.array:
    """The state after the first `num_kept[b]` (int32 [B]) positions of the previous window."""
    if previous is None:
        return state
    assert num_kept is not None
    if not fits(previous):
        return portable.fold(previous, num_kept, state)
    # The kernel with a window of which no position is run.
    k, delta, g = (a[:, :1] for a in previous)
    nothing = mx.zeros_like(num_kept)
    return launch(k, Window(k, delta, g, g), state, previous, num_kept, nothing)[1]


def launch(
    q: mx.array,
    window: Window,
    state: mx.array,
    previous: Pending | None,
    num_kept: mx.array | None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array, Pending | None]:
    """`run` by the kernel."""
    batch, _, heads, value_dim = window.v.shape
    if previous is None or num_kept is None:
        previous, num_kept = Pending(*window[:3]), gpu.zeros(batch)
    # More rows a warp hide the shuffles' latency; fewer fill the GPU.
    rows = next(rows for rows in (4, 2, 1) if value_dim % rows == 0)
    advance = lengths is not None
    outputs, after, delta = _KERNEL(
        [q, *window, state, *previous, num_kept, num_kept if lengths is None else lengths],
        [("InT", q.dtype), ("ADVANCE", advance), *_shape(window).sizes(), ("R", rows)],
        (1, value_dim // rows, batch * heads),
        [
            (window.v.shape, q.dtype),
            (state.shape, mx.float32),
            ((1,) if advance else window.v.shape, mx.float32),
        ],
    )
    return outputs, after, None if advance else Pending(window.k, delta, window.g)


def fits(window: Window | Pending) -> bool:
    """Whether the kernel runs windows of these shapes and types here."""
    return _KERNEL.works(launch, _shape(window), window.k.dtype)


def _shape(window: Window | Pending) -> Shape:
    # A window's values and a pending window's deltas have one shape.
    return Shape(*window.k.shape[2:], *window[1].shape[2:])
