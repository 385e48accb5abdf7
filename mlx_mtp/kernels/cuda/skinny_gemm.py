"""The skinny GEMM for CUDA, by the tensor cores' m16n8k16.

Operand a is 16 features of the weights, operand b 8 rows of x; weights are read once for up to 16
rows. The warps of a block split K, and their sums are added in a fixed order, which depends on the
weights alone.
"""

import functools
import sys

import mlx.core as mx

from mlx_mtp.kernels import gpu
from mlx_mtp.kernels.cuda import mma
from mlx_mtp.kernels.formats import BASES, DECODING, Weight
from mlx_mtp.kernels.skinny_gemm import SkinnyGemm, input_names, prologue

_CHUNK = 256  # columns that a warp loads at once
_FEATURES = 16  # of a block
WORTH = 1.5  # maximum time relative to mlx's operation: the price of rows independent of others
MOST_PAIRS = 1 << 15  # (token, expert) pairs of a prompt: a chunk of 2,048 tokens has fewer
_MOST_PLAIN_ROWS = 8  # for more, mlx's product also reads bfloat16 and float16 weights once
_TILE, _MOST_TILES = 8, 2  # rows of x in a tile, and tiles of a block
_MOST_WARPS = 16
_MANY_FEATURES, _THEIR_WARPS = 1 << 17, 4  # of lm_head, which has enough blocks with few warps
_STAGES = 2  # chunks in flight
_MANY_PAIRS = 256  # (token, expert) pairs; with more, blocks of several experts are enough

_HEADER = r"""
__device__ __forceinline__ float swiglu(const float* gate_up) {
  return gate_up[0] / (1.0f + __expf(-gate_up[0])) * gate_up[1];
}
"""
# A block computes the features from f0 on, of N. By its place in an mma fragment a lane has
# features g and g + 8, row g of x, and rows 2 t and 2 t + 1 of the results.
_START = r"""
    const int lane = threadIdx.x, warp = threadIdx.y, g = lane >> 2, t = lane & 3;
    const int f0 = blockIdx.x * 16;
"""
# The rows of x that this block reads, and the rows that it writes: in plain products ...
_ROWS = r"""
    const int first = blockIdx.y * (8 * TILES), count = min(8 * TILES, x_shape[0] - first);
    #define SOURCE(r) (first + (r))
    #define TARGET(r) (first + (r))
"""
# ... and for experts: (token, expert) pairs are sorted by expert and cut at each multiple of 8. A
# block computes one expert's pairs between two cuts, or with a SPAN of 8 all pairs there, one
# expert after the other, so few blocks are idle. PAIRS consecutive pairs share a row of x.
_PAIRS = r"""
    const int last = min((int)pairs_shape[1], ((int)blockIdx.y * SPAN / 8 + 1) * 8);
    int first = blockIdx.y * SPAN, count;
    if (SPAN == 1 && first % 8 && experts[first] == experts[first - 1]) return;
    do {
    const int expert = experts[first];
    for (count = 1; first + count < last && experts[first + count] == expert; ++count) {}
    EXPERT
    #define SOURCE(r) (order[first + (r)] / PAIRS)
    #define TARGET(r) order[first + (r)]
"""
_NEXT_PAIRS = """
    __syncthreads();
    } while (SPAN > 1 && (first += count) < last);
"""
# Of each 32 columns a lane has the eight from 8 t on.
_BODY = r"""
    constexpr int HALVES = AFFINE && BITS == 8 ? 2 : 1, UNITS = 2 * BITS;
    // A row's padding puts what lanes read at once into different banks.
    constexpr int ROW = (UNITS + (BITS < 8 ? 1 : BITS / 4)) * 16, CHUNKS = K / 256;
    constexpr int GROUPS = 256 / GROUP, SIDE = GROUPS * (AFFINE ? 2 : 1);
    constexpr int SIDES = AFFINE ? 32 : BITS < 16 ? 16 : 0, BYTES = 16 * ROW + SIDES * SIDE;
    SHARED(shared);
    unsigned char* const ring = shared + warp * (STAGES * PARTS * BYTES);
    // Behind the last feature that one is computed again, and not written.
    auto feature = [=](int r) { return min(f0 + r, N - 1); };
    // Other ways to write these addresses take up to a third more registers.
    constexpr int LINE = CHUNKS * UNITS * 16, SIDE_LINE = CHUNKS * SIDE;
    const char* const codes = reinterpret_cast<const char*>(w) + (size_t)base * LINE;
    const char* const sides = reinterpret_cast<const char*>(lane < 16 ? s : b)
                              + (size_t)base * SIDE_LINE;
    const uint4* rows[TILES];
    #pragma unroll
    for (int n = 0; n < TILES; ++n) {
      const int r = 8 * n + g;
      const size_t row = SOURCE(r < count ? r : 0);
      rows[n] = reinterpret_cast<const uint4*>(x) + row * (K / 8) + t;
    }
    auto load = [&](int chunk, int slot) {
      if (chunk < CHUNKS) {
        #pragma unroll
        for (int p = 0; p < PARTS; ++p) {
          const char* const from = codes + chunk * (UNITS * 16);
          const char* const side = sides + chunk * SIDE;
          unsigned char* to = ring + (slot * PARTS + p) * BYTES;
          #pragma unroll
          for (int i = 0; i < BITS; ++i) {
            const int r = (i * 32 + lane) / UNITS, u = (i * 32 + lane) % UNITS;
            copy16(to + r * ROW + u * 16, from + (size_t)(feature(r) + p * up) * LINE + u * 16);
          }
          if (lane < SIDES)
            copy<SIDE>(to + 16 * ROW + lane * SIDE,
                       side + (size_t)(feature(lane & 15) + p * up) * SIDE_LINE);
        }
      }
      commit();
    };
    float sums[TILES][PARTS][4] = {};
    #pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) load(warp + i * WARPS, i);
    uint4 next[TILES][2];
    #pragma unroll
    for (int n = 0; n < TILES; ++n) {
      next[n][0] = __ldg(rows[n] + warp * 32);
      next[n][1] = __ldg(rows[n] + warp * 32 + 4);
    }
    int slot = 0;
    #pragma unroll 1
    for (int chunk = warp; chunk < CHUNKS; chunk += WARPS) {
      wait<STAGES - 2>();
      __syncwarp();
      load(chunk + (STAGES - 1) * WARPS, slot == 0 ? STAGES - 1 : slot - 1);
      const unsigned char* here = ring + slot * PARTS * BYTES;
      slot = slot == STAGES - 1 ? 0 : slot + 1;
      Vector<SCALE, GROUPS> scales[PARTS][2], biases[PARTS][2];  // for both features
      #pragma unroll
      for (int p = 0; p < PARTS; ++p)
        #pragma unroll
        for (int i = 0; i < 2 && SIDES > 0; ++i) {
          const auto from = reinterpret_cast<const Vector<SCALE, GROUPS>*>(
              here + p * BYTES + 16 * ROW) + 8 * i + g;
          scales[p][i] = from[0];
          if (AFFINE) biases[p][i] = from[16];
        }
      #pragma unroll
      for (int k = 0; k < 4; ++k) {  // 64 columns, two runs of a lane
        unsigned runs[PARTS][2][2][BITS < 8 ? 2 : BITS / 4], factors[PARTS][2][2] = {};
        #pragma unroll
        for (int p = 0; p < PARTS; ++p)
          #pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int f = i & 1, j = i >> 1, at = (2 * k + j) * 32;
            const int byte = at * BITS / 8 + BITS * t;
            const unsigned char* row = here + p * BYTES + (8 * f + g) * ROW;
            load_run<BITS>(runs[p][f][j], row + (byte & ~3), byte % 4);
            if constexpr (BITS < 16 && !AFFINE) {
              const auto& codes = scales[p][f].at;
              const int second = GROUP == 16 ? at / GROUP + 1 : at / GROUP;
              factors[p][f][j] = scale_of<BITS, GROUP>(t < 2 ? codes[at / GROUP] : codes[second]);
            }
          }
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
          const int after = k < 3 ? chunk * 32 + (k + 1) * 8 : min(chunk + WARPS, CHUNKS - 1) * 32;
          const unsigned ones[4] = {ONES, ONES, ONES, ONES};
          float total[4] = {}, part[PARTS][HALVES][4] = {};
          #pragma unroll
          for (int j = 0; j < 2; ++j) {
            unsigned b[4];
            load_x<BITS>(b, next[n][j]);
            next[n][j] = __ldg(rows[n] + after + 4 * j);
            #pragma unroll
            for (int e = 0; e < 4; e += 2) {
              if (AFFINE) multiply(total, ones, b[e], b[e + 1]);
              #pragma unroll
              for (int p = 0; p < PARTS; ++p)
                #pragma unroll
                for (int h = 0; h < HALVES; ++h) {
                  unsigned a[4];
                  #pragma unroll
                  for (int i = 0; i < 4; ++i)
                    a[i] = numbers<BITS, AFFINE>(
                        runs[p][i & 1][j], e + i / 2, h, factors[p][i & 1][j]);
                  multiply(AFFINE ? part[p][h] : sums[n][p], a, b[e], b[e + 1]);
                }
            }
            if constexpr (AFFINE) {
              if (j == 0 && GROUP > 32) continue;
              // scale * (sum of q x) + bias * (sum of x), and BASE was added to each code.
              #pragma unroll
              for (int p = 0; p < PARTS; ++p)
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                  const int f = i >> 1, group = (2 * k + j) * 32 / GROUP;
                  const float s = static_cast<float>(scales[p][f].at[group]);
                  const float z = static_cast<float>(biases[p][f].at[group]);
                  float sum = part[p][0][i];
                  if (HALVES == 2) sum = fmaf(16.0f, part[p][HALVES - 1][i], sum);
                  const float zero = fmaf(HALVES == 2 ? -17 * BASE : -BASE, s, z);
                  sums[n][p][i] = fmaf(s, sum, fmaf(zero, total[i & 1], sums[n][p][i]));
                  part[p][0][i] = part[p][HALVES - 1][i] = 0.0f;
                }
              total[0] = total[1] = 0.0f;
            }
          }
        }
      }
    }
    wait<0>();
    __syncthreads();
    // The warps' sums take the ring's place.
    float* parts = reinterpret_cast<float*>(shared);
    constexpr int EACH = TILES * PARTS * 128;
    #pragma unroll
    for (int n = 0; n < TILES; ++n)
      #pragma unroll
      for (int p = 0; p < PARTS; ++p)
        #pragma unroll
        for (int j = 0; j < 4; ++j)
          parts[warp * EACH + ((n * PARTS + p) * 4 + j) * 32 + lane] = sums[n][p][j];
    __syncthreads();
    for (int i = warp * 32 + lane; i < TILES * 128; i += WARPS * 32) {
      const int n = i >> 7, rest = i & 127, l = rest & 31, j = rest >> 5;
      float done[PARTS] = {};
      #pragma unroll
      for (int p = 0; p < PARTS; ++p)
        for (int i = 0; i < WARPS; ++i) done[p] += parts[i * EACH + (n * PARTS + p) * 128 + rest];
      if (BITS < 16 && !AFFINE)
        for (int p = 0; p < PARTS; ++p) done[p] *= BITS == 4 ? 0x1p63f : 0x1p60f;  // 2^UP
      const int r = 8 * n + 2 * (l & 3) + (j & 1), f = f0 + 8 * (j >> 1) + (l >> 2);
      if (r < count && f < N)
        y[(size_t)TARGET(r) * N + f] = (T)(PARTS == 1 ? done[0] : swiglu(done));
    }
"""


def applies(weight: Weight, dtype: mx.Dtype) -> bool:
    """Returns whether the kernel supports a weight and type of activations on this backend."""
    # The scales of mxfp exceed float16's range.
    wide = dtype == mx.bfloat16 or (dtype == mx.float16 and weight.scales.dtype == dtype)
    return gpu.backend() == "cuda" and wide and weight.is_of(dtype) and weight.inputs % _CHUNK == 0


def bands(weight: Weight) -> dict[int, range]:
    """Returns the band of token counts that the kernel can serve, by the count to time it with."""
    is_plain = weight.form.bits == 16 and weight.codes.ndim == 2
    return {4: range(1, _MOST_PLAIN_ROWS + 1 if is_plain else sys.maxsize)}


def run_kernel(gemm: SkinnyGemm) -> mx.array:
    """Returns the GEMM's result."""
    x, weight, parts = gemm.x, gemm.weight, gemm.parts
    tiles = 1 if gemm.of_experts or len(x) <= _TILE else _MOST_TILES
    span = 1 if gemm.of_experts and gemm.rows <= _MANY_PAIRS else tiles * _TILE  # rows of a block
    (_, bits, group), scale = weight.form, weight.scales.dtype
    inner, affine = x.shape[1], bits < 16 and scale == x.dtype
    warps = _warps(inner // _CHUNK, bits, parts, gemm.outputs)
    template = {"T": x.dtype, "SCALE": scale, "K": inner, "BITS": bits, "GROUP": group}
    template |= {"AFFINE": affine, "WARPS": warps, **gemm.constants}
    template |= {"TILES": tiles, "STAGES": _STAGES, **({"SPAN": span} if gemm.of_experts else {})}
    # Shared memory of a warp: codes, padding, scales and biases of the chunks that it loads; later
    # its sums.
    sides = 0 if bits == 16 else _CHUNK // group * (4 if affine else 1)
    feature = 16 * (2 * bits + max(1, bits // 4)) + sides
    shared = warps * max(_STAGES * parts * _FEATURES * feature, tiles * parts * 512)
    (y,) = _kernel(gemm.of_experts, x.dtype, shared)(
        gemm.input_arrays,
        template,
        (-(-gemm.outputs // _FEATURES), warps * -(-gemm.rows // span), 1),
        [((gemm.rows, gemm.outputs), x.dtype)],
        warps,
    )
    return y


def _warps(chunks: int, bits: int, parts: int, features: int) -> int:
    """Returns how many warps split K. This sets the order of sums, so it can't depend on the rows.

    It can't depend on a stack's other weights either: only lm_head has `_MANY_FEATURES`.
    """
    most = max(1, min(_MOST_WARPS, _MOST_WARPS * 4 // bits) // parts**2)
    if features >= _MANY_FEATURES:
        return min(chunks, most, _THEIR_WARPS)
    least = max(1, min(chunks, most // 2))
    return min(range(min(chunks, most), least - 1, -1), key=lambda n: -chunks % n)


@functools.cache
def _kernel(of_experts: bool, dtype: mx.Dtype, shared: int) -> gpu.Kernel:
    rows = _PAIRS if of_experts else _ROWS
    return gpu.Kernel(
        "few_rows_of_experts" if of_experts else "few_rows",
        input_names(of_experts),
        ["y"],
        _START + prologue(rows, of_experts) + _BODY + (_NEXT_PAIRS if of_experts else ""),
        {"cuda": mma.header(dtype) + BASES[dtype] + DECODING + _HEADER},
        shared=shared,
    )
