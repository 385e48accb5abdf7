"""The gated delta rule over a prompt by the tensor cores, for CUDA: chunks in matrix form.

`portable.py` has the algebra. A first launch (`gated_delta_prepare.py`) computes, for all chunks in
parallel, what does not depend on the state: (I + A)^-1 beta and the weights of (q . k). A second
launch iterates over the chunks with a slice of a head's state in registers:

    x = v - c (K S^T),  delta = ((I + A)^-1 beta) x,  y = c (Q S^T) + weights delta,
    S <- c_C S + (delta / c c_C)^T K.

Float32 operands are sums of two 16-bit numbers, so bfloat16 products have about 16 bits.
"""

import mlx.core as mx

from mlx_mtp.kernels import gpu, portable, self_check
from mlx_mtp.kernels.cuda.gated_delta_prepare import CHUNK, WARPS, chunk_kernel, prepare_chunks
from mlx_mtp.kernels.gdn_types import GDNShape, GDNWindow
from mlx_mtp.kernels.view import Operand, arrays_and_constants

LEAST = 64  # positions; fewer run in the sequential kernel (`gated_delta.py`)
_SLICE = 32  # of a state's Dv rows, in a threadgroup
_KEY_DIMS = (64, 128)

_BODY = """
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
        load_rows(to, all_keys, K_BY0, chunk);
        load_rows(to + C * KROW, all_queries, Q_BY0, chunk);
        for (int i = me; i < C * (SLICE / 8); i += 32 * WARPS) {
          const int row = i / (SLICE / 8), unit = i % (SLICE / 8) * 8;
          const int at = min(chunk * C + row, kept - 1);
          copy16(to + VALUES + row * VROW + unit,
                 v + V_AT + ((size_t)b * length + at) * V_BY0 + hv * V_BY1 + v0 + unit);
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


def run_kernel(
    q: Operand,  # l2-normalised, [B, T, Hk, Dk]
    window: GDNWindow,
    state: mx.array,  # before the window, float32 [B, Hv, Dv, Dk]
    lengths: mx.array,  # positions of the window that each row keeps, int32 [B]
) -> tuple[mx.array, mx.array]:
    """Returns outputs [B, T, Hv, Dv] and the state after the kept positions.

    See `recurrence.run_window`.
    """
    (batch, _, key_heads, key_dim), (heads, value_dim) = q.shape, window.v.shape[2:]
    mixing, logs = prepare_chunks(q, window, lengths)
    arrays, constants = arrays_and_constants("qkv", (q, window.k, window.v))
    names = (*"qkv", "mixing", "logs", "state", "lengths"), ("y", "state_out")
    sizes = {"T": q.dtype, "HK": key_heads, "DK": key_dim, "HV": heads, "DV": value_dim}
    outputs, after = chunk_kernel("run", *names, _BODY, key_dim, q.dtype, _shared(key_dim))(
        [*arrays, mixing, logs, state, lengths],
        sizes | {"SLICE": _SLICE, "WARPS": WARPS} | constants,
        (value_dim // _SLICE, WARPS * heads, batch),
        [(window.v.shape, q.dtype), (state.shape, mx.float32)],
        WARPS,
    )
    return outputs, after


def fits(window: GDNWindow) -> bool:
    """Returns whether the kernels run a prompt of this length, these shapes and types here."""
    shape = GDNShape(*window.k.shape[2:], *window.v.shape[2:])
    return window.length >= LEAST and GATED_DELTA_CHUNKS.works(shape, window.k.dtype)


def _applies(shape: GDNShape, dtype: mx.Dtype) -> bool:
    made = shape.key_dim in _KEY_DIMS and shape.value_dim % _SLICE == 0
    if not made or dtype not in (mx.bfloat16, mx.float16):
        return False
    return _shared(shape.key_dim) <= gpu.shared_memory()


def _shared(key_dim: int) -> int:
    """Returns the bytes of shared memory of the second launch."""
    padded, part = CHUNK * (key_dim + 8), CHUNK * (_SLICE + 8)
    stage = 2 * padded + part + 3 * CHUNK * (CHUNK + 8) + 2 * CHUNK
    return 2 * (2 * stage + 2 * _SLICE * (key_dim + 8) + 6 * part)


def _reference(
    q: Operand, window: GDNWindow, state: mx.array, lengths: mx.array
) -> tuple[mx.array, mx.array]:
    return portable.run_chunked(q, window.masked(lengths), state)[:2]


GATED_DELTA_CHUNKS = gpu.Operation(
    "gated delta of prompts / portable",
    "gated_delta_chunks",
    lambda shape, dtype: self_check.gated_delta_prompt_error(run_kernel, _reference, shape, dtype),
    _applies,
    for_metal=False,
)
