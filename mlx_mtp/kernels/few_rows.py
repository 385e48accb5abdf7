"""Quantized products of few rows, where a row's result does not depend on the rows beside it.

For CUDA: the weights are the left operand of the tensor core's m16n8k16, and read once for up to 16
rows, which are the right one. A block computes 16 features; its warps share the columns, and their
sums are added in a fixed order. mlx's own products read the weights once a row up to 7 rows.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_mtp.kernels.gpu import backend, kernel_name, launcher

_BITS, _GROUP_SIZE = (4, 8), 64
_CHUNK = 256  # columns that a warp loads at once
_FEATURES = 16  # of a block, and rows of the left operand
_TILE = 8  # rows of x beside each other in a product
_MOST_TILES = 2
_MOST_WARPS = 16
_STAGES = 2  # chunks in flight

# What the body needs of the hardware; the tests have it in C++.
CUDA = r"""
#define SHARED(name) extern __shared__ __align__(16) unsigned char name[]
// c (16 x 8, float32) += a (16 x 16) times b (16 x 8), both bfloat16.
__device__ __forceinline__ void multiply(float* c, const unsigned* a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
               :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from));
}
__device__ __forceinline__ void copy8(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;"
               :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int left>
__device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(left)); }
"""
_HEADER = r"""
__device__ __forceinline__ float low(unsigned v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(unsigned v) { return __uint_as_float(v & 0xffff0000u); }
// Two codes q of 4 bits, as two bfloat16 of 128 + q: exact, with one operation.
__device__ __forceinline__ unsigned codes(unsigned w) { return (w & 0x000f000fu) | 0x43004300u; }
__device__ __forceinline__ float swiglu(const float* gate_up) {
  return gate_up[0] / (1.0f + __expf(-gate_up[0])) * gate_up[1];
}
"""
# The rows of x that this block reads, and where it writes them: of plain products ...
_ROWS = r"""
    const int first = blockIdx.y * (8 * TILES), count = min(8 * TILES, x_shape[0] - first);
    const size_t base = 0;
    #define SOURCE(r) (first + (r))
    #define TARGET(r) (first + (r))
"""
# ... and of experts: pairs of token and expert are sorted by expert, and the block that is at the
# first of up to 8 pairs of an expert computes them all. PAIRS of them have one row of x.
_PAIRS = r"""
    const int first = blockIdx.y, expert = experts[first];
    int before = 0;
    while (before < first && experts[first - before - 1] == expert) ++before;
    if (before % 8) return;
    int count = 1;
    const int most = min(8, experts_shape[0] - first);
    while (count < most && experts[first + count] == expert) ++count;
    size_t base = (size_t)expert * N;
    #define SOURCE(r) (order[first + (r)] / PAIRS)
    #define TARGET(r) order[first + (r)]
"""
# The expert behind the last one, which all tokens share, has weights of its own.
_SHARED = """
    if (expert == w0_shape[0]) {
      base = 0;
      w_at = wI, s_at = sI, b_at = bI;
      w_up = wL, s_up = sL, b_up = bL;
    }
"""
# A lane has features g and g + 8 of the block and columns 16 t ... of a group. A code of 8 bits is
# two of 4. x and the weights are both taken in the order in which masks find the codes, 0 4 1 5 2 6
# 3 7 of a word of 4 bits and 0 2 1 3 of one of 8, which a sum does not see.
_BODY = r"""
    constexpr int HALVES = BITS / 4, WORDS = BITS / 2, UNITS = 2 * BITS;
    constexpr int SIDE = 256 * BITS / 8 * 16, BYTES = (SIDE + 256) * PARTS, CHUNKS = K / 256;
    SHARED(shared);
    unsigned char* const ring = shared + warp * (STAGES * BYTES);
    // Behind the last feature that one is computed again, and not written.
    auto feature = [=](int r) { return base + min(f0 + r, N - 1); };
    // Sixteen bytes are put elsewhere in each row: lanes then read different banks.
    auto unit = [](int row, int u) {
      return (row * UNITS + (u ^ (BITS == 4 ? (row & 3) << 1 : (row & 1) << 2))) * 16;
    };
    const uint4* rows[TILES];
    #pragma unroll
    for (int n = 0; n < TILES; ++n) {
      const int r = 8 * n + g;
      const size_t row = SOURCE(r < count ? r : 0);
      rows[n] = reinterpret_cast<const uint4*>(x) + row * (K / 8) + 2 * t;
    }
    auto load = [&](int chunk, int slot) {
      if (chunk < CHUNKS) {
        #pragma unroll
        for (int p = 0; p < PARTS; ++p) {
          const char* w = reinterpret_cast<const char*>(p ? w_up : w_at);
          const char* side = reinterpret_cast<const char*>(
              lane < 16 ? (p ? s_up : s_at) : (p ? b_up : b_at));
          unsigned char* to = ring + slot * BYTES + p * (SIDE + 256);
          #pragma unroll
          for (int i = 0; i < UNITS / 2; ++i) {
            const int r = (i * 32 + lane) / UNITS, u = lane % UNITS;
            copy16(to + unit(r, u), w + (feature(r) * (K / 256) + chunk) * (UNITS * 16) + u * 16);
          }
          copy8(to + SIDE + lane * 8, side + (feature(lane & 15) * (K / 64) + chunk * 4) * 2);
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
      next[n][1] = __ldg(rows[n] + warp * 32 + 1);
    }
    int slot = 0;
    #pragma unroll 1
    for (int chunk = warp; chunk < CHUNKS; chunk += WARPS) {
      wait<STAGES - 2>();
      __syncwarp();
      load(chunk + (STAGES - 1) * WARPS, slot == 0 ? STAGES - 1 : slot - 1);
      const unsigned char* here = ring + slot * BYTES;
      slot = slot == STAGES - 1 ? 0 : slot + 1;
      uint2 scales[PARTS][2], biases[PARTS][2];  // of the four groups, for both features
      #pragma unroll
      for (int p = 0; p < PARTS; ++p)
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned char* at = here + p * (SIDE + 256) + SIDE + (8 * i + g) * 8;
          scales[p][i] = *reinterpret_cast<const uint2*>(at);
          biases[p][i] = *reinterpret_cast<const uint2*>(at + 128);
        }
      #pragma unroll
      for (int k = 0; k < 4; ++k) {  // groups of 64
        unsigned words[PARTS][2][WORDS];
        #pragma unroll
        for (int p = 0; p < PARTS; ++p)
          #pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int u = BITS == 4 ? 2 * k + (t >> 1) : 4 * k + t;
            const unsigned char* at = here + p * (SIDE + 256) + unit(8 * i + g, u);
            if constexpr (BITS == 4) {
              const uint2 found = *reinterpret_cast<const uint2*>(at + ((t & 1) << 3));
              words[p][i][0] = found.x, words[p][i][1] = found.y;
            } else {
              const uint4 found = *reinterpret_cast<const uint4*>(at);
              words[p][i][0] = found.x, words[p][i][1] = found.y;
              words[p][i][2] = found.z, words[p][i][3] = found.w;
            }
          }
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
          unsigned b[8];
          #pragma unroll
          for (int e = 0; e < 2; ++e) {
            const uint4 q = next[n][e];
            const unsigned upper = BITS == 4 ? q.z : q.y, lower = BITS == 4 ? q.y : q.z;
            b[4 * e] = __byte_perm(q.x, upper, 0x5410);
            b[4 * e + 1] = __byte_perm(q.x, upper, 0x7632);
            b[4 * e + 2] = __byte_perm(lower, q.w, 0x5410);
            b[4 * e + 3] = __byte_perm(lower, q.w, 0x7632);
          }
          const int after = k < 3 ? chunk * 32 + (k + 1) * 8 : min(chunk + WARPS, CHUNKS - 1) * 32;
          next[n][0] = __ldg(rows[n] + after);
          next[n][1] = __ldg(rows[n] + after + 1);
          const unsigned ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
          float total[4] = {}, part[PARTS][HALVES][4] = {};
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            multiply(total, ones, b[2 * e], b[2 * e + 1]);
            #pragma unroll
            for (int p = 0; p < PARTS; ++p)
              #pragma unroll
              for (int h = 0; h < HALVES; ++h) {
                const int at = BITS == 4 ? e / 2 : e, by = BITS == 4 ? e % 2 * 8 : 4 * h;
                const unsigned u = words[p][0][at] >> by, d = words[p][1][at] >> by;
                const unsigned a[4] = {codes(u), codes(d), codes(u >> BITS), codes(d >> BITS)};
                multiply(part[p][h], a, b[2 * e], b[2 * e + 1]);
              }
          }
          // scale * (sum of q x) + bias * (sum of x), and 128 was added to each 4 bits.
          #pragma unroll
          for (int p = 0; p < PARTS; ++p)
            #pragma unroll
            for (int i = 0; i < 2; ++i) {
              const unsigned both = k < 2 ? scales[p][i].x : scales[p][i].y;
              const unsigned zero = k < 2 ? biases[p][i].x : biases[p][i].y;
              const float s = k & 1 ? high(both) : low(both);
              const float added = BITS == 4 ? -128.0f : -128.0f * 17;
              const float z = fmaf(added, s, k & 1 ? high(zero) : low(zero));
              #pragma unroll
              for (int j = 2 * i; j < 2 * i + 2; ++j) {
                float sum = part[p][0][j];
                if constexpr (BITS == 8) sum = fmaf(16.0f, part[p][1][j], sum);
                sums[n][p][j] = fmaf(s, sum, fmaf(z, total[j - 2 * i], sums[n][p][j]));
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
        for (int s = 0; s < WARPS; ++s) done[p] += parts[s * EACH + (n * PARTS + p) * 128 + rest];
      const int r = 8 * n + 2 * (l & 3) + (j & 1), f = f0 + 8 * (j >> 1) + (l >> 2);
      if (r < count && f < N)
        y_at[(size_t)TARGET(r) * N + f] = (T)(PARTS == 1 ? done[0] : swiglu(done));
    }
"""
_START = r"""
    const int lane = threadIdx.x, warp = threadIdx.y, g = lane >> 2, t = lane & 3;
    int f0 = blockIdx.x * 16, N = w0_shape[AXIS];
    auto w_at = w0, w_up = w0;
    auto s_at = s0, s_up = s0, b_at = b0, b_up = b0;
    auto y_at = y0;
"""
_GATE_AND_UP = "    w_up = w1, s_up = s1, b_up = b1;\n"
# The block belongs to one of several weights with the same input.
_NEXT = """
    if (f0 >= (N + 15) / 16 * 16) {
      f0 -= (N + 15) / 16 * 16, N = wI_shape[0], w_at = wI, s_at = sI, b_at = bI, y_at = yI;
    }
"""

Quantized = tuple[mx.array, mx.array, mx.array]  # codes, scales and biases


def fits(inputs: int, bits: int, group_size: int, dtype: mx.Dtype) -> bool:
    """Whether the kernel is made for such weights, affine, and this backend."""
    return (
        backend() == "cuda"
        and bits in _BITS
        and (group_size, dtype) == (_GROUP_SIZE, mx.bfloat16)
        and inputs % _CHUNK == 0
    )


def products(x: mx.array, weights: Sequence[Quantized]) -> list[mx.array]:
    """x [M, K] times the transpose of each of some weights [N, K] of the same bits: [M, N] each."""
    return _launch(x, weights, 1, ())


def gate_and_up(x: mx.array, gate: Quantized, up: Quantized) -> mx.array:
    """silu(x times the transpose of gate [N, K]) times that of up: [M, N]."""
    (y,) = _launch(x, [gate, up], 2, ())
    return y


def experts(
    x: mx.array,  # [S, K]
    weights: Sequence[Quantized],  # of all experts, [E, N, K]; of two, as in `gate_and_up`
    shared: Sequence[Quantized],  # of expert E, the same without an axis of experts; or none
    chosen: mx.array,  # int32 [P], the experts of all pairs, ascending
    order: mx.array,  # int32 [P], which pair each of these is
) -> mx.array:
    """Each pair's product with its expert, [P, N]; P / S pairs in a row have one row of x."""
    (y,) = _launch(x, [*weights, *shared], len(weights), (chosen, order))
    return y


def _launch(
    x: mx.array,
    weights: Sequence[Quantized],
    parts: int,  # 2: the weights are gate and up, else each has a result of its own
    pairs: Sequence[mx.array],
) -> list[mx.array]:
    tiles = 1 if pairs or len(x) <= _TILE else _MOST_TILES
    across = pairs[0].size if pairs else -(-len(x) // (tiles * _TILE))
    codes, inner = weights[0][0], x.shape[1]
    bits = codes.shape[-1] * 32 // inner
    chunks = inner // _CHUNK
    # The sums' order follows from it, so that it must not depend on the rows.
    most = max(1, _MOST_WARPS * 4 // bits // parts**2)
    least = max(1, min(chunks, most // 2))
    warps = min(range(min(chunks, most), least - 1, -1), key=lambda n: -chunks % n)
    ring = _STAGES * parts * _FEATURES * (_CHUNK * bits // 8 + 2 * 2 * _CHUNK // _GROUP_SIZE)
    template = {"T": x.dtype, "K": inner, "BITS": bits, "WARPS": warps}
    template |= {"TILES": tiles, "PARTS": parts, "STAGES": _STAGES}
    template["PAIRS"] = across // len(x) if pairs else 1
    rows = pairs[0].size if pairs else len(x)
    outputs = [each.shape[-2] for each, _, _ in (weights[:1] if pairs else weights[::parts])]
    blocks = sum(-(-features // _FEATURES) for features in outputs)
    launch = launcher(
        _kernel(len(weights), parts, bool(pairs), warps * max(ring, tiles * parts * 512)),
        tuple(template.items()),
        (32 * blocks, warps * across, 1),
        (32, warps, 1),
        tuple(((rows, features), x.dtype) for features in outputs),
    )
    return launch(x, *itertools.chain(*weights), *pairs)


@functools.cache
def _kernel(count: int, parts: int, of_experts: bool, shared: int) -> Any:
    source = _START.replace("AXIS", "01"[of_experts]) + (_GATE_AND_UP if parts == 2 else "")
    if of_experts:
        source += _PAIRS
        if count > parts:
            source += _SHARED.replace("I", str(parts)).replace("L", str(count - 1))
    else:
        numbers = range(1, count if parts == 1 else 1)
        source += "".join(_NEXT.replace("I", str(number)) for number in numbers) + _ROWS
    header, source = CUDA + _HEADER, source + _BODY
    return mx.fast.cuda_kernel(
        name=kernel_name(f"few_rows_{count}_{parts}_{int(of_experts)}", header, source),
        input_names=[
            "x",
            *(f"{name}{number}" for number in range(count) for name in "wsb"),
            *(["experts", "order"] if of_experts else []),
        ],
        output_names=[f"y{number}" for number in range(1 if of_experts else count // parts)],
        header=header,
        source=source,
        shared_memory=shared,
    )
