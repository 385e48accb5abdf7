"""Grouped GEMM of a prompt's tokens with their experts, which expands weights in registers.

The (token, expert) pairs, sorted by expert, are cut into blocks of one expert and up to 64 pairs,
so the work is proportional to the pairs, however unevenly they are routed.
"""

import functools
import itertools
from collections.abc import Sequence

import mlx.core as mx

from mlx_mtp.kernels import gpu
from mlx_mtp.kernels.cuda import mma
from mlx_mtp.kernels.formats import Format, Weight

_TILES = 8  # tiles of eight pairs in a block
_WARPS, _BANDS = 4, 2  # warps of a block, and bands of 16 features of a warp
_STAGES = 2  # loads in flight, of 128 columns each
_SORTING = 16  # warps that sort the pairs of an expert

# A threadgroup sorts the pairs of one expert; each warp reads a run of all pairs. It counts the
# pairs of earlier experts and its own, then writes the indices of its own, lane after lane, and its
# blocks: expert, first pair and count. They begin at (earlier pairs) / ROWS + (earlier experts),
# the most blocks that the earlier experts can need. Blocks left over have no pairs.
_ORDER_BODY = """
    constexpr int ROWS = 8 * TILES;
    constexpr int AT_ONCE = 8;
    const int e = grid_y / WARPS;
    const int pairs = experts_shape[0];
    const int run = (pairs + WARPS - 1) / WARPS;
    const int end = (warp + 1) * run < pairs ? (warp + 1) * run : pairs;
    THREADGROUP(int, befores, WARPS);
    THREADGROUP(int, counts, WARPS);
    int before = 0;
    int own = 0;
    #pragma unroll 8
    for (int i = warp * run + lane; i < end; i += 32) {
      before += experts[i] < e;
      own += experts[i] == e;
    }
    int at = 0;
    for (int other = 1; other < 32; other *= 2) {
      const int theirs = SHUFFLE_XOR(own, other);
      at += lane & other ? theirs : 0;
      own += theirs;
      before += SHUFFLE_XOR(before, other);
    }
    if (lane == 0) {
      befores[warp] = before;
      counts[warp] = own;
    }
    BARRIER;
    int first = 0;
    int count = 0;
    for (int i = 0; i < WARPS; ++i) {
      first += befores[i];
      at += befores[i] + (i < warp ? counts[i] : 0);
      count += counts[i];
    }
    for (int i = warp * run + lane; i < end; i += 32 * AT_ONCE) {
      int found[AT_ONCE];  // A load may not pass a store.
      #pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        found[j] = i + 32 * j < end ? experts[i + 32 * j] : -1;
      }
      #pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        if (found[j] == e) {
          order[at] = i + 32 * j;
          at += 1;
        }
      }
    }
    const int place = first / ROWS + e;
    const int next = (first + count) / ROWS + e + 1;
    for (int block = place + 32 * warp + lane; block < next; block += 32 * WARPS) {
      const int done = (block - place) * ROWS;
      const int left = count - done < ROWS ? count - done : ROWS;
      blocks[3 * block] = e;
      blocks[3 * block + 1] = first + done;
      blocks[3 * block + 2] = left > 0 ? left : 0;
    }
"""

# A lane reorders eight columns. On an H200 mlx's copy would take 84 us, where 4 are enough.
_ARRANGE_BODY = """
    const int at = grid_y * (K / 8) + 32 * grid_x + lane;
    if (grid_y >= x_shape[0]) {
      return;
    }
    const uint4 q = reinterpret_cast<const uint4*>(x)[at];
    reinterpret_cast<uint4*>(y)[at] =
        uint4{__byte_perm(q.x, q.z, 0x5410), __byte_perm(q.x, q.z, 0x7632),
              __byte_perm(q.y, q.w, 0x5410), __byte_perm(q.y, q.w, 0x7632)};
"""

# A lane has features g and g + 8 of a band, and columns 16 t ... of a group of 64, in the order in
# which masks select the codes of a word: 0 4 1 5 2 6 3 7. x is stored in that order.
_BODY = r"""
    constexpr int ROWS = 8 * TILES, THREADS = 32 * WARPS, FEATURES = 16 * BANDS * WARPS;
    constexpr int UNITS = 4, STAGE = ROWS * 256 + FEATURES * (16 * UNITS + 8);
    constexpr int OWN = 16 * BANDS / PARTS;  // features of a warp's results
    const int lane = threadIdx.x, warp = threadIdx.y, g = lane >> 2, t = lane & 3;
    const int me = 32 * warp + lane, N = w0_shape[1], f0 = blockIdx.x * (OWN * WARPS);
    const int first = blocks[3 * blockIdx.y + 1], count = blocks[3 * blockIdx.y + 2];
    if (count == 0) return;
    const size_t base = (size_t)blocks[3 * blockIdx.y] * N;
    SHARED(shared);
    // Sixteen bytes are put elsewhere in each row: lanes then read different banks.
    auto x_unit = [](int row, int u) { return (row * 16 + (u ^ (row & 1))) * 16; };
    auto w_unit = [](int row, int u) { return (row * UNITS + (u ^ (row & 2))) * 16; };
    auto feature = [=](int row) { return base + f0 + row / (16 * BANDS) * OWN + row % OWN; };
    int source[ROWS * 16 / THREADS];
    #pragma unroll
    for (int i = 0; i < ROWS * 16 / THREADS; ++i) {
      const int r = (i * THREADS + me) / 16;
      source[i] = r < count ? order[first + r] / PAIRS : -1;
    }
    auto load = [&](int chunk) {
      if (chunk < K / 128) {
        unsigned char* const to = shared + chunk % STAGES * STAGE;
        #pragma unroll
        for (int i = 0; i < ROWS * 16 / THREADS; ++i) {
          const int r = (i * THREADS + me) / 16, u = me % 16;
          if (source[i] >= 0)
            copy16(to + x_unit(r, u), x + (size_t)source[i] * K + chunk * 128 + u * 8);
        }
        unsigned char* const weights = to + ROWS * 256;
        #pragma unroll
        for (int i = 0; i < FEATURES * UNITS / THREADS; ++i) {
          const int r = (i * THREADS + me) / UNITS, u = me % UNITS;
          const bool up = PARTS == 2 && r / OWN % 2;
          copy16(weights + w_unit(r, u),
                 reinterpret_cast<const char*>(up ? w_up : w0)
                     + (feature(r) * (K / 128) + chunk) * (16 * UNITS) + u * 16);
        }
        #pragma unroll
        for (int i = 0; i < FEATURES / THREADS; ++i) {
          const int r = i * THREADS + me;
          const bool up = PARTS == 2 && r / OWN % 2;
          const size_t at = feature(r) * (K / 64) + chunk * 2;
          unsigned char* const side = weights + FEATURES * 16 * UNITS + r * 8;
          copy<4>(side, (up ? s_up : s0) + at);
          copy<4>(side + 4, (up ? b_up : b0) + at);
        }
      }
      commit();
    };
    float sums[BANDS][TILES][4] = {};
    #pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) load(i);
    #pragma unroll 1
    for (int chunk = 0; chunk < K / 128; ++chunk) {
      wait<STAGES - 2>();
      __syncthreads();
      load(chunk + STAGES - 1);
      const unsigned char* const here = shared + chunk % STAGES * STAGE;
      const unsigned char* const weights = here + ROWS * 256;
      #pragma unroll 1
      for (int half = 0; half < 4; ++half) {  // of the two groups of 64
        const int k = half / 2, h = half % 2;
        unsigned a[BANDS][2][4];
        #pragma unroll
        for (int m = 0; m < BANDS; ++m)
          #pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int r = (warp * BANDS + m) * 16 + 8 * i + g;
            const unsigned word = *reinterpret_cast<const unsigned*>(
                weights + w_unit(r, 2 * k + t / 2) + t % 2 * 8 + 4 * h);
            const uint2 side = *reinterpret_cast<const uint2*>(
                weights + FEATURES * 16 * UNITS + r * 8);
            const unsigned scale = __byte_perm(side.x, 0, k ? 0x3232 : 0x1010);
            const unsigned bias = __byte_perm(side.y, 0, k ? 0x3232 : 0x1010);
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
              a[m][e][i] = expanded(codes(word >> 8 * e), scale, bias);
              a[m][e][2 + i] = expanded(codes(word >> (8 * e + 4)), scale, bias);
            }
          }
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
          if (8 * n >= count) break;
          const uint4 b = *reinterpret_cast<const uint4*>(
              here + x_unit(8 * n + g, 8 * k + 2 * t + h));
          #pragma unroll
          for (int m = 0; m < BANDS; ++m) {
            multiply(sums[m][n], a[m][0], b.x, b.y);
            multiply(sums[m][n], a[m][1], b.z, b.w);
          }
        }
      }
    }
    wait<0>();
    #pragma unroll
    for (int n = 0; n < TILES; ++n)
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = 8 * n + 2 * t + j % 2;
        if (r >= count) continue;
        const size_t row = (size_t)order[first + r] * N;
        #pragma unroll
        for (int m = 0; m < BANDS / PARTS; ++m) {
          const int f = f0 + warp * OWN + 16 * m + g + j / 2 * 8;
          const float both[2] = {sums[m][n][j], sums[m + BANDS - BANDS / PARTS][n][j]};
          // What gate and up give is x of the next product.
          const int at = PARTS == 1 ? f : f / 8 * 8 + f % 4 * 2 + f / 4 % 2;
          y[row + at] = (T)(PARTS == 1 ? both[0] : both[0] / (1.0f + __expf(-both[0])) * both[1]);
        }
      }
"""
_START = "    const auto w_up = w{0}; const auto s_up = s{0}; const auto b_up = b{0};\n"
_EXPANDED = r"""
// Two codes q of 4 bits, as two bfloat16 of 128 + q: exact, with one operation.
__device__ __forceinline__ unsigned codes(unsigned w) { return (w & 0x000f000fu) | 0x43004300u; }
// Codes, from those, times a scale plus a bias.
__device__ __forceinline__ unsigned expanded(unsigned codes, unsigned scale, unsigned bias) {
  return multiply_add(multiply_add(codes, 0x3f803f80u, 0xc300c300u), scale, bias);
}
"""


def applies(weight: Weight) -> bool:
    """Returns whether the kernel supports a weight, if `skinny_gemm` does (256 divides N and K)."""
    return weight.form == Format("affine", 4, 64) and weight.is_of(mx.bfloat16)


def swiglu(
    x: mx.array,  # [S, H]
    weights: Sequence[Weight],  # of all experts: gate and up [E, N, H], down [E, H, N]
    experts: mx.array,  # int32 [P], of all pairs
) -> mx.array:
    """Returns each pair's result, [P, H]; P / S consecutive pairs share a row of x."""
    order, blocks = _sort(experts, len(weights[0].codes))
    grid = (x.shape[1] // (8 * gpu.LANES), len(x), 1)
    (x,) = _ARRANGE([mx.contiguous(x)], {"K": x.shape[1]}, grid, [(x.shape, x.dtype)])
    return _product(_product(x, weights[:2], blocks, order), weights[2:], blocks, order)


def _sort(chosen: mx.array, experts: int) -> list[mx.array]:
    """Returns int32 [P], pairs by expert, and [B, 3], each block's expert, first pair and count."""
    chosen = mx.contiguous(chosen)  # One expert per token leaves a stride; the body ignores it.
    blocks = chosen.size // (8 * _TILES) + experts
    constants = {"TILES": _TILES, "WARPS": _SORTING}
    outputs: list[gpu.Output] = [((chosen.size,), mx.int32), ((blocks, 3), mx.int32)]
    return _ORDER([chosen], constants, (1, _SORTING * experts, 1), outputs, _SORTING)


def _product(x: mx.array, weights: Sequence[Weight], blocks: mx.array, order: mx.array) -> mx.array:
    parts, (outputs, inner) = len(weights), (weights[0].codes.shape[1], x.shape[1])
    features = 16 * _BANDS * _WARPS
    template = {"T": x.dtype, "K": inner, "PARTS": parts, "PAIRS": order.size // len(x)}
    template |= {"TILES": _TILES, "BANDS": _BANDS, "WARPS": _WARPS, "STAGES": _STAGES}
    return _kernel(parts, _STAGES * (8 * _TILES * 256 + features * 72))(
        [x, *itertools.chain(*(each[:3] for each in weights)), blocks, order],
        template,
        (outputs * parts // features, _WARPS * len(blocks), 1),
        [((order.size, outputs), x.dtype)],
        _WARPS,
    )[0]


@functools.cache
def _kernel(parts: int, shared: int) -> gpu.Kernel:
    weights = (f"{name}{number}" for number in range(parts) for name in "wsb")
    names = f"grouped_{parts}", ["x", *weights, "blocks", "order"], ["y"]
    header, body = mma.header(mx.bfloat16) + _EXPANDED, _START.format(parts - 1) + _BODY
    return gpu.Kernel(*names, body, {"cuda": header}, shared=shared)


_ARRANGE = gpu.Kernel("grouped_arrange", ["x"], ["y"], _ARRANGE_BODY)
_ORDER = gpu.Kernel("grouped_order", ["experts"], ["order", "blocks"], _ORDER_BODY)
