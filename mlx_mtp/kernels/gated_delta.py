"""The gated delta rule over a window, and the fold of an accepted prefix.

The rule (Yang et al., "Gated Delta Networks", 2024, equation 10) writes one rank-one term per
position, `state <- g state + delta k^T`, so a window is remembered by its (k, delta, g), and the
next call folds the accepted prefix in before it runs its own window. One kernel does both on any
GPU. L lanes share R rows of one head's state, so the dot products of a position take a few
shuffles. The state is read once and written once, and a position's inputs are read while earlier
positions are computed. `recurrence.py` chooses between this and the other forms.
"""

import functools
from typing import Any

import mlx.core as mx

from mlx_mtp.kernels import gpu, portable, self_check
from mlx_mtp.kernels.gdn_types import GDNShape, GDNWindow, PendingWindow
from mlx_mtp.kernels.view import Operand, arrays_and_constants

# (L, R): lanes that share a row of the state, and rows of each lane; the first that fits Dv.
LAYOUTS = ((16, 2), (16, 1), (32, 1))
_AHEAD = 4  # positions of a prompt whose inputs are read before they are needed

_PLACE = """
    const int part = lane % L;
    const int first = (grid_y * (32 / L) + lane / L) * R;
    const int n = grid_z;
    if (first >= Dv) {
      return;
    }
    const int b = n / Hv;
    const int hv = n % Hv;
    const int hk = hv / (Hv / Hk);
    const int length = k_shape[1];
"""
# A warp's lanes load R rows each, L lanes per row, of the state of head n = b Hv + hv.
LOAD = """
    const size_t first_token = static_cast<size_t>(b) * length;
    constexpr int N = Dk / L;
    const float scale = 1.0f / sqrt(static_cast<float>(Dk));

    const int own = (n * Dv + first) * Dk + part;  // in the state
    float s[R][N];
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < N; ++i) {
        s[r][i] = state[own + r * Dk + L * i];
      }
    }
"""
FOLD = """
    // What the row keeps of the previous window: one rank-one term a position.
    for (int t = 0; t < num_kept[b]; ++t) {
      const size_t at = static_cast<size_t>(b) * previous_k_shape[1] + t;
      const float decay = previous_g[PREVIOUS_G_AT + at * PREVIOUS_G_BY0 + hv];
      const auto keys =
          previous_k + PREVIOUS_K_AT + at * PREVIOUS_K_BY0 + hk * PREVIOUS_K_BY1 + part;
      const auto deltas = previous_delta + PREVIOUS_DELTA_AT + at * PREVIOUS_DELTA_BY0
          + hv * PREVIOUS_DELTA_BY1 + first;
      float key[N];
      for (int i = 0; i < N; ++i) {
        key[i] = static_cast<float>(keys[L * i]);
      }
      for (int r = 0; r < R; ++r) {
        const float d = static_cast<float>(deltas[r]);
        for (int i = 0; i < N; ++i) {
          s[r][i] = fma(key[i], d, s[r][i] * decay);
        }
      }
    }
    if (!ADVANCE) {
      for (int r = 0; r < R; ++r) {
        for (int i = 0; i < N; ++i) {
          state_out[own + r * Dk + L * i] = s[r][i];
        }
      }
    }
"""
_INPUTS = """
    const auto all_keys = k + K_AT + first_token * K_BY0 + hk * K_BY1 + part;
    const auto all_queries = q + Q_AT + first_token * Q_BY0 + hk * Q_BY1 + part;
    const auto all_values = v + V_AT + first_token * V_BY0 + hv * V_BY1 + first;
    const auto all_decays = g + G_AT + first_token * G_BY0 + hv;
    const auto all_strengths = beta + BETA_AT + first_token * BETA_BY0 + hv;
    const auto all_results = y + (first_token * Hv + hv) * Dv + first;
    constexpr int KEY_STEP = K_BY0, QUERY_STEP = Q_BY0, VALUE_STEP = V_BY0;
    constexpr int DECAY_STEP = G_BY0, STRENGTH_STEP = BETA_BY0, RESULT_STEP = Hv * Dv;
"""
# The positions of a window: `all_keys` to `all_strengths` point to the first one's inputs, and
# `all_results` to its results; NAME_STEP is the distance of the next one.
WINDOW = """
    const int valid = ADVANCE ? lengths[b] : length;
    // What a position needs is read while the AHEAD before it are computed.
    InT next_key[AHEAD][N];
    InT next_query[AHEAD][N];
    ValueT next_value[AHEAD][R];
    float next_decay[AHEAD];
    StrengthT next_strength[AHEAD];
    for (int begin = valid > 0 ? -AHEAD : 0; begin < valid; begin += AHEAD) {
      #pragma unroll
      for (int ahead = 0; ahead < AHEAD; ++ahead) {
        const int t = begin + ahead;
        float key[N];
        float query[N];
        float value[R];
        const float decay = next_decay[ahead];
        const float strength = static_cast<float>(next_strength[ahead]);
        for (int i = 0; i < N; ++i) {
          key[i] = static_cast<float>(next_key[ahead][i]);
          query[i] = static_cast<float>(next_query[ahead][i]);
        }
        for (int r = 0; r < R; ++r) {
          value[r] = static_cast<float>(next_value[ahead][r]);
        }
        const int coming = t + AHEAD < valid ? t + AHEAD : valid - 1;
        const auto keys = all_keys + coming * KEY_STEP;
        const auto queries = all_queries + coming * QUERY_STEP;
        const auto values = all_values + coming * VALUE_STEP;
        for (int i = 0; i < N; ++i) {
          next_key[ahead][i] = keys[L * i];
          next_query[ahead][i] = queries[L * i];
        }
        for (int r = 0; r < R; ++r) {
          next_value[ahead][r] = values[r];
        }
        next_decay[ahead] = all_decays[coming * DECAY_STEP];
        next_strength[ahead] = all_strengths[coming * STRENGTH_STEP];
        if (t < 0 || t >= valid) {
          continue;
        }

        // All sums are over the state before the position, so one round of shuffles adds them up:
        // y = S' q = decay S q + d (k q) with S' = decay S + d k, d = strength (v - decay S k).
        float alike = 0.0f;
        float memory[R];
        float result[R];
        for (int i = 0; i < N; ++i) {
          alike = fma(key[i], query[i], alike);
        }
        for (int r = 0; r < R; ++r) {
          memory[r] = result[r] = 0.0f;
          for (int i = 0; i < N; ++i) {
            memory[r] = fma(s[r][i], key[i], memory[r]);
            result[r] = fma(s[r][i], query[i], result[r]);
          }
        }
        for (int other = L / 2; other > 0; other /= 2) {
          alike += SHUFFLE_XOR(alike, other);
          for (int r = 0; r < R; ++r) {
            memory[r] += SHUFFLE_XOR(memory[r], other);
            result[r] += SHUFFLE_XOR(result[r], other);
          }
        }
        const int out = ((b * length + t) * Hv + hv) * Dv + first;
        for (int r = 0; r < R; ++r) {
          const float d = (value[r] - decay * memory[r]) * strength;
          for (int i = 0; i < N; ++i) {
            s[r][i] = fma(key[i], d, s[r][i] * decay);
          }
          if (part == 0) {
            const float y_r = fma(d, alike, decay * result[r]) * scale;
            all_results[t * RESULT_STEP + r] = static_cast<InT>(y_r);
            if (!ADVANCE) {
              delta[out + r] = d;
            }
          }
        }
      }
    }
    // Outputs behind the row's end are 0: a NaN would reach other rows through masked attention.
    for (int t = valid; t < length; ++t) {
      for (int r = part; r < R; r += L) {
        all_results[t * RESULT_STEP + r] = static_cast<InT>(0.0f);
      }
    }
    if (ADVANCE) {
      for (int r = 0; r < R; ++r) {
        for (int i = 0; i < N; ++i) {
          state_out[own + r * Dk + L * i] = s[r][i];
        }
      }
    }
"""
_BODY = _PLACE + LOAD + FOLD + _INPUTS + WINDOW

_WINDOWS = ("q", "k", "v", "g", "beta", "previous_k", "previous_delta", "previous_g")


@functools.cache
def _kernel(advance: bool) -> gpu.Kernel:
    """Returns the kernel; if it advances the state, nothing is pending and it has no `delta`."""
    inputs = [*_WINDOWS, "state", "num_kept", "lengths"]
    outputs, body = ["y", "state_out", "delta"], _BODY
    if advance:  # Code that never runs still names `delta`.
        outputs, body = outputs[:2], "    const auto delta = state_out;\n" + _BODY
    columns = _WINDOWS[:5]
    return gpu.Kernel("gated_delta", inputs, outputs, body, contiguous=True, columns=columns)


def run_kernel(
    q: Operand,
    window: GDNWindow,
    state: mx.array,
    previous: PendingWindow | None,
    num_kept: mx.array | None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array, PendingWindow | None]:
    """`recurrence.run_window`, always by the kernel."""
    batch, _, heads, value_dim = window.v.shape
    if previous is None or num_kept is None:
        previous, num_kept = PendingWindow(*window[:3]), gpu.zeros(batch)
    lanes, rows = next((n, r) for n, r in LAYOUTS if value_dim % (gpu.LANES // n * r) == 0)
    advance = lengths is not None
    arrays, constants = arrays_and_constants(_WINDOWS, (q, *window, *previous))
    results = (window.v.shape, q.dtype), (state.shape, mx.float32), (window.v.shape, mx.float32)
    outputs, after, *deltas = _kernel(advance)(
        [*arrays, state, num_kept, num_kept if lengths is None else lengths],
        {"InT": q.dtype, "ValueT": window.v.dtype, "StrengthT": window.beta.dtype}
        | {"ADVANCE": advance, "AHEAD": _AHEAD if advance and window.length > _AHEAD else 1}
        | {**_shape(window).sizes(), "L": lanes, "R": rows, **constants},
        (1, value_dim * lanes // (gpu.LANES * rows), batch * heads),
        results[: 2 if advance else 3],
    )
    return outputs, after, PendingWindow(window.k, deltas[0], window.g) if deltas else None


def fold_by_kernel(previous: PendingWindow, num_kept: mx.array, state: mx.array) -> mx.array:
    """`recurrence.fold` by the kernel, with a new window that has no valid positions."""
    window, none = GDNWindow(*previous, previous.g), mx.zeros_like(num_kept)
    return run_kernel(previous.k, window, state, previous, num_kept, none)[1]


def fits(window: GDNWindow | PendingWindow) -> bool:
    """Returns whether the kernel runs windows of these shapes and types here."""
    return GATED_DELTA.works(_shape(window), window.k.dtype)


def _shape(window: GDNWindow | PendingWindow) -> GDNShape:
    # A window's values and a pending window's deltas have the same shape.
    return GDNShape(*window.k.shape[2:], *window[1].shape[2:])


def _arguments(shape: GDNShape, dtype: mx.Dtype, tokens: int) -> tuple[Any, ...]:
    inputs = self_check.RandomInputs(0, shape, dtype)
    return *inputs.window(1, tokens), inputs.state(1), None, None


GATED_DELTA = gpu.Operation(
    "gated delta kernel / portable",
    "gated_delta",
    error=lambda shape, dtype: self_check.gated_delta_error(run_kernel, shape, dtype),
    applies=lambda shape, _: shape.key_dim % gpu.LANES == 0,
    run_kernel=run_kernel,
    reference=portable.run_window,
    arguments=_arguments,
)
