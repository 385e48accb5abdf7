"""Attention of windows for Metal, where a position has the same bits in every pass.

mlx's own results depend on the pass: one kernel is for short KV, another splits long KV into parts,
and their number depends on the lengths of the buffer and of the window. Here a position's keys are
dealt to B blocks in turn: block b gets the keys b, b + B, b + 2B, .., and B depends only on the
position. A warp computes a block for a pair of a token and a query head; a second launch adds the
blocks in a fixed order. So neither other rows, nor the window, nor the buffer affect the bits.

It has not been run on a Mac. The bodies run on CUDA too, where `cuda.decode_attention` is faster.
"""

import functools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_mtp.kernels import gpu, self_check

# Blocks of a position by the number of its keys: enough threadgroups where there are few keys, and
# not too many sums to add up.
_BLOCKS, _MOST_BLOCKS = ((512, 16), (2048, 32), (16384, 64)), 128
_BUFFERS = (1, 8)  # possible KV buffers of a launch (Metal allows 31); each number has its kernel
_PAIRS = 16  # maximum warps of a threadgroup
_ADDING = 8  # warps that add a head's blocks

_COMMON = f"""
    constexpr float LEAST = -1e30f;
    constexpr int N = D / 32;
    #define BLOCKS(keys) ({"".join(f"(keys) <= {n} ? {b} : " for n, b in _BLOCKS)}{_MOST_BLOCKS})
"""
_PART = """
    const auto item = items + grid_x * 8;
    const int pair = grid_y;
    const int pairs = item[4] * GROUP;
    if (pair >= pairs) {
      return;
    }
    const int token = item[3] + pair / GROUP;
    const int end = positions[token] + 1;
    const int blocks = BLOCKS(end);
    const int block = item[5];
    if (block >= blocks) {
      return;
    }
    auto kv = kv0;
    CHOOSE
    const auto keys = kv + static_cast<size_t>(item[1] * KV + grid_z) * item[2] * D + lane * N;
    const auto values = keys + static_cast<size_t>(item[6]) * D;
    const float scale = 1.44269504f / sqrt(static_cast<float>(D));  // for powers of two
    const auto own = q + (static_cast<size_t>(token * KV + grid_z) * GROUP + pair % GROUP) * D;
    float query[N];
    float out[N];
    for (int j = 0; j < N; ++j) {
      query[j] = static_cast<float>(own[lane * N + j]) * scale;
      out[j] = 0.0f;
    }
    float most = LEAST;
    float sum = 0.0f;
    for (int at = block; at < end; at += AT_ONCE * blocks) {
      float score[AT_ONCE];
      #pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        // Behind the end the first key is taken again, with a weight of 0.
        const int place = at + i * blocks < end ? at + i * blocks : at;
        const auto key = keys + static_cast<size_t>(place) * D;
        score[i] = 0.0f;
        for (int j = 0; j < N; ++j) {
          score[i] = fma(query[j], static_cast<float>(key[j]), score[i]);
        }
      }
      for (int other = 16; other > 0; other /= 2) {
        #pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          score[i] += SHUFFLE_XOR(score[i], other);
        }
      }
      float next = most;
      #pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        next = at + i * blocks < end && score[i] > next ? score[i] : next;
      }
      const float kept = exp2(most - next);
      sum *= kept;
      for (int j = 0; j < N; ++j) {
        out[j] *= kept;
      }
      #pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const bool seen = at + i * blocks < end;
        const auto value = values + static_cast<size_t>(seen ? at + i * blocks : at) * D;
        const float weight = seen ? exp2(score[i] - next) : 0.0f;
        sum += weight;
        for (int j = 0; j < N; ++j) {
          out[j] = fma(weight, static_cast<float>(value[j]), out[j]);
        }
      }
      most = next;
    }
    const size_t to = static_cast<size_t>(item[7]) + (block * KV + grid_z) * pairs + pair;
    for (int j = 0; j < N; ++j) {
      parts[to * D + lane * N + j] = out[j];
    }
    if (lane == 0) {
      stats[2 * to] = most;
      stats[2 * to + 1] = sum;
    }
"""
_ADD = """
    THREADGROUP(float, sums, WARPS * (D + 1));
    const auto token = tokens + grid_x * 4;
    const int head = grid_y / WARPS;
    const int pairs = token[2];
    const int blocks = BLOCKS(positions[token[0]] + 1);
    const size_t first = static_cast<size_t>(token[1]) + head / GROUP * pairs
        + token[3] * GROUP + head % GROUP;
    float most = LEAST;
    for (int b = lane; b < blocks; b += 32) {
      const float their = stats[2 * (first + static_cast<size_t>(b) * KV * pairs)];
      most = their > most ? their : most;
    }
    for (int other = 16; other > 0; other /= 2) {
      const float their = SHUFFLE_XOR(most, other);
      most = their > most ? their : most;
    }
    float out[N];
    for (int j = 0; j < N; ++j) {
      out[j] = 0.0f;
    }
    float sum = 0.0f;
    for (int b = warp; b < blocks; b += WARPS) {
      const size_t from = first + static_cast<size_t>(b) * KV * pairs;
      const float weight = exp2(stats[2 * from] - most);
      sum = fma(weight, stats[2 * from + 1], sum);
      for (int j = 0; j < N; ++j) {
        out[j] = fma(weight, parts[from * D + lane * N + j], out[j]);
      }
    }
    for (int j = 0; j < N; ++j) {
      sums[warp * (D + 1) + lane * N + j] = out[j];
    }
    if (lane == 0) {
      sums[warp * (D + 1) + D] = sum;
    }
    BARRIER;
    for (int d = warp * 32 + lane; d < D; d += WARPS * 32) {
      float total = 0.0f;
      float done = 0.0f;
      for (int w = 0; w < WARPS; ++w) {
        total += sums[w * (D + 1) + D];
        done += sums[w * (D + 1) + d];
      }
      y[(static_cast<size_t>(grid_x) * (KV * GROUP) + head) * D + d] = static_cast<T>(done / total);
    }
"""


def attend(
    queries: mx.array,  # [N, heads, D]
    positions: mx.array,  # of the queries, int32 [N]; each attends up to its own
    buffers: Sequence[mx.array],  # keys, then values: [2 * slots * KV heads * capacity, D]
    kv_heads: int,
    rows: tuple[tuple[int, ...], ...],  # of each row: buffer, slot, capacity, first token, tokens
) -> mx.array:
    """Returns the attention of all windows of a pass, [N, heads, D]."""
    _, heads, dim = queries.shape
    sizes = {"T": queries.dtype, "D": dim, "KV": kv_heads, "GROUP": heads // kv_heads}
    halves = tuple(len(buffer) // 2 for buffer in buffers)
    launches, order = _plan(rows, halves, heads // kv_heads, kv_heads)
    outputs = []
    for own, items, tokens, pairs, total in launches:
        parts, stats = _kernel(len(own))(
            [queries, positions, items, *(buffers[number] for number in own)],
            sizes | {"AT_ONCE": 4},
            (len(items), pairs, kv_heads),
            [((total, dim), mx.float32), ((total, 2), mx.float32)],
            min(_PAIRS, pairs),
        )
        outputs += _kernel(0)(
            [parts, stats, positions, tokens],
            sizes | {"WARPS": _ADDING},
            (len(tokens), _ADDING * heads, 1),
            [((len(tokens), heads, dim), queries.dtype)],
            _ADDING,
        )
    joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    return joined if order is None else joined[order]


def serves(dim: int) -> bool:
    """Returns whether the kernel supports heads of this dimension."""
    return dim % gpu.LANES == 0 and dim <= 256


Launch = tuple[list[int], mx.array, mx.array, int, int]


@functools.lru_cache(maxsize=64)  # Steps repeat.
def _plan(
    rows: tuple[tuple[int, ...], ...], halves: tuple[int, ...], group: int, kv_heads: int
) -> tuple[list[Launch], mx.array | None]:
    """Returns the launches for windows of rows, and each token's index among their outputs.

    A launch has the numbers of its buffers; for each block of a row, int32 [I, 8]: the buffer's
    place among these, slot, capacity, first token, tokens, the block's number, lines of keys in the
    buffer, and the row's first partial sum; for each token, int32 [n, 4]: its number, the row's
    first partial sum, the row's pairs, and the token's place in the row; the largest number of
    pairs of a row; and the number of partial sums. The index is None if outputs are in order.
    """
    used = [*dict.fromkeys(row[0] for row in rows)]
    launches, order = list[Launch](), list[int]()
    for begin in range(0, len(used), _BUFFERS[-1]):
        some = used[begin : begin + _BUFFERS[-1]]
        items, tokens, total, most = [], [], 0, 0
        for buffer, slot, capacity, first, count in rows:
            if buffer not in some:
                continue
            pairs, blocks = count * group, _blocks(capacity)
            place = (some.index(buffer), slot, capacity, first, count)
            items += [(*place, block, halves[buffer], total) for block in range(blocks)]
            tokens += [(first + i, total, pairs, i) for i in range(count)]
            order += range(first, first + count)
            total, most = total + blocks * kv_heads * pairs, max(most, pairs)
        filled = some + some[:1] * (next(n for n in _BUFFERS if n >= len(some)) - len(some))
        blocks_of, sums_of = (mx.array(np.array(each, dtype=np.int32)) for each in (items, tokens))
        launches.append((filled, blocks_of, sums_of, most, total))
    in_order = order == list(range(len(order)))
    return launches, None if in_order else mx.array(np.argsort(order).astype(np.int32))


def _blocks(keys: int) -> int:
    return next((blocks for most, blocks in _BLOCKS if keys <= most), _MOST_BLOCKS)


@functools.cache
def _kernel(buffers: int) -> gpu.Kernel:
    """Returns the kernel for blocks in `buffers` KV buffers; for 0, the one that adds blocks."""
    if buffers:
        others = (f"if (item[0] == {n}) {{ kv = kv{n}; }}\n" for n in range(1, buffers))
        inputs = ["q", "positions", "items", *(f"kv{number}" for number in range(buffers))]
        outputs, body = ["parts", "stats"], _PART.replace("CHOOSE", "".join(others))
    else:
        inputs, outputs, body = ["parts", "stats", "positions", "tokens"], ["y"], _ADD
    name = f"attention_blocks_{buffers}"
    return gpu.Kernel(name, inputs, outputs, _COMMON + body, contiguous=True)


BLOCK_ATTENTION = gpu.Operation(
    "attention kernel for exact answers / float32",
    "window_attention",
    lambda heads, dtype: self_check.window_attention(attend, heads, dtype, gpu.LONGEST_WINDOW),
    lambda heads, dtype: serves(heads[2]) and dtype in (mx.bfloat16, mx.float16),
)
