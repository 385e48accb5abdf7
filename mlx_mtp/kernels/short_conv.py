"""From a GatedDeltaNet layer's projections to the inputs of its recurrence.

On a GPU one kernel replaces some twenty operations: a warp gathers the convolution's inputs of one
head at one position (in prompts, at a few), convolves, applies silu and the l2 norm of q and k, and
computes the gates.
"""

from typing import Any

import mlx.core as mx

from mlx_mtp.kernels import gpu, portable, self_check
from mlx_mtp.kernels.gdn_types import GDNProjections, GDNShape, GDNWindow, ShortConvWeights
from mlx_mtp.kernels.view import Operand, View, arrays_and_constants, column_view

_RUN = 4  # positions of a warp in a prompt

_PLACE = """
    const int head = grid_y;
    if (head >= 2 * Hk + Hv) {
      return;
    }
    const int length = q_shape[0] / num_kept_shape[0];
    const int runs = (length + RUN - 1) / RUN;
    const int b = grid_x / runs;
    const int begin = grid_x % runs * RUN;
"""
_CONVOLVE = """
    const bool is_value = head >= 2 * Hk;
    const bool is_key = !is_value && head >= Hk;
    // The head among its own kind, and among the key heads.
    const int own = is_value ? head - 2 * Hk : (is_key ? head - Hk : head);
    const int hk = is_value ? own / (Hv / Hk) : own;
    const int in_hk = is_value ? own % (Hv / Hk) : 0;
    const int dim = is_value ? Dv : Dk;
    const int channel = is_value ? 2 * Hk * Dk + own * Dv : (is_key ? Hk * Dk : 0) + own * Dk;
    constexpr int C = 2 * Hk * Dk + Hv * Dv;
    constexpr int N = (Dk > Dv ? Dk : Dv) / 32;

    const size_t first = static_cast<size_t>(b) * length;  // the row's first token
    const auto row = is_value ? v + V_AT + first * V_BY0 + hk * V_BY1 + in_hk * V_BY2
        : (is_key ? k + K_AT + first * K_BY0 + hk * K_BY1 : q + Q_AT + first * Q_BY0 + hk * Q_BY1);
    const size_t stride = is_value ? V_BY0 : (is_key ? K_BY0 : Q_BY0);
    const auto before = history + (b * history_shape[1] + num_kept[b]) * C + channel;
    const auto after = conv_input + b * (SIZE - 1 + length) * C + channel;

    InT taps[RUN + SIZE - 1][N];  // the convolution's inputs of all of the warp's positions
    float filter[N][SIZE];
    for (int i = 0; i < dim / 32; ++i) {
      const int c = 32 * i + lane;
      for (int j = 0; j < RUN + SIZE - 1; ++j) {
        const int at = begin + j < length + SIZE - 1 ? begin + j : length + SIZE - 2;
        taps[j][i] = at < SIZE - 1 ? before[at * C + c] : row[(at - SIZE + 1) * stride + c];
      }
      for (int j = 0; j < SIZE; ++j) {
        filter[i][j] = static_cast<float>(weight[(channel + c) * SIZE + j]);
      }
    }
    for (int i = 0; i < dim / 32; ++i) {
      for (int j = 0; j < RUN + SIZE - 1; ++j) {
        if (KEEPS && (begin == 0 || j >= SIZE - 1) && begin + j < length + SIZE - 1) {
          after[(begin + j) * C + 32 * i + lane] = taps[j][i];
        }
      }
    }
    #pragma unroll
    for (int step = 0; step < RUN; ++step) {
      const int t = begin + step;
      if (t >= length) {
        continue;
      }
      float x[N];
      float squares = 0.0f;
      for (int i = 0; i < dim / 32; ++i) {
        float sum = 0.0f;
        for (int j = 0; j < SIZE; ++j) {
          sum = fma(static_cast<float>(taps[step + j][i]), filter[i][j], sum);
        }
        // Rounded as an array of the activations' type would be.
        x[i] = static_cast<float>(static_cast<InT>(sum / (1.0f + exp(-sum))));
        squares = fma(x[i], x[i], squares);
      }
      float scale = 1.0f;
      if (!is_value) {
        for (int other = 16; other > 0; other /= 2) {
          squares += SHUFFLE_XOR(squares, other);
        }
        scale = 1.0f / sqrt(squares + 1.0f / INVERSE_EPS);
      }
      for (int i = 0; i < dim / 32; ++i) {
        OUT[32 * i + lane] = static_cast<InT>(x[i] * scale);
      }
      if (is_value && lane == 0) {
        const float raw = static_cast<float>(
            a[A_AT + (first + t) * A_BY0 + hk * A_BY1 + in_hk * A_BY2])
            + static_cast<float>(dt_bias[own]);
        const float strength = static_cast<float>(
            bb[B_AT + (first + t) * B_BY0 + hk * B_BY1 + in_hk * B_BY2]);
        // softplus = max(x, 0) + log(1 + u), whose digits a plain sum would lose for a small u.
        const float u = exp(-fabs(raw));
        const float w = 1.0f + u;
        const float log_w = w == 1.0f ? u : log(w) * u / (w - 1.0f);
        const float softplus = (raw > 0.0f ? raw : 0.0f) + log_w;
        DECAY = exp(-exp(static_cast<float>(log_decay[own])) * softplus);
        STRENGTH = static_cast<float>(static_cast<InT>(1.0f / (1.0f + exp(-strength))));
      }
    }
"""


def source(keeps: str, out: str, decay: str, strength: str) -> str:
    """Returns the source of a warp's work on a `head`, at the RUN positions of row b from `begin`.

    The arguments are expressions: whether the warp writes the convolution's inputs; and where
    position t, token `first + t` of the pass, has its numbers of the head, its decay and its write
    strength.
    """
    names = {"KEEPS": keeps, "OUT": out, "DECAY": decay, "STRENGTH": strength}
    text = _CONVOLVE
    for name, value in names.items():
        text = text.replace(name, value)
    return text


KERNEL = gpu.Kernel(
    "gated_delta_inputs",
    ["q", "k", "v", "a", "bb", "weight", "log_decay", "dt_bias", "history", "num_kept"],
    ["qkv", "gates", "conv_input"],  # normed q and k, and v; decay and write strength
    _PLACE
    + source(
        "true",
        "(qkv + (first + t) * C + channel)",
        "gates[(first + t) * (2 * Hv) + own]",
        "gates[(first + t) * (2 * Hv) + Hv + own]",
    ),
    contiguous=True,
    columns=(*"qkva", "bb"),
)


def convolve(
    projected: GDNProjections,  # of T positions
    convolution: ShortConvWeights,
    history: mx.array,  # earlier inputs: K-1, then the P of the last window, [B, K-1+P, C]
    num_kept: mx.array | None,  # of these P inputs that each row keeps, int32 [B]; None: P is 0
) -> tuple[Operand, GDNWindow, mx.array]:
    """Convolve q, k and v, apply silu, norm q and k, and compute the gates.

    Returns queries [B, T, Hk, Dk], the recurrence's other inputs, and the convolution's own input
    [B, K-1+T, C], which is the history of the next window; its channels are those of q, k, v.
    """
    by = run_kernel if fits(projected, convolution) else portable.short_conv
    return by(projected, convolution, history, num_kept)


def run_kernel(
    projected: GDNProjections,
    convolution: ShortConvWeights,
    history: mx.array,
    num_kept: mx.array | None,
) -> tuple[View, GDNWindow, mx.array]:
    """`convolve`, always by the kernel."""
    shape, dtype = shape_of(projected, convolution), projected.q.dtype
    batch, length = projected.q.shape[:2]
    if num_kept is None:
        num_kept = gpu.zeros(batch)
    rows, (key_heads, key_dim, heads, value_dim, _) = (batch, length), shape
    arrays, constants = arrays_and_constants("qkvab", map(by_token, projected))
    run = _RUN if length > gpu.LONGEST_WINDOW else 1
    history_shape = (batch, shape.conv_size - 1 + length, shape.channels)
    qkv, gates, conv_input = KERNEL(
        [*arrays, *convolution, history, num_kept],
        {"InT": dtype, "SIZE": shape.conv_size, "RUN": run}
        | {"INVERSE_EPS": round(1 / portable.EPS), **constants, **shape.sizes()},
        (batch * -(-length // run), 2 * key_heads + heads, 1),
        [
            ((*rows, shape.channels), dtype),
            ((*rows, 2 * heads), mx.float32),
            (history_shape, dtype),
        ],
    )
    firsts, keyed = (0, key_heads * key_dim), (key_heads, key_dim)
    q, k = (column_view(qkv, rows, at, key_dim, keyed) for at in firsts)
    v = column_view(qkv, rows, 2 * key_heads * key_dim, value_dim, (heads, value_dim))
    g, beta = (column_view(gates, rows, at, 1, (heads,)) for at in (0, heads))
    return q, GDNWindow(k, v, g, beta), conv_input


def by_token(source: Operand) -> View:
    """Returns the operand, [B, T, ..], as a view of an array [B * T, ..]."""
    if isinstance(source, View):
        return source
    return View.of(source)._replace(array=source.flatten(0, 1))


def fits(projected: GDNProjections, convolution: ShortConvWeights) -> bool:
    """Returns whether the kernel runs layers of these shapes and types here."""
    return SHORT_CONV.works(shape_of(projected, convolution), projected.q.dtype)


def shape_of(projected: GDNProjections, convolution: ShortConvWeights) -> GDNShape:
    """Returns the shape of a layer with these projections."""
    _, _, heads, ratio, value_dim = projected.v.shape
    return GDNShape(heads, projected.q.shape[3], heads * ratio, value_dim, convolution.size)


def _arguments(shape: GDNShape, dtype: mx.Dtype, tokens: int) -> tuple[Any, ...]:
    inputs = self_check.RandomInputs(0, shape, dtype)
    return inputs.projected(1, tokens), inputs.convolution(), inputs.history(1, 0), None


SHORT_CONV = gpu.Operation(
    "inputs kernel / portable",
    "gated_delta_inputs",
    lambda shape, dtype: self_check.short_conv_error(run_kernel, shape, dtype),
    lambda shape, _: shape.key_dim % gpu.LANES == shape.value_dim % gpu.LANES == 0,
    run_kernel,
    portable.short_conv,
    _arguments,
)
