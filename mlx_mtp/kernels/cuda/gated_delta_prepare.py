"""The first launch of `gated_delta_chunks.py`: for all chunks, what doesn't need the state."""

import functools

import mlx.core as mx

from mlx_mtp.kernels import gpu
from mlx_mtp.kernels.cuda import mma
from mlx_mtp.kernels.gdn_types import GDNWindow
from mlx_mtp.kernels.view import Operand, arrays_and_constants

CHUNK = 64
WARPS = 4  # each with 16 positions of a chunk

# The beginning of both launches' bodies.
COMMON = """
    constexpr int C = 64, KROW = DK + 8;  // rows are padded: lanes then read different banks
    struct alignas(4) Two { T first, second; };
    const int lane = threadIdx.x, warp = threadIdx.y, g = lane >> 2, t = lane & 3;
    const int me = 32 * warp + lane, hv = blockIdx.y, b = blockIdx.z, hk = hv / (HV / HK);
    // Where a lane reads a row of four matrices: one below the other first, or side by side first.
    const int down_row = lane & 15, down_column = (lane >> 4) * 8;
    const int side_row = (lane & 7) + (lane >> 4) * 8, side_column = (lane >> 3 & 1) * 8;
    const int length = k_shape[1], kept = lengths[b], chunks = (length + C - 1) / C;
    // A chunk's keys or queries; behind what is kept its last position, which gets no weight.
    auto load_rows = [&](T* to, const T* from, size_t by, int chunk) {
      for (int i = me; i < C * (DK / 8); i += 32 * WARPS) {
        const int row = i / (DK / 8), unit = i % (DK / 8) * 8;
        const int at = min(chunk * C + row, kept - 1);
        copy16(to + row * KROW + unit, from + ((size_t)b * length + at) * by + unit);
      }
    };
    const T* const all_keys = k + K_AT + hk * K_BY1;
    const T* const all_queries = q + Q_AT + hk * Q_BY1;
    SHARED(shared);
"""
# One lane computes a column of the inverse, by forward substitution.
_BODY = """
    constexpr int ROW = C + 4;
    const int chunk = blockIdx.x;
    if (chunk * C >= kept) return;
    T* const keys = reinterpret_cast<T*>(shared);
    T* const queries = keys + C * KROW;
    float* const a = reinterpret_cast<float*>(queries + C * KROW);
    float* const decays = a + C * ROW;
    float* const sums = decays + C;
    float* const strength = sums + C;
    load_rows(keys, all_keys, K_BY0, chunk);
    load_rows(queries, all_queries, Q_BY0, chunk);
    commit();
    if (me < C) {
      const int at = chunk * C + me;
      const bool counts = at < kept;
      const size_t own = (size_t)b * length + (counts ? at : 0);
      decays[me] = counts ? log(fmaxf(decay[DECAY_AT + own * DECAY_BY0 + hv], 1e-37f)) : 0.0f;
      strength[me] = counts ? (float)beta[BETA_AT + own * BETA_BY0 + hv] : 0.0f;
    }
    wait<0>();
    __syncthreads();
    const size_t out = ((size_t)b * HV + hv) * chunks + chunk;
    if (me < C) {
      float sum = 0.0f;
      for (int i = 0; i <= me; ++i) sum += decays[i];
      sums[me] = sum;
      logs[out * C + me] = sum;
    }
    float alike[8][4] = {}, asked[8][4] = {};
    #pragma unroll
    for (int d = 0; d < DK; d += 16) {
      unsigned key[4], query[4];
      load_matrices(key, keys + (16 * warp + down_row) * KROW + d + down_column);
      load_matrices(query, queries + (16 * warp + down_row) * KROW + d + down_column);
      #pragma unroll
      for (int j = 0; j < 8; j += 2) {
        if (j > 2 * warp) break;
        unsigned other[4];
        load_matrices(other, keys + (8 * j + side_row) * KROW + d + side_column);
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
          multiply(alike[j + i], key, other[2 * i], other[2 * i + 1]);
          multiply(asked[j + i], query, other[2 * i], other[2 * i + 1]);
        }
      }
    }
    __syncthreads();
    T* const solved = mixing + out * (3 * C * C);
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j > 2 * warp + 1) break;
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * warp + g + 8 * half;
        float weight[2];
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = 8 * j + 2 * t + i;
          const float left = column <= row ? exp(sums[row] - sums[column]) : 0.0f;
          weight[i] = left * asked[j][2 * half + i] * SCALE;
          a[row * ROW + column] =
              column < row ? strength[row] * left * alike[j][2 * half + i] : 0.0f;
        }
        *reinterpret_cast<Two*>(solved + 2 * C * C + row * C + 8 * j + 2 * t) =
            Two{(T)weight[0], (T)weight[1]};
      }
    }
    __syncthreads();
    if (me < C) {
      float column[C] = {};
      #pragma unroll
      for (int i = 0; i < C; ++i) {
        float part[4] = {i == me ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
        #pragma unroll
        for (int j = 0; j < i; j += 4) {
          const float4 four = *reinterpret_cast<const float4*>(a + i * ROW + j);
          part[0] = fma(-four.x, column[j], part[0]);
          part[1] = fma(-four.y, column[j + 1], part[1]);
          part[2] = fma(-four.z, column[j + 2], part[2]);
          part[3] = fma(-four.w, column[j + 3], part[3]);
        }
        column[i] = (part[0] + part[1]) + (part[2] + part[3]);
        const float value = column[i] * strength[me];
        const T high = (T)value;
        solved[i * C + me] = high;
        solved[C * C + i * C + me] = (T)(value - (float)high);
      }
    }
"""


def prepare_chunks(q: Operand, window: GDNWindow, lengths: mx.array) -> list[mx.array]:
    """Returns, for each row, head and chunk, (I + A)^-1 beta in two parts and the weights of
    (q . k), [B, Hv, chunks, 3, 64, 64]; and float32 sums of the decays' logs, [B, Hv, chunks, 64].
    """
    (batch, length, key_heads, key_dim), heads = q.shape, window.v.shape[2]
    chunks = -(-length // CHUNK)
    shared = 2 * 2 * CHUNK * (key_dim + 8) + 4 * CHUNK * (CHUNK + 4 + 3)
    given = "q", "k", "decay", "beta"
    arrays, constants = arrays_and_constants(given, (q, window.k, window.g, window.beta))
    names = (*given, "lengths"), ("mixing", "logs")
    return chunk_kernel("prepare", *names, _BODY, key_dim, q.dtype, shared)(
        [*arrays, lengths],
        {"T": q.dtype, "HK": key_heads, "DK": key_dim, "HV": heads, "WARPS": WARPS} | constants,
        (chunks, WARPS * heads, batch),
        [
            ((batch, heads, chunks, 3, CHUNK, CHUNK), q.dtype),
            ((batch, heads, chunks, CHUNK), mx.float32),
        ],
        WARPS,
    )


@functools.cache
def chunk_kernel(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    body: str,
    key_dim: int,
    dtype: mx.Dtype,
    shared: int,  # bytes
) -> gpu.Kernel:
    """Returns a kernel of `COMMON` and a body."""
    scale = f"    constexpr float SCALE = {key_dim**-0.5!r}f;\n"
    names = f"gated_delta_{name}", [*inputs], [*outputs]
    return gpu.Kernel(*names, COMMON + scale + body, {"cuda": mma.header(dtype)}, shared=shared)
