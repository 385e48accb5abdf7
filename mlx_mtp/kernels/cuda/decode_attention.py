"""Attention of windows, split over the KV (flash decoding), for CUDA.

mlx has no fused operation for these shapes on CUDA. A row's KV is split into pieces at fixed
positions. A block computes a piece for up to 32 pairs of a token and a query head of one KV head,
so a window reads its KV once; a second launch adds the pieces of each pair in a fixed order. Rows
in several buffers share a launch. A position's result has the same bits whatever else is in the
batch, however long the window is, and however large the buffers are.
"""

import functools
from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_mtp.kernels import gpu, self_check
from mlx_mtp.kernels.cuda import mma
from mlx_mtp.kernels.cuda.attention_plan import PIECE, TILE, AttentionLaunch, plan_launches

DIMS = (64, 128, 256)
_AHEAD = 2  # loads in flight, of keys and of values
_STRIDE = PIECE + 8  # of a row of scores, padded: lanes then access different banks
_ADDING_WARPS = 8  # of a block that adds pieces

# The bodies' hardware instructions besides those of `mma`; the tests have them in C++.
STREAM = r"""
__device__ __forceinline__ uint4 stream16(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
"""
# Scores are scaled by log2(e), for powers of two.
_COMMON = r"""
    constexpr float LEAST = -1e30f;
    constexpr float ROOT = D == 256 ? 16.0f : D == 128 ? 11.313708499f : 8.0f;
    constexpr float SCALE = 1.44269504f / ROOT;
    const int lane = threadIdx.x, warp = threadIdx.y;
"""
# Scores are computed as K Q^T and outputs as V^T P^T: keys and values are left operands, loaded as
# they lie in memory. This permutes the dimensions in the first product and the positions in the
# second, in both operands alike, so the sums are of the same terms.
_PIECES = r"""
    constexpr int ROWS = 8 * TILES, CHUNKS = D / 32, ACROSS = D / 64;
    const int g = lane >> 2, t = lane & 3;
    const int* item = items + blockIdx.x * 7;
    const int first = item[3], base = item[5] * ROWS, start = item[6] * PIECE;
    const int head = blockIdx.y, count = min(ROWS, item[4] * GROUP - base);
    const int end = positions[first + (base + count - 1) / GROUP] - start + 1;
    if (end <= 0) return;
    const int groups = min((end + 15) / 16, PIECE / 16);  // of 16 positions
    auto kv = kv0;
    size_t lines = kv0_shape[0];
    CHOOSE
    kv += ((size_t)(item[1] * KV + head) * item[2] + start) * D;
    const uint4* keys = reinterpret_cast<const uint4*>(kv) + t;
    const uint4* values = reinterpret_cast<const uint4*>(kv + lines / 2 * D);
    SHARED(shared);
    float* const scores = reinterpret_cast<float*>(shared);

    const uint4* queries[TILES];
    #pragma unroll
    for (int n = 0; n < TILES; ++n) {
      const int pair = base + (8 * n + g < count ? 8 * n + g : 0);
      const size_t row = (size_t)(first + pair / GROUP) * (KV * GROUP) + head * GROUP;
      queries[n] = reinterpret_cast<const uint4*>(q) + (row + pair % GROUP) * (D / 8) + t;
    }
    // A warp has two groups of positions at a time.
    #pragma unroll 1
    for (int at = warp; at < groups; at += 2 * WARPS) {
      const uint4* from[2];
      #pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int group = i && at + WARPS < groups ? at + WARPS : at;
        from[i] = keys + (size_t)(16 * group + g) * (D / 8);
      }
      uint4 ahead[AHEAD][2][2];
      #pragma unroll
      for (int j = 0; j < AHEAD; ++j)
        #pragma unroll
        for (int i = 0; i < 4; ++i)
          ahead[j][i / 2][i % 2] = stream16(from[i / 2] + i % 2 * D + 4 * j);
      float sums[2][TILES][4] = {};
      #pragma unroll 1
      for (int chunk = 0; chunk < CHUNKS; chunk += AHEAD)
        #pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
          uint4 own[2][2];
          #pragma unroll
          for (int i = 0; i < 4; ++i) {
            own[i / 2][i % 2] = ahead[j][i / 2][i % 2];
            if (chunk + AHEAD < CHUNKS)
              ahead[j][i / 2][i % 2] = stream16(from[i / 2] + i % 2 * D + 4 * (chunk + j + AHEAD));
          }
          #pragma unroll
          for (int n = 0; n < TILES; ++n) {
            const uint4 b = __ldg(queries[n] + 4 * (chunk + j));
            #pragma unroll
            for (int i = 0; i < 2; ++i) {
              const unsigned lower[4] = {own[i][0].x, own[i][1].x, own[i][0].y, own[i][1].y};
              const unsigned upper[4] = {own[i][0].z, own[i][1].z, own[i][0].w, own[i][1].w};
              multiply(sums[i][n], lower, b.x, b.y);
              multiply(sums[i][n], upper, b.z, b.w);
            }
          }
        }
      #pragma unroll
      for (int i = 0; i < 2; ++i)
        if (at + i * WARPS < groups)
          #pragma unroll
          for (int n = 0; n < TILES; ++n)
            #pragma unroll
            for (int c = 0; c < 4; ++c) {
              const int row = 8 * n + 2 * t + (c & 1), position = 16 * (at + i * WARPS) + g;
              scores[row * STRIDE + position + 8 * (c >> 1)] = sums[i][n][c];
            }
    }
    // Of the values a warp has 64 dimensions, a lane 8 of them, and every other group of positions;
    // the first are loaded while the scores become weights.
    const int part = warp % ACROSS, share = warp / ACROSS;
    values += 4 * t * (D / 8) + 8 * part + g;
    uint4 next[AHEAD][4];
    #pragma unroll
    for (int j = 0; j < AHEAD; ++j)
      #pragma unroll
      for (int i = 0; i < 4; ++i)
        if (share + 2 * j < groups)
          next[j][i] = stream16(values + (16 * (share + 2 * j) + i) * (D / 8));
    __syncthreads();
    // A warp has a pair at a time; the weights, in T, take the place of the scores.
    for (int row = warp; row < ROWS; row += WARPS) {
      const int own = positions[first + (base + min(row, count - 1)) / GROUP] - start;
      float* const line = scores + row * STRIDE;
      float score[PIECE / 32], most = LEAST, sum = 0.0f;
      #pragma unroll
      for (int i = 0; i < PIECE / 32; ++i) {
        score[i] = lane + 32 * i <= own ? line[lane + 32 * i] : LEAST;
        most = fmaxf(most, score[i]);
      }
      #pragma unroll
      for (int other = 16; other > 0; other /= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, other));
      __syncwarp();
      #pragma unroll
      for (int i = 0; i < PIECE / 32; ++i) {
        const float weight = lane + 32 * i <= own ? exp2f((score[i] - most) * SCALE) : 0.0f;
        sum += weight;
        reinterpret_cast<T*>(line)[lane + 32 * i] = (T)weight;
      }
      #pragma unroll
      for (int other = 16; other > 0; other /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, other);
      if (lane == 0 && row < count) {
        const size_t to = (size_t)(blockIdx.x * KV + head) * ROWS + row;
        stats[2 * to] = most, stats[2 * to + 1] = sum;
      }
    }
    __syncthreads();
    float outs[TILES][4][4] = {};
    #pragma unroll 1
    for (int from = share; from < groups; from += 2 * AHEAD)
      #pragma unroll
      for (int j = 0; j < AHEAD; ++j) {
        const int at = from + 2 * j;
        if (at >= groups) break;
        unsigned own[4][4];
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          own[i][0] = next[j][i].x, own[i][1] = next[j][i].y;
          own[i][2] = next[j][i].z, own[i][3] = next[j][i].w;
          if (at + 2 * AHEAD < groups)
            next[j][i] = stream16(values + (16 * (at + 2 * AHEAD) + i) * (D / 8));
        }
        unsigned left[4][4];
        #pragma unroll
        for (int e = 0; e < 4; ++e)
          #pragma unroll
          for (int i = 0; i < 2; ++i) {
            left[e][2 * i] = __byte_perm(own[2 * i][e], own[2 * i + 1][e], 0x5410);
            left[e][2 * i + 1] = __byte_perm(own[2 * i][e], own[2 * i + 1][e], 0x7632);
          }
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
          const T* line = reinterpret_cast<const T*>(scores + (8 * n + g) * STRIDE);
          const uint2 b = *reinterpret_cast<const uint2*>(line + 16 * at + 4 * t);
          #pragma unroll
          for (int e = 0; e < 4; ++e) multiply(outs[n][e], left[e], b.x, b.y);
        }
      }
    __syncthreads();
    // The two shares are added in the scores' place.
    float* const other = scores + part * (TILES * 512) + lane;
    if (share == 1)
      #pragma unroll
      for (int i = 0; i < 16 * TILES; ++i) other[32 * i] = outs[i / 16][i / 4 % 4][i % 4];
    __syncthreads();
    if (share == 1) return;
    #pragma unroll
    for (int i = 0; i < 16 * TILES; ++i) outs[i / 16][i / 4 % 4][i % 4] += other[32 * i];
    #pragma unroll
    for (int n = 0; n < TILES; ++n)
      #pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 8 * n + 2 * t + c;
        if (row < count) {
          const size_t to = (size_t)(blockIdx.x * KV + head) * ROWS + row;
          float4* const line = reinterpret_cast<float4*>(parts + to * D + 64 * part + 8 * g);
          line[0] = {outs[n][0][c], outs[n][0][c + 2], outs[n][1][c], outs[n][1][c + 2]};
          line[1] = {outs[n][2][c], outs[n][2][c + 2], outs[n][3][c], outs[n][3][c + 2]};
        }
      }
"""
_ADD = r"""
    const int* token = tokens + blockIdx.x * 4;
    const int head = blockIdx.y, pair = token[3] * GROUP + head % GROUP;
    const int pieces = positions[token[0]] / PIECE + 1, ROWS = stats_shape[2];
    const size_t step = (size_t)token[2] * KV * ROWS;
    const size_t at =
        ((size_t)(token[1] + pair / ROWS) * KV + head / GROUP) * ROWS + pair % ROWS;
    SHARED(shared);
    float* const sums = reinterpret_cast<float*>(shared);
    constexpr int EACH = (D + 127) / 128;  // fours of a lane; of 64 dimensions half have one
    float most = LEAST, sum = 0.0f, outs[4 * EACH] = {};
    for (int p = lane; p < pieces; p += 32) most = fmaxf(most, stats[2 * (at + p * step)]);
    #pragma unroll
    for (int other = 16; other > 0; other /= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, other));
    #pragma unroll 4
    for (int p = warp; p < pieces; p += WARPS) {
      const size_t from = at + p * step;
      const float weight = exp2f((stats[2 * from] - most) * SCALE);
      sum = fmaf(weight, stats[2 * from + 1], sum);
      #pragma unroll
      for (int i = 0; i < EACH; ++i) {
        if (D < 128 && lane >= D / 4) break;
        const float4 own = reinterpret_cast<const float4*>(parts)[from * (D / 4) + lane + 32 * i];
        outs[4 * i] = fmaf(weight, own.x, outs[4 * i]);
        outs[4 * i + 1] = fmaf(weight, own.y, outs[4 * i + 1]);
        outs[4 * i + 2] = fmaf(weight, own.z, outs[4 * i + 2]);
        outs[4 * i + 3] = fmaf(weight, own.w, outs[4 * i + 3]);
      }
    }
    #pragma unroll
    for (int i = 0; i < 4 * EACH; ++i)
      if (D >= 128 || lane < D / 4)
        sums[warp * (D + 1) + 4 * (lane + 32 * (i / 4)) + i % 4] = outs[i];
    if (lane == 0) sums[warp * (D + 1) + D] = sum;
    __syncthreads();
    for (int d = warp * 32 + lane; d < D; d += WARPS * 32) {
      float total = 0.0f, out = 0.0f;
      for (int w = 0; w < WARPS; ++w) {
        total += sums[w * (D + 1) + D];
        out += sums[w * (D + 1) + d];
      }
      y[((size_t)blockIdx.x * (KV * GROUP) + head) * D + d] = (T)(out / total);
    }
"""


def attend(
    queries: mx.array,  # [N, heads, D]
    positions: mx.array,  # of the queries, int32 [N]; each attends up to its own
    buffers: Sequence[mx.array],  # keys, then values: [2 * slots * KV heads * capacity, D]
    kv_heads: int,
    rows: tuple[tuple[int, ...], ...],  # see `attention_plan.plan_launches`
) -> mx.array:
    """Returns the attention of all windows of a pass, [N, heads, D]."""
    plan = plan_launches(rows, queries.shape[1] // kv_heads)
    return attend_launches(queries, positions, buffers, kv_heads, *plan)


def attend_launches(
    queries: mx.array,
    positions: mx.array,
    buffers: Sequence[mx.array],
    kv_heads: int,
    launches: Sequence[AttentionLaunch],  # see `attention_plan.plan_launches`
    order: mx.array | None,
) -> mx.array:
    """`attend`, with launches that have been planned."""
    heads, outputs = queries.shape[1], []
    for each in launches:
        own = [buffers[number] for number in each.buffers]
        counts = len(each.buffers), each.tiles, len(each.items), len(each.tokens)
        run = _launcher(*counts, heads, kv_heads, queries.shape[2], queries.dtype)
        outputs += run(queries, positions, each.items, each.tokens, *own)
    joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    return joined if order is None else joined[order]


def _applies(heads: tuple[int, int, int], dtype: mx.Dtype) -> bool:
    return heads[2] in DIMS and dtype in (mx.bfloat16, mx.float16)


@functools.lru_cache(maxsize=1024)
def _launcher(
    buffers: int,
    tiles: int,
    items: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: mx.Dtype,
) -> Callable[..., list[mx.array]]:
    """Returns one call for the launches that compute the pieces and add them."""
    rows, warps = tiles * TILE, dim // 32
    sizes = {"T": dtype, "D": dim, "KV": kv_heads, "GROUP": heads // kv_heads, "PIECE": PIECE}
    constants = {"TILES": tiles, "WARPS": warps, "STRIDE": _STRIDE, "AHEAD": _AHEAD}
    shapes = (items, kv_heads, rows, dim), (items, kv_heads, rows, 2)
    pieces = gpu.launcher(
        _kernel(buffers, dtype, dim, 4 * rows * max(_STRIDE, dim)).build(),
        tuple((sizes | constants).items()),
        (items, warps * kv_heads, 1),
        warps,
        tuple((shape, mx.float32) for shape in shapes),
    )
    add = gpu.launcher(
        _kernel(0, dtype, dim, 4 * _ADDING_WARPS * (dim + 1)).build(),
        tuple((sizes | {"WARPS": _ADDING_WARPS}).items()),
        (tokens, _ADDING_WARPS * heads, 1),
        _ADDING_WARPS,
        (((tokens, heads, dim), dtype),),
    )

    def run(
        q: mx.array, positions: mx.array, items: mx.array, tokens: mx.array, *kv: mx.array
    ) -> list[mx.array]:
        return add(*pieces(q, positions, items, *kv), positions, tokens)

    return mx.compile(run)


@functools.cache
def _kernel(buffers: int, dtype: mx.Dtype, dim: int, shared: int) -> gpu.Kernel:
    """Returns the kernel for pieces of `buffers` KV buffers; for 0, the one that adds pieces."""
    if buffers:
        inputs = ["q", "positions", "items", *(f"kv{number}" for number in range(buffers))]
        choices = (
            f"if (item[0] == {number}) kv = kv{number}, lines = kv{number}_shape[0];\n"
            for number in range(1, buffers)
        )
        outputs, body = ["parts", "stats"], _PIECES.replace("CHOOSE", "".join(choices))
        bounds = mma.bounds(dim, 512 // dim)  # With more registers only one block would fit an SM.
    else:
        inputs = ["parts", "stats", "positions", "tokens"]
        outputs, body, bounds = ["y"], _ADD, ""
    names, header = (f"attention_{buffers}", inputs, outputs), mma.header(dtype) + STREAM + bounds
    return gpu.Kernel(*names, _COMMON + body, {"cuda": header}, shared=shared)


WINDOW_ATTENTION = gpu.Operation(
    "attention kernel / float32",
    "attention",
    lambda heads, dtype: self_check.window_attention(attend, heads, dtype, gpu.LONGEST_WINDOW),
    _applies,
    for_metal=False,
)
