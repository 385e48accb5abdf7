"""Products of two to eight rows whose quantized weights are read once for four rows.

mlx's Metal backend runs so few rows as products of one, each of which reads the weights again: what
a verify window costs there. It has never been run on a Mac; see `models.few_rows` for what has to
hold before it is used. The body runs on CUDA too, where `kernels.few_rows` is faster.
"""

import mlx.core as mx

from mlx_mtp.kernels import gpu

MOST_ROWS = 8
_BITS, _GROUP_SIZES = (4, 8), (32, 64, 128)
_COLUMNS = 8  # of a lane at once: within a group
_ROWS, _FEATURES = 4, 4  # of a warp; their product is the number of its sums

# A warp has FEATURES features and ROWS rows, its lanes share the columns, and the sums of the lanes
# are added in a fixed order: a row's result does not depend on the others.
_BODY = """
    const int first = grid_y * FEATURES;
    const int row = grid_x * ROWS;
    if (first >= N) {
      return;
    }
    const int last = x_shape[0] - 1;
    constexpr int WORDS = COLUMNS * BITS / 32;

    float sums[FEATURES][ROWS];
    for (int f = 0; f < FEATURES; ++f) {
      for (int r = 0; r < ROWS; ++r) {
        sums[f][r] = 0.0f;
      }
    }
    for (int at = lane * COLUMNS; at < K; at += 32 * COLUMNS) {
      float values[ROWS][COLUMNS];
      float total[ROWS];
      for (int r = 0; r < ROWS; ++r) {
        // Behind the last row and feature these are computed again, and not written.
        const auto from = x + (row + r < last ? row + r : last) * K + at;
        total[r] = 0.0f;
        for (int i = 0; i < COLUMNS; ++i) {
          values[r][i] = static_cast<float>(from[i]);
          total[r] += values[r][i];
        }
      }
      for (int f = 0; f < FEATURES; ++f) {
        const int feature = first + f < N ? first + f : N - 1;
        const float scale = static_cast<float>(scales[feature * (K / GROUP) + at / GROUP]);
        const float bias = static_cast<float>(biases[feature * (K / GROUP) + at / GROUP]);
        float codes[COLUMNS];
        for (int i = 0; i < WORDS; ++i) {
          auto word = w[feature * (K * BITS / 32) + at * BITS / 32 + i];
          for (int j = 0; j < 32 / BITS; ++j) {
            codes[i * (32 / BITS) + j] = static_cast<float>(word & ((1 << BITS) - 1));
            word >>= BITS;
          }
        }
        for (int r = 0; r < ROWS; ++r) {
          float dot = 0.0f;
          for (int i = 0; i < COLUMNS; ++i) {
            dot = fma(codes[i], values[r][i], dot);
          }
          sums[f][r] = fma(scale, dot, fma(bias, total[r], sums[f][r]));
        }
      }
    }
    for (int f = 0; f < FEATURES; ++f) {
      for (int r = 0; r < ROWS; ++r) {
        for (int other = 16; other > 0; other /= 2) {
          sums[f][r] += SHUFFLE_XOR(sums[f][r], other);
        }
        if (lane == 0 && row + r <= last && first + f < N) {
          y[(row + r) * N + first + f] = static_cast<T>(sums[f][r]);
        }
      }
    }
"""

_KERNEL = gpu.Kernel("shared_reads", ["x", "w", "scales", "biases"], ["y"], _BODY)


def fits(inputs: int, bits: int, group_size: int) -> bool:
    """Whether the kernel is made for such weights, affine, and this backend."""
    known = bits in _BITS and group_size in _GROUP_SIZES
    return gpu.backend() == "metal" and known and inputs % group_size == 0


def product(
    x: mx.array,  # [M, K]
    weight: tuple[mx.array, mx.array, mx.array],  # codes [N, K / 8 or / 4], scales and biases
) -> mx.array:
    """x times the transpose of an affine quantized weight, summed in float32: [M, N]."""
    codes, scales, _ = weight
    (rows, inputs), outputs = x.shape, codes.shape[0]
    constants = {"K": inputs, "N": outputs, "BITS": codes.shape[1] * 32 // inputs}
    constants |= {"GROUP": inputs // scales.shape[1]}
    constants |= {"ROWS": _ROWS, "FEATURES": _FEATURES, "COLUMNS": _COLUMNS}
    (y,) = _KERNEL(
        [mx.contiguous(x), *weight],
        [("T", x.dtype), *constants.items()],
        (-(-rows // _ROWS), -(-outputs // _FEATURES), 1),
        [((rows, outputs), x.dtype)],
    )
    return y
