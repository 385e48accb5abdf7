"""The gated delta rule over a prompt by the tensor cores, for CUDA: chunks in matrix form.

`portable.py` has the algebra. A first launch computes of all chunks at once what does not depend on
the state: (I + A)^-1 beta and the weights of (q . k). A second one goes from chunk to chunk with a
slice of a head's state in registers:

    x = v - c (K S^T),  delta = ((I + A)^-1 beta) x,  y = c (Q S^T) + weights delta,
    S <- c_C S + (delta / c c_C)^T K.

Float32 operands are sums of two 16-bit numbers, so that a product in bfloat16 has some 16 bits.
"""

import functools
from typing import Any

import mlx.core as mx

from mlx_mtp.kernels import gpu, mma, self_check
from mlx_mtp.kernels.window import Shape, Window

CHUNK = 64
LEAST = 64  # positions; fewer are left to the kernel that takes one after the other
_SLICE = 32  # of a state's Dv rows, for a threadgroup
_WARPS = 4  # each with 16 positions of a chunk, and a quarter of Dk
_KEY_DIMS = (64, 128)

_COMMON = """
    constexpr int C = 64, KROW = DK + 8;  // rows are padded: lanes then read different banks
    struct alignas(4) Two { T first, second; };
    const int lane = threadIdx.x, warp = threadIdx.y, g = lane >> 2, t = lane & 3;
    const int me = 32 * warp + lane, hv = blockIdx.y, b = blockIdx.z, hk = hv / (HV / HK);
    // Where a lane reads a row of four matrices: one below the other first, or side by side first.
    const int down_row = lane & 15, down_column = (lane >> 4) * 8;
    const int side_row = (lane & 7) + (lane >> 4) * 8, side_column = (lane >> 3 & 1) * 8;
    const int length = k_shape[1], kept = lengths[b], chunks = (length + C - 1) / C;
    // A chunk's keys or queries; behind what is kept its last position, which gets no weight.
    auto load_rows = [&](T* to, const T* from, int chunk) {
      for (int i = me; i < C * (DK / 8); i += 32 * WARPS) {
        const int row = i / (DK / 8), unit = i % (DK / 8) * 8;
        const int at = min(chunk * C + row, kept - 1);
        copy16(to + row * KROW + unit, from + (((size_t)b * length + at) * HK + hk) * DK + unit);
      }
    };
    SHARED(shared);
"""
# A column of the inverse is forward substitution, by one lane.
_PREPARE = """
    constexpr int ROW = C + 4;
    const int chunk = blockIdx.x;
    if (chunk * C >= kept) return;
    T* const keys = reinterpret_cast<T*>(shared);
    T* const queries = keys + C * KROW;
    float* const a = reinterpret_cast<float*>(queries + C * KROW);
    float* const decays = a + C * ROW;
    float* const sums = decays + C;
    float* const strength = sums + C;
    load_rows(keys, k, chunk);
    load_rows(queries, q, chunk);
    commit();
    if (me < C) {
      const int at = chunk * C + me;
      const bool counts = at < kept;
      const size_t own = ((size_t)b * length + (counts ? at : 0)) * HV + hv;
      decays[me] = counts ? log(fmaxf(decay[own], 1e-37f)) : 0.0f;
      strength[me] = counts ? (float)beta[own] : 0.0f;
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
_RUN = """
    constexpr int VROW = SLICE + 8, MROW = C + 8, NEAR = DK / WARPS;
    constexpr int VALUES = 2 * C * KROW, MIXING = VALUES + C * VROW, LOGS = MIXING + 3 * C * MROW;
    constexpr int STAGE = LOGS + 2 * C, PART = C * VROW;
    const int used = (kept + C - 1) / C, v0 = blockIdx.x * SLICE;
    T* const stages = reinterpret_cast<T*>(shared);
    T* const memory = stages + 2 * STAGE;  // the state, as two parts
    T* const x = memory + 2 * SLICE * KROW;
    T* const delta = x + 2 * PART;
    T* const written = delta + 2 * PART;
    auto load = [&](int chunk) {
      if (chunk < used) {
        T* const to = stages + chunk % 2 * STAGE;
        load_rows(to, k, chunk);
        load_rows(to + C * KROW, q, chunk);
        for (int i = me; i < C * (SLICE / 8); i += 32 * WARPS) {
          const int row = i / (SLICE / 8), unit = i % (SLICE / 8) * 8;
          const int at = min(chunk * C + row, kept - 1);
          copy16(to + VALUES + row * VROW + unit,
                 v + (((size_t)b * length + at) * HV + hv) * DV + v0 + unit);
        }
        const size_t own = ((size_t)b * HV + hv) * chunks + chunk;
        for (int i = me; i < 3 * C * (C / 8); i += 32 * WARPS)
          copy16(to + MIXING + i / (C / 8) * MROW + i % (C / 8) * 8,
                 mixing + own * (3 * C * C) + i * 8);
        if (me < C / 4) copy16(to + LOGS + 8 * me, logs + own * C + 4 * me);
      }
      commit();
    };
    auto split = [](T* to, int apart, float first, float second) {
      const Two high{(T)first, (T)second};
      *reinterpret_cast<Two*>(to) = high;
      *reinterpret_cast<Two*>(to + apart) =
          Two{(T)(first - (float)high.first), (T)(second - (float)high.second)};
    };
    float s[2][NEAR / 8][4];  // rows 16 m + g (+ 8) of the slice, columns of the warp's quarter
    const size_t place = (((size_t)b * HV + hv) * DV + v0 + g) * DK + warp * NEAR + 2 * t;
    #pragma unroll
    for (int m = 0; m < 2; ++m)
      #pragma unroll
      for (int j = 0; j < NEAR / 8; ++j)
        #pragma unroll
        for (int i = 0; i < 4; ++i)
          s[m][j][i] = state[place + (16 * m + i / 2 * 8) * DK + 8 * j + i % 2];
    auto publish = [&]() {
      #pragma unroll
      for (int m = 0; m < 2; ++m)
        #pragma unroll
        for (int j = 0; j < NEAR / 8; ++j)
          #pragma unroll
          for (int half = 0; half < 2; ++half)
            split(memory + (16 * m + 8 * half + g) * KROW + warp * NEAR + 8 * j + 2 * t,
                  SLICE * KROW, s[m][j][2 * half], s[m][j][2 * half + 1]);
    };
    publish();
    load(0);
    #pragma unroll 1
    for (int chunk = 0; chunk < used; ++chunk) {
      wait<0>();
      __syncthreads();
      load(chunk + 1);
      const T* const keys = stages + chunk % 2 * STAGE;
      const T* const solved = keys + MIXING;
      const float* const sums = reinterpret_cast<const float*>(keys + LOGS);
      const float last = sums[C - 1];
      float decay[2];
      #pragma unroll
      for (int half = 0; half < 2; ++half) decay[half] = exp(sums[16 * warp + 8 * half + g]);

      float known[4][4] = {}, y_part[4][4] = {};  // K S^T and Q S^T
      #pragma unroll 2
      for (int d = 0; d < DK; d += 16) {
        unsigned key[4], query[4];
        const T* const from = keys + (16 * warp + down_row) * KROW + d + down_column;
        load_matrices(key, from);
        load_matrices(query, from + C * KROW);
        #pragma unroll
        for (int part = 0; part < 2; ++part)
          #pragma unroll
          for (int j = 0; j < 4; j += 2) {
            unsigned own[4];
            load_matrices(own, memory + (part * SLICE + 8 * j + side_row) * KROW + d + side_column);
            #pragma unroll
            for (int i = 0; i < 2; ++i) {
              multiply(known[j + i], key, own[2 * i], own[2 * i + 1]);
              multiply(y_part[j + i], query, own[2 * i], own[2 * i + 1]);
            }
          }
      }
      #pragma unroll
      for (int j = 0; j < 4; ++j)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = (16 * warp + 8 * half + g) * VROW + 8 * j + 2 * t;
          const Two value = *reinterpret_cast<const Two*>(keys + VALUES + at);
          split(x + at, PART, (float)value.first - decay[half] * known[j][2 * half],
                (float)value.second - decay[half] * known[j][2 * half + 1]);
        }
      __syncthreads();

      float d[4][4] = {};
      #pragma unroll 1
      for (int i = 0; i <= warp; ++i) {
        unsigned high[4], low[4];
        const T* const from = solved + (16 * warp + down_row) * MROW + 16 * i + down_column;
        load_matrices(high, from);
        load_matrices(low, from + C * MROW);
        #pragma unroll
        for (int j = 0; j < 4; j += 2)
          #pragma unroll
          for (int part = 0; part < 2; ++part) {
            unsigned own[4];
            load_transposed(
                own, x + part * PART + (16 * i + down_row) * VROW + 8 * j + down_column);
            multiply(d[j], high, own[0], own[1]);
            multiply(d[j + 1], high, own[2], own[3]);
            if (part == 0) {
              multiply(d[j], low, own[0], own[1]);
              multiply(d[j + 1], low, own[2], own[3]);
            }
          }
      }
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * warp + 8 * half + g;
        const float left = exp(last - sums[row]);
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = row * VROW + 8 * j + 2 * t;
          const float first = d[j][2 * half], second = d[j][2 * half + 1];
          split(delta + at, PART, first, second);
          split(written + at, PART, left * first, left * second);
          y_part[j][2 * half] *= SCALE * decay[half];
          y_part[j][2 * half + 1] *= SCALE * decay[half];
        }
      }
      __syncthreads();

      #pragma unroll 1
      for (int i = 0; i <= warp; ++i) {
        unsigned weights[4];
        load_matrices(
            weights, solved + (2 * C + 16 * warp + down_row) * MROW + 16 * i + down_column);
        #pragma unroll
        for (int part = 0; part < 2; ++part)
          #pragma unroll
          for (int j = 0; j < 4; j += 2) {
            unsigned own[4];
            load_transposed(
                own, delta + part * PART + (16 * i + down_row) * VROW + 8 * j + down_column);
            multiply(y_part[j], weights, own[0], own[1]);
            multiply(y_part[j + 1], weights, own[2], own[3]);
          }
      }
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = chunk * C + 16 * warp + 8 * half + g;
        if (at < kept) {
          T* const to = y + (((size_t)b * length + at) * HV + hv) * DV + v0 + 2 * t;
          #pragma unroll
          for (int j = 0; j < 4; ++j)
            *reinterpret_cast<Two*>(to + 8 * j) =
                Two{(T)y_part[j][2 * half], (T)y_part[j][2 * half + 1]};
        }
      }

      const float remaining = exp(last);
      #pragma unroll
      for (int m = 0; m < 2; ++m)
        #pragma unroll
        for (int j = 0; j < NEAR / 8; ++j)
          #pragma unroll
          for (int i = 0; i < 4; ++i) s[m][j][i] *= remaining;
      #pragma unroll
      for (int i = 0; i < C; i += 16) {
        unsigned own[2][2][4];
        #pragma unroll
        for (int part = 0; part < 2; ++part)
          #pragma unroll
          for (int m = 0; m < 2; ++m)
            load_transposed(own[part][m], written + part * PART + (i + side_row) * VROW + 16 * m
                                              + side_column);
        #pragma unroll
        for (int j = 0; j < NEAR / 8; j += 2) {
          unsigned key[4];
          load_transposed(key, keys + (i + down_row) * KROW + warp * NEAR + 8 * j + down_column);
          #pragma unroll
          for (int part = 0; part < 2; ++part)
            #pragma unroll
            for (int m = 0; m < 2; ++m) {
              multiply(s[m][j], own[part][m], key[0], key[1]);
              multiply(s[m][j + 1], own[part][m], key[2], key[3]);
            }
        }
      }
      publish();
    }
    wait<0>();
    // Not left as it was: a NaN there would reach other rows through masked attention.
    for (int i = me; i < (length - kept) * SLICE; i += 32 * WARPS)
      y[(((size_t)b * length + kept + i / SLICE) * HV + hv) * DV + v0 + i % SLICE] = (T)0.0f;
    #pragma unroll
    for (int m = 0; m < 2; ++m)
      #pragma unroll
      for (int j = 0; j < NEAR / 8; ++j)
        #pragma unroll
        for (int i = 0; i < 4; ++i)
          state_out[place + (16 * m + i / 2 * 8) * DK + 8 * j + i % 2] = s[m][j][i];
"""


def fits(window: Window) -> bool:
    """Whether the kernels run such a prompt here."""
    dtype, shape = window.k.dtype, Shape(*window.k.shape[2:], *window.v.shape[2:])
    return window.length >= LEAST and applies(shape, dtype) and _works(shape, dtype)


def applies(shape: Shape, dtype: mx.Dtype) -> bool:
    """Whether the kernels are made for this."""
    made = shape.key_dim in _KEY_DIMS and shape.value_dim % _SLICE == 0
    if not made or gpu.backend() != "cuda" or dtype not in (mx.bfloat16, mx.float16):
        return False
    return _shared(shape.key_dim) <= gpu.shared_memory()


def _shared(key_dim: int) -> int:
    """Bytes of shared memory of the second launch."""
    padded, part = CHUNK * (key_dim + 8), CHUNK * (_SLICE + 8)
    stage = 2 * padded + part + 3 * CHUNK * (CHUNK + 8) + 2 * CHUNK
    return 2 * (2 * stage + 2 * _SLICE * (key_dim + 8) + 6 * part)


@functools.cache
def _works(shape: Shape, dtype: mx.Dtype) -> bool:
    return gpu.agrees("gated_delta_chunks", lambda: error(shape, dtype))


def error(shape: Shape, dtype: mx.Dtype) -> float:
    """The largest difference from the portable code (see `self_check.gated_delta_chunks`)."""
    return self_check.gated_delta_chunks(launch, shape, dtype)


def launch(
    q: mx.array,  # l2-normalised, [B, T, Hk, Dk]
    window: Window,
    state: mx.array,  # before it, float32 [B, Hv, Dv, Dk]
    lengths: mx.array,  # how much of the window each row keeps, int32 [B]
) -> tuple[mx.array, mx.array]:
    """As `gated_delta.run`: outputs [B, T, Hv, Dv], and the state after the kept positions."""
    (batch, length, key_heads, key_dim), (heads, value_dim) = q.shape, window.v.shape[2:]
    chunks = -(-length // CHUNK)
    sizes = {"T": q.dtype, "HK": key_heads, "DK": key_dim, "HV": heads, "WARPS": _WARPS}
    padded = CHUNK * (key_dim + 8)
    mixing, logs = gpu.launch(
        _kernel("prepare", key_dim, q.dtype, 2 * 2 * padded + 4 * CHUNK * (CHUNK + 4 + 3)),
        [q, window.k, window.g, window.beta, lengths],
        sizes,
        (chunks, _WARPS * heads, batch),
        _WARPS,
        [
            ((batch, heads, chunks, 3, CHUNK, CHUNK), q.dtype),
            ((batch, heads, chunks, CHUNK), mx.float32),
        ],
    )
    outputs, after = gpu.launch(
        _kernel("run", key_dim, q.dtype, _shared(key_dim)),
        [q, window.k, window.v, mixing, logs, state, lengths],
        sizes | {"DV": value_dim, "SLICE": _SLICE},
        (value_dim // _SLICE, _WARPS * heads, batch),
        _WARPS,
        [(window.v.shape, q.dtype), (state.shape, mx.float32)],
    )
    return outputs, after


_NAMES = {
    "prepare": (["q", "k", "decay", "beta", "lengths"], ["mixing", "logs"], _PREPARE),
    "run": (["q", "k", "v", "mixing", "logs", "state", "lengths"], ["y", "state_out"], _RUN),
}


@functools.cache
def _kernel(name: str, key_dim: int, dtype: mx.Dtype, shared: int) -> Any:
    inputs, outputs, body = _NAMES[name]
    scale = f"    constexpr float SCALE = {key_dim**-0.5!r}f;\n"
    header, source = gpu.lean(mma.header(dtype)), gpu.lean(_COMMON + scale + body)
    return mx.fast.cuda_kernel(
        name=gpu.kernel_name(f"gated_delta_{name}", header, source, str(shared)),
        input_names=inputs,
        output_names=outputs,
        header=header,
        source=source,
        shared_memory=shared,
    )
