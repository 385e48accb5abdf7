"""GEMM of two to eight rows, for Metal: quantized weights are read once for four rows.

mlx's Metal backend runs so few rows as products of one, each of which reads the weights again: what
a verify window costs there. It has never been run on a Mac; see `models.few_rows` for what has to
hold before it is used. The body runs on CUDA too, where `kernels.few_rows` is faster.
"""

from collections.abc import Sequence

import mlx.core as mx

from mlx_mtp.kernels import gpu
from mlx_mtp.kernels.formats import Weight

MOST_ROWS = 8
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
        const int group = feature * (K / GROUP) + at / GROUP;
        const float bias = AFFINE ? static_cast<float>(biases[group]) : 0.0f;
        float scale = static_cast<float>(scales[group]);
        if (!AFFINE) {  // an e4m3 or a power of two, times the unit of the numbers below
          const int code = static_cast<int>(scales[group]);
          const int digits = code < 8 ? code : (8 + code % 8) << (code / 8 & 15) >> 1;
          scale = GROUP == 16 ? digits / 1024.0f : ldexp(1.0f, code - (BITS == 4 ? 128 : 136));
        }
        // Eight codes are BITS bytes, and so begin with a byte of a word.
        const int byte = (feature * (K / 8) + at / 8) * BITS;
        uint64_t run = w[byte / 4];
        if (byte % 4 * 8 + 8 * BITS > 32) {
          run |= static_cast<uint64_t>(w[byte / 4 + 1]) << 32;
        }
        run >>= byte % 4 * 8;
        const uint32_t halves[2] = {static_cast<uint32_t>(run),
                                    static_cast<uint32_t>(run >> 4 * BITS)};
        float codes[COLUMNS];
        for (int i = 0; i < COLUMNS; ++i) {
          const int code = halves[i / 4] >> i % 4 * BITS & ((1 << BITS) - 1);
          codes[i] = static_cast<float>(code);
          if (!AFFINE) {  // sign, exponent, and one or three digits, as an integer
            constexpr int ONE = BITS == 4 ? 2 : 8;
            const int rest = code % (1 << (BITS - 1));
            const int digits = rest < ONE ? rest : (ONE + rest % ONE) << rest / ONE >> 1;
            codes[i] = static_cast<float>(code > rest ? -digits : digits);
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

KERNEL = gpu.Kernel("shared_reads", ["x", "w", "scales", "biases"], ["y"], _BODY)


def fits(weight: Weight, dtype: mx.Dtype) -> bool:
    """Whether the kernel is made for such a weight, activations, and this backend."""
    return gpu.backend() == "metal" and weight.form.bits <= 8 and weight.fits(dtype)


def serves(rows: int, _weight: Weight) -> bool:
    """Whether it is used for so many of a decode step's tokens."""
    return 2 <= rows <= MOST_ROWS


def products(x: mx.array, weights: Sequence[Weight]) -> list[mx.array]:
    """x [M, K] times the transpose of each quantized weight [N, K], summed in float32: [M, N]."""
    return [_product(x, weight) for weight in weights]


def _product(x: mx.array, weight: Weight) -> mx.array:
    (rows, inputs), outputs = x.shape, weight.codes.shape[0]
    _, bits, group = weight.form
    template = {"T": x.dtype, "K": inputs, "N": outputs, "BITS": bits, "GROUP": group}
    template |= {"AFFINE": weight.form.mode == "affine"}
    template |= {"ROWS": _ROWS, "FEATURES": _FEATURES, "COLUMNS": _COLUMNS}
    (y,) = KERNEL(
        [mx.contiguous(x), *weight[:3]],
        template,
        (-(-rows // _ROWS), -(-outputs // _FEATURES), 1),
        [((rows, outputs), x.dtype)],
    )
    return y
