"""The skinny GEMM for Metal: quantized weights are read once for several rows.

Up to four rows, and experts, are summed by a warp's lanes; five to sixteen rows are 8 x 8 products
in the matrix units, where a threadgroup's warps split K. All sums are float32, in an order that
does not depend on the other rows. Lanes use the same order for all numbers of rows, so with
`SkinnyGemm.one_order` they compute all products.

It has not been run on a Mac. The bodies run on CUDA too, where `cuda.skinny_gemm` is faster.
"""

import functools
from typing import Any

import mlx.core as mx

from mlx_mtp.kernels import gpu
from mlx_mtp.kernels.formats import Weight
from mlx_mtp.kernels.skinny_gemm import SkinnyGemm, input_names, prologue

WORTH = 1.0  # maximum time, relative to mlx's operation
MOST_PAIRS = 0  # (token, expert) pairs of a prompt

_ROWS, _SUMS = 4, 16  # maximum rows for lanes, where matrices can run too; sums of a warp
# (maximum rows or pairs of the GEMM, rows of a warp). Beyond these a warp sums `_LARGEST` rows, or
# `_LARGEST_OF_PAIRS` pairs: a pair is mostly the only one of its expert.
_ROWS_OF, _PAIRS_OF = ((1, 1), (2, 2), (4, 4)), ((16, 1), (64, 2))
_LARGEST, _LARGEST_OF_PAIRS = 8, 4
_MOST_ROWS = 16  # of a threadgroup with matrices; mlx's own operation serves more
_LASTS = (2, 4, 5, 8, 12, _MOST_ROWS)  # the last number of rows of each band
_LASTS_OF_EXPERTS, _MOST_TOKENS = (1, 2, 4, 8, 16), 64  # the same for experts, in tokens
_STEP = 64  # columns that a warp multiplies at once: eight of each line of a matrix
# From this many features on a warp with matrices computes 32, else 16: then there are enough warps.
_WIDE = 8192

# c += a b of 8 x 8 float32. A lane has two neighbours in a line of each matrix (`_MATRICES`).
_MULTIPLY: dict[gpu.Backend, str] = {
    "metal": """
#ifdef __METAL_VERSION__
#include <metal_simdgroup_matrix>
#endif
inline void multiply_8x8(thread float* c, float a0, float a1, float b0, float b1) {
  metal::simdgroup_float8x8 left, right, sum;
  left.thread_elements()[0] = a0;
  left.thread_elements()[1] = a1;
  right.thread_elements()[0] = b0;
  right.thread_elements()[1] = b1;
  sum.thread_elements()[0] = c[0];
  sum.thread_elements()[1] = c[1];
  metal::simdgroup_multiply_accumulate(sum, left, right, sum);
  c[0] = sum.thread_elements()[0];
  c[1] = sum.thread_elements()[1];
}
""",
    # Only to test the body: lanes get the numbers from one another by shuffles.
    "cuda": """
__device__ inline void multiply_8x8(float* c, float a0, float a1, float b0, float b1) {
  const int lane = threadIdx.x;
  for (int k = 0; k < 8; ++k) {
    const int left = (lane & 22) | (k & 4) << 1 | (k >> 1 & 1);
    const int right = (lane & 9) | (k & 4) << 2 | (k & 3) << 1;
    const unsigned mine = __float_as_uint(k & 1 ? a1 : a0);
    const float a = __uint_as_float(__shfl_sync(0xffffffffu, mine, left));
    const unsigned first = __shfl_sync(0xffffffffu, __float_as_uint(b0), right);
    const unsigned second = __shfl_sync(0xffffffffu, __float_as_uint(b1), right);
    c[0] = fma(a, __uint_as_float(first), c[0]);
    c[1] = fma(a, __uint_as_float(second), c[1]);
  }
}
""",
}
# Each body begins with the rows of x, up to ROWS, that it reads and the rows that it writes. In
# plain products these are consecutive.
_PLAIN = """
    const int first = grid_x * ROWS;
    const int left = x_shape[0] - first;
    const int count = left < ROWS ? left : ROWS;
    #define SOURCE(r) (first + (r))
    #define TARGET(r) (first + (r))
"""
# For experts, (token, expert) pairs are sorted by expert and cut at multiples of ROWS. A block
# computes one expert's pairs between two cuts. PAIRS consecutive pairs share a row of x.
_PAIRS = """
    const int first = grid_x;
    const int expert = experts[first];
    if (first % ROWS > 0 && expert == experts[first - 1]) {
      return;
    }
    int count = 1;
    while ((first + count) % ROWS > 0 && first + count < pairs_shape[1] &&
           experts[first + count] == expert) {
      ++count;
    }
    EXPERT
    #define SOURCE(r) (order[first + (r)] / PAIRS)
    #define TARGET(r) order[first + (r)]
"""
# Decodes eight codes of a part's feature, from a column on; a weight is scale * code + bias.
_RUN = """
        const size_t line = base + p * up + (FEATURE < N ? FEATURE : N - 1);
        const size_t group = line * (K / GROUP) + (COLUMN) / GROUP;
        const float bias = AFFINE ? static_cast<float>(b[group]) : 0.0f;
        float scale = static_cast<float>(s[group]);
        if (!AFFINE) {  // an e4m3 or a power of two, times the unit of the numbers below
          const int code = static_cast<int>(s[group]);
          const int digits = code < 8 ? code : (8 + code % 8) << (code / 8 & 15) >> 1;
          scale = GROUP == 16 ? digits / 1024.0f : ldexp(1.0f, code - (BITS == 4 ? 128 : 136));
        }
        // Eight codes are BITS bytes, and so begin with a byte of a word.
        const int byte = (COLUMN) / 8 * BITS;
        const auto words = w + line * (K / 32 * BITS) + byte / 4;
        uint64_t run = words[0];
        if (byte % 4 * 8 + 8 * BITS > 32) {
          run |= static_cast<uint64_t>(words[1]) << 32;
        }
        run >>= byte % 4 * 8;
        const uint32_t halves[2] = {static_cast<uint32_t>(run),
                                    static_cast<uint32_t>(run >> 4 * BITS)};
        float codes[8];
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int code = halves[i / 4] >> i % 4 * BITS & ((1 << BITS) - 1);
          codes[i] = static_cast<float>(code);
          if (!AFFINE) {  // sign, exponent, and one or three digits, as an integer
            constexpr int ONE = BITS == 4 ? 2 : 8;
            const int rest = code % (1 << (BITS - 1));
            const int digits = rest < ONE ? rest : (ONE + rest % ONE) << rest / ONE >> 1;
            codes[i] = static_cast<float>(code > rest ? -digits : digits);
          }
        }
"""
# A warp computes FEATURES features of each part for ROWS rows, and its lanes share the columns.
_LANES = """
    const int f0 = grid_y * FEATURES;
    if (f0 >= N) {
      return;
    }
    float sums[PARTS * FEATURES * ROWS];
    for (int i = 0; i < PARTS * FEATURES * ROWS; ++i) {
      sums[i] = 0.0f;
    }
    for (int at = lane * 8; at < K; at += 256) {
      float values[ROWS][8];
      float total[ROWS];
      #pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        // Behind the last row and feature these are computed again, and not written.
        const auto from = x + static_cast<size_t>(SOURCE(r < count ? r : 0)) * K + at;
        total[r] = 0.0f;
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
          values[r][i] = static_cast<float>(from[i]);
          total[r] += values[r][i];
        }
      }
      #pragma unroll
      for (int f = 0; f < PARTS * FEATURES; ++f) {
        const int p = f / FEATURES;
        RUN
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          float dot = 0.0f;
          #pragma unroll
          for (int i = 0; i < 8; ++i) {
            dot = fma(codes[i], values[r][i], dot);
          }
          sums[f * ROWS + r] = fma(scale, dot, fma(bias, total[r], sums[f * ROWS + r]));
        }
      }
    }
    #pragma unroll
    for (int i = 0; i < FEATURES * ROWS; ++i) {
      const int f = f0 + i / ROWS, r = i % ROWS;
      float done[PARTS];
      for (int p = 0; p < PARTS; ++p) {
        done[p] = sums[p * FEATURES * ROWS + i];
        for (int other = 16; other > 0; other /= 2) {
          done[p] += SHUFFLE_XOR(done[p], other);
        }
      }
      if (lane == 0 && r < count && f < N) {
        y[static_cast<size_t>(TARGET(r)) * N + f] = static_cast<T>(RESULT);
      }
    }
""".replace("RUN", _RUN.replace("FEATURE", "(f0 + f % FEATURES)").replace("COLUMN", "at"))
# A warp computes ACROSS matrices of features of each part, for TILES of rows, over every WARPS-th
# run of columns. Line l of the right operands has the columns from 8 l on: matrix i multiplies the
# i-th column of each eight, and a lane has sixteen columns of a row of x.
_MATRICES = """
    constexpr int EACH = ACROSS * TILES * 2;
    THREADGROUP(float, parts, WARPS * PARTS * EACH * 32);
    const int f0 = grid_y / WARPS * 8 * ACROSS;
    if (f0 >= N) {
      return;
    }
    const int mine = lane / 16 * 4 + lane / 2 % 4;
    const int pair = lane / 8 % 2 * 2 + lane % 2;
    float sums[PARTS * EACH];
    for (int i = 0; i < PARTS * EACH; ++i) {
      sums[i] = 0.0f;
    }
    for (int at = warp * 64; at < K; at += WARPS * 64) {
      float values[TILES][16];
      #pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const int r = 8 * n + mine;
        const auto from = x + static_cast<size_t>(SOURCE(r < count ? r : 0)) * K + at + 16 * pair;
        #pragma unroll
        for (int i = 0; i < 16; ++i) {
          values[n][i] = static_cast<float>(from[i]);
        }
      }
      #pragma unroll
      for (int a = 0; a < PARTS * ACROSS; ++a) {
        const int p = a / ACROSS;
        float both[2][8];
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
          RUN
          #pragma unroll
          for (int i = 0; i < 8; ++i) {
            both[e][i] = fma(scale, codes[i], bias);
          }
        }
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
          #pragma unroll
          for (int i = 0; i < 8; ++i) {
            multiply_8x8(sums + (a * TILES + n) * 2, values[n][i], values[n][8 + i],
                         both[0][i], both[1][i]);
          }
        }
      }
    }
    for (int i = 0; i < PARTS * EACH; ++i) {
      parts[(warp * PARTS * EACH + i) * 32 + lane] = sums[i];
    }
    BARRIER;
    for (int i = warp; i < EACH; i += WARPS) {
      float done[PARTS];
      for (int p = 0; p < PARTS; ++p) {
        done[p] = 0.0f;
        for (int each = 0; each < WARPS; ++each) {
          done[p] += parts[((each * PARTS + p) * EACH + i) * 32 + lane];
        }
      }
      const int f = f0 + i / (2 * TILES) * 8 + 2 * pair + i % 2;
      const int r = i / 2 % TILES * 8 + mine;
      if (r < count && f < N) {
        y[static_cast<size_t>(TARGET(r)) * N + f] = static_cast<T>(RESULT);
      }
    }
""".replace(
    "RUN",
    _RUN.replace("FEATURE", "(f0 + a % ACROSS * 8 + 2 * pair + e)").replace(
        "COLUMN", "at + 8 * mine"
    ),
)
_RESULTS = ["done[0]", "done[0] / (1.0f + exp(-done[0])) * done[1]"]  # by the number of parts


def applies(weight: Weight, dtype: mx.Dtype) -> bool:
    """Returns whether the kernels support a weight and type of activations on this backend."""
    is_quantized = weight.form.bits <= 8 and weight.is_of(dtype)
    return gpu.backend() == "metal" and is_quantized and weight.inputs % _STEP == 0


def bands(weight: Weight) -> dict[int, range]:
    """Returns the bands of token counts that the kernels can serve, by the count to time each with.

    Bands end where mlx reads the weights once more: after 5 and 10 rows, and before 13, from which
    on mlx has a GEMM. Ours reads them once for 4, 8 and 16 rows.
    """
    lasts, first = list(_LASTS), 2
    if weight.codes.ndim == 3:
        lasts, first = [*(n for n in _LASTS_OF_EXPERTS if n < _MOST_TOKENS), _MOST_TOKENS], 1
    found = {}
    for last in lasts:
        found[last], first = range(first, last + 1), last + 1
    return found


def run_kernel(gemm: SkinnyGemm) -> mx.array:
    """Returns the GEMM's result."""
    x, parts, outputs = gemm.x, gemm.parts, gemm.outputs
    mode, bits, group = gemm.weight.form
    template: dict[str, Any] = {"T": x.dtype, "K": x.shape[1], "BITS": bits, "GROUP": group}
    template |= {"AFFINE": mode == "affine", **gemm.constants}
    sums = gemm.of_experts or gemm.one_order or gemm.rows <= _ROWS
    if sums:
        of, most = (_PAIRS_OF, _LARGEST_OF_PAIRS) if gemm.of_experts else (_ROWS_OF, _LARGEST)
        block = next((block for rows, block in of if gemm.rows <= rows), most)
        warps, features = 4, min(4, _SUMS // block) // parts
        template |= {"FEATURES": features}
        blocks = -(-outputs // features)
    else:
        across, warps = (4, 2) if outputs >= _WIDE else (2, 4)
        across, tiles = across // parts, -(-min(gemm.rows, _MOST_ROWS) // 8)
        block = 8 * tiles
        template |= {"ACROSS": across, "TILES": tiles, "WARPS": warps}
        blocks = -(-outputs // (8 * across)) * warps
    (y,) = _kernel(sums, parts, gemm.of_experts)(
        gemm.input_arrays,
        template | {"ROWS": block},
        (gemm.rows if gemm.of_experts else -(-gemm.rows // block), blocks, 1),
        [((gemm.rows, outputs), x.dtype)],
        warps,
    )
    return y


@functools.cache
def _kernel(sums: bool, parts: int, of_experts: bool) -> gpu.Kernel:
    source = prologue(_PAIRS if of_experts else _PLAIN, of_experts)
    source += (_LANES if sums else _MATRICES).replace("RESULT", _RESULTS[parts - 1])
    return gpu.Kernel(
        f"few_rows_{'lanes' if sums else 'matrices'}_{parts}_{int(of_experts)}",
        input_names(of_experts),
        ["y"],
        source,
        headers={} if sums else _MULTIPLY,
        contiguous=True,
    )
