"""Attention of a prompt's chunk with its scores in registers (flash attention), for Hopper GPUs.

A thread block computes 128 queries of one head with two warpgroups, 64 queries each, and iterates
over the keys and values in blocks of positions. While the tensor cores multiply a block's weights
with its values, the scores of the next block, computed before, become weights. Blocks begin at
fixed positions, and masked positions add zeros: a query's result has the same bits however the
prompt is cut into chunks.
"""

import functools

import mlx.core as mx

from mlx_mtp.kernels import gpu, self_check
from mlx_mtp.kernels.cuda import mma

DIM = 256
ROWS = 128  # queries of a thread block
BLOCK = 64  # positions; shared memory has the keys of two blocks and the values of three
LEAST = 64  # queries; fewer leave most of the GPU idle
_WARPS = 8

# Loads rows of 256 numbers in the layout of `wgmma`: 64 columns of all rows, 128 bytes of each,
# then the next 64. In a row of 128 bytes, a unit of 16 bytes is at its number XOR the row's.
_LOAD = r"""
template <int rows, typename T>
__device__ __forceinline__ void load(
    unsigned char* to, const T* from, int stride, int first, int last) {
  const int lane = threadIdx.x, warp = threadIdx.y;
  to += (lane / 8 * rows + warp) * 128 + (lane ^ warp) % 8 * 16;
  #pragma unroll
  for (int i = 0; i < rows / 8; ++i)
    copy16(to + 1024 * i, from + (long long)min(first + 8 * i + warp, last) * stride + 8 * lane);
}
"""
_BODY = r"""
    constexpr float LEAST = -1e30f;
    constexpr float SCALE = 1.44269504f / 16.0f;  // of scores, for powers of two
    constexpr float SLACK = 8.0f;  // of these
    constexpr int SIZE = BLOCK * D * 2, EACH = BLOCK / 2;  // bytes of a block, scores of a lane
    const int lane = threadIdx.x, warp = __shfl_sync(0xffffffffu, threadIdx.y, 0);  // uniform
    const int own = warp / 4 * 64;
    // The longest first.
    const int length = q_shape[0], base = ((length - 1) / ROWS - blockIdx.y) * ROWS;
    const int first = positions[0] + base;
    const int blocks = (first + min(ROWS, length - base) - 1) / BLOCK + 1;
    // Behind the chunk is what other rows may have left, which need not be finite.
    const int head = blockIdx.x, last = positions[0] + length - 1;
    const size_t from = (size_t)(head / GROUP) * k_shape[2] * D;
    SHARED(shared);
    unsigned char* const queries = shared + (-(size_t)shared & 1023);
    unsigned char* const keys = queries + ROWS * D * 2;
    unsigned char* const values = keys + 2 * SIZE;
    auto load_keys = [&](int block) {
      load<BLOCK>(keys + block % 2 * SIZE, k + from, D, BLOCK * block, last);
    };
    auto load_values = [&](int block) {
      load<BLOCK>(values + block % 3 * SIZE, v + from, D, BLOCK * block, last);
    };
    // A lane has these scores, weights and outputs of two rows, 8 apart.
    float s[EACH], o[D / 2] = {}, most[2] = {LEAST, LEAST}, sum[2] = {}, factor[2];
    unsigned p[EACH / 2];
    const int row = own + warp % 4 * 16 + lane / 4, column = lane % 4 * 2;
    const auto left = matrix(queries + own * 128, 16, 1024);
    auto score = [&](int block) {
      const auto right = matrix(keys + block % 2 * SIZE, 16, 1024);
      #pragma unroll
      for (int i = 0; i < D / 16; ++i)
        multiply(s, left + i / 4 * ROWS * 8 + i % 4 * 2,
                 right + i / 4 * BLOCK * 8 + i % 4 * 2, i > 0);
      commit_products();
    };
    auto add_values = [&](int block) {
      const auto right = matrix(values + block % 3 * SIZE, BLOCK * 128, 1024);
      #pragma unroll
      for (int i = 0; i < BLOCK / 16; ++i) multiply(o, p + 4 * i, right + i * 128);
      commit_products();
    };
    auto weigh = [&](int block) {
      if (BLOCK * (block + 1) > first + own)
        #pragma unroll
        for (int i = 0; i < EACH; ++i)
          if (BLOCK * block + i / 4 * 8 + column + i % 2 > first + row + i / 2 % 2 * 8)
            s[i] = LEAST;
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = most[h];
        #pragma unroll
        for (int i = 2 * h; i < EACH; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        // A base that is too small by a little does as well, and few blocks have to scale.
        top = (top - most[h]) * SCALE > SLACK ? top : most[h];
        factor[h] = power((most[h] - top) * SCALE);
        most[h] = top, sum[h] *= factor[h];
        #pragma unroll
        for (int i = 2 * h; i < EACH; i += i % 2 ? 3 : 1) {
          s[i] = power(fmaf(s[i], SCALE, -top * SCALE));
          sum[h] += s[i];
        }
      }
    };
    auto pack_weights = [&] {
      #pragma unroll
      for (int i = 0; i < EACH / 2; ++i) p[i] = packed(s[2 * i], s[2 * i + 1]);
    };
    auto meet = [] { wait<0>(), publish(), __syncthreads(); };
    // When all have this block's scores, its keys are overwritten, and the values of the second
    // block before it. What the next products need was copied a block ago. With the barrier here,
    // beside products, the warpgroups need not begin a block together.
    auto load_next = [&](int block) {
      if (block + 1 == blocks) return;
      meet();
      if (block + 2 < blocks) load_keys(block + 2);
      load_values(block + 1);
      commit();
    };

    load<ROWS>(queries, q + head * D, q_shape[1] * D, base, length - 1);
    load_keys(0);
    commit();
    if (blocks > 1) load_keys(1);
    load_values(0);
    commit();
    wait<1>();
    publish();
    __syncthreads();
    begin_products();
    score(0);
    wait_products<0>();
    hold(s);
    weigh(0);
    load_next(0);
    pack_weights();
    #pragma unroll 1
    for (int block = 1; block < blocks; ++block) {
      hold(o);
      begin_products();
      score(block);
      add_values(block - 1);
      wait_products<1>();
      hold(s);
      weigh(block);
      hold(s);
      const bool scales = __any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f);
      // The compiler moves waits up as far as the last branch, which is here behind the weights.
      load_next(block);
      wait_products<0>();
      hold(o), hold(p);
      if (scales)
        #pragma unroll
        for (int i = 0; i < D / 2; ++i) o[i] *= factor[i / 2 % 2];
      pack_weights();
    }
    meet();
    hold(o);
    begin_products();
    add_values(blocks - 1);
    wait_products<0>();
    hold(o);
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
      const int at = base + row + 8 * h;
      if (at >= length) continue;
      const float share = 1.0f / sum[h];
      T* const to = y + ((size_t)at * q_shape[1] + head) * D + column;
      #pragma unroll
      for (int i = 2 * h; i < D / 2; i += 4)
        *reinterpret_cast<unsigned*>(to + i / 4 * 8) = packed(o[i] * share, o[i + 1] * share);
    }
"""


def attend(
    queries: mx.array,  # [T, heads, D]
    keys: mx.array,  # [slots, KV heads, capacity, D]; only the first slot is used
    values: mx.array,
    positions: mx.array,  # of the queries, int32 [T], consecutive
) -> mx.array:
    """Returns the attention of each query up to its own position, [T, heads, D]."""
    length, heads, _ = queries.shape
    template = {"T": queries.dtype, "D": DIM, "ROWS": ROWS, "BLOCK": BLOCK}
    return _kernel(queries.dtype, BLOCK)(
        [queries, keys, values, positions],
        template | {"GROUP": heads // keys.shape[1]},
        (heads, _WARPS * -(-length // ROWS), 1),
        [(queries.shape, queries.dtype)],
        _WARPS,
    )[0]


def fits(queries: mx.array, keys: mx.array, scale: float) -> bool:
    """Returns whether the kernel serves queries [slots, T, heads, D]; for keys see `attend`."""
    slots, length, heads, dim = queries.shape
    if slots != 1 or length < LEAST or scale != dim**-0.5 or keys.dtype != queries.dtype:
        return False
    return FLASH_ATTENTION.works((heads, keys.shape[1], dim), keys.dtype)


@functools.cache
def hopper() -> bool:
    """Returns whether the GPU has `wgmma`; only compute capability 9.0 does."""
    return mx.device_info().get("architecture") == "sm_90"


def _applies(heads: tuple[int, int, int], dtype: mx.Dtype) -> bool:
    is_made = heads[2] == DIM and dtype in (mx.bfloat16, mx.float16)
    return is_made and hopper()


@functools.cache
def _kernel(dtype: mx.Dtype, block: int) -> gpu.Kernel:
    instructions = mma.header(dtype, mma.wgmma(block, DIM))
    header = instructions + mma.bounds(32 * _WARPS, 1) + _LOAD
    shared = 2 * DIM * (ROWS + 5 * block) + 1024
    names = "flash", ["q", "k", "v", "positions"], ["y"]
    return gpu.Kernel(*names, _BODY, {"cuda": header}, shared=shared)


FLASH_ATTENTION = gpu.Operation(
    "chunk attention kernel / float32",
    "flash",
    lambda heads, dtype: self_check.chunk_attention(attend, heads, dtype),
    _applies,
    for_metal=False,
)
