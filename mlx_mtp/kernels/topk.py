"""A mixture's router in one launch: top-k experts of each token, their weights, and their order.

Each token also gets the shared expert, with its own weight. In a decode step the (token, expert)
pairs are also sorted by expert, as the experts' kernel needs them (`SkinnyGemm.pairs`).
"""

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_mtp.kernels import gpu, self_check
from mlx_mtp.kernels.view import Operand, View, column_view, to_array

_MOST_EXPERTS = 1024  # Lanes keep the logits of all experts in registers.
_MOST_CHOSEN = 31  # Each lane has one expert, and another lane has the shared one.
# Maximum pairs that one launch sorts, in quadratic time. The first `_NEAR_PAIRS` are in the memory
# of a threadgroup, of which a Mac has 32 KB in all; the others are read again.
MOST_PAIRS, _NEAR_PAIRS = 8192, 2048
_MOST_WARPS = 16  # more would have too few registers

# A warp routes a token, and its lanes share the experts. Of equal logits the first one wins.
_BODY = """
    constexpr int N = E / 32;
    constexpr int ALL = K + 1;
    const int rows = gate_shape[0];
    const int warps = rows < MOST_WARPS ? rows : MOST_WARPS;
    const int all = rows * ALL;
    const auto experts = pairs + (SORT ? 2 * all : 0);
    THREADGROUP(int, keys, PAIRS);
    for (int row = grid_x * warps + warp; row < rows; row += SORT ? warps : rows) {
      float value[N];
      for (int i = 0; i < N; ++i) {
        value[i] = static_cast<float>(logits[LOGITS_AT + row * LOGITS_BY0 + 32 * i + lane]);
      }
      float largest = 0.0f;
      float total = 0.0f;
      float mine = 0.0f;
      int chosen = 0;
      for (int j = 0; j < K; ++j) {
        float best = value[0];
        float at = lane;
        for (int i = 1; i < N; ++i) {
          if (value[i] > best) {
            best = value[i];
            at = 32 * i + lane;
          }
        }
        for (int other = 16; other > 0; other /= 2) {
          const float their = SHUFFLE_XOR(best, other);
          const float their_at = SHUFFLE_XOR(at, other);
          if (their > best || (their == best && their_at < at)) {
            best = their;
            at = their_at;
          }
        }
        if (j == 0) {
          largest = best;
          for (int i = 0; !NORMALIZE && i < N; ++i) {
            total += exp(value[i] - largest);
          }
        }
        if (lane == j) {
          mine = exp(best - largest);
          chosen = at;
        }
        for (int i = 0; i < N; ++i) {
          if (at == 32 * i + lane) {
            value[i] = -3.4e38f;
          }
        }
      }
      total = NORMALIZE ? mine : total;
      for (int other = 16; other > 0; other /= 2) {
        total += SHUFFLE_XOR(total, other);
      }
      if (lane == K) {
        chosen = E;
        mine = 1.0f / (1.0f + exp(-static_cast<float>(gate[GATE_AT + row * GATE_BY0])));
        total = 1.0f;
      }
      if (lane < ALL) {
        const int pair = row * ALL + lane;
        experts[pair] = chosen;
        experts[all + pair] = BITS_OF(mine / total);
        if (SORT && pair < PAIRS) {
          keys[pair] = chosen * all + pair;
        }
      }
    }
    if (!SORT) {
      return;
    }
    DEVICE_BARRIER;
    for (int i = 32 * warp + lane; i < all; i += 32 * warps) {
      const int mine = experts[i] * all + i;
      int before = 0;
      for (int j = 0; j < (all < PAIRS ? all : PAIRS); ++j) {
        before += keys[j] < mine;
      }
      for (int j = PAIRS; j < all; ++j) {
        before += experts[j] * all + j < mine;
      }
      pairs[before] = experts[i];
      pairs[all + before] = i;
    }
"""


class Router(NamedTuple):
    """What the kernel is compiled for."""

    experts: int
    chosen: int  # experts of each token, K
    normalize: bool  # The K weights add up to 1; else they are softmax weights over all experts.


class ExpertChoice(NamedTuple):
    """The experts of N tokens, P pairs in all; each token's last one is the shared expert, E."""

    # Int32 [4, P]: the pairs' experts, ascending; the index of each of these pairs in the tokens'
    # order; and in that order the experts, and the bits of their float32 weights. A prompt's lacks
    # the first two rows. A second array would cost the host time in each layer.
    pairs: mx.array
    num_tokens: int

    @property
    def experts(self) -> mx.array:
        """Each token's experts, int32 [N, K + 1]."""
        return self.pairs[-2].reshape(self.num_tokens, -1)

    @property
    def weights(self) -> mx.array:
        """The experts' weights, float32 [N, K + 1]."""
        return weights_of(self.pairs).reshape(self.num_tokens, -1)


def run_kernel(logits: Operand, gate: Operand, router: Router) -> ExpertChoice:
    """Route a step's tokens by logits [N, E]; `gate` [N, 1] has the shared expert's."""
    return _route(logits, gate, router, sort=True)


def choose_experts(logits: Operand, gate: Operand, router: Router) -> ExpertChoice:
    """`run_kernel` for any number of tokens; the pairs are not sorted."""
    return _route(logits, gate, router, sort=False)


def weights_of(pairs: mx.array) -> mx.array:
    """Returns the weights in `ExpertChoice.pairs`, float32 [P]."""
    return pairs[-1].view(mx.float32)


def _route(logits: Operand, gate: Operand, router: Router, *, sort: bool) -> ExpertChoice:
    rows, (experts, chosen, normalize) = gate.shape[0], router
    warps = min(rows, _MOST_WARPS)
    groups = 1 if sort else -(-rows // warps)
    # Rounded up, as mlx compiles a kernel for each number.
    most_pairs = -(-rows // gpu.MOST_ROWS) * gpu.MOST_ROWS * (chosen + 1) if sort else 1
    constants = {"E": experts, "K": chosen, "NORMALIZE": normalize, "SORT": sort}
    constants |= {"PAIRS": min(most_pairs, _NEAR_PAIRS), "MOST_WARPS": _MOST_WARPS}
    shape = 4 if sort else 2, rows * (chosen + 1)
    views = View.of(logits), View.of(gate)
    for name, view in zip(("LOGITS", "GATE"), views):
        constants |= view.constants(name)
    arrays, outputs = [v.array for v in views], [(shape, mx.int32)]
    (pairs,) = KERNEL(arrays, constants, (groups, warps, 1), outputs, warps)
    return ExpertChoice(pairs, rows)


def portable(logits: Operand, gate: Operand, router: Router) -> ExpertChoice:
    """As `run_kernel`, in mlx operations."""
    logits, gate = to_array(logits).astype(mx.float32), to_array(gate)
    experts = mx.argsort(-logits, axis=-1)[:, : router.chosen].astype(mx.int32)
    chosen = mx.take_along_axis(logits, experts, axis=-1)
    among = chosen if router.normalize else logits
    weights = mx.exp(chosen - mx.logsumexp(among, axis=-1, keepdims=True))
    experts = mx.concatenate([experts, mx.full(gate.shape, router.experts, mx.int32)], axis=1)
    weights = mx.concatenate([weights, mx.sigmoid(gate.astype(mx.float32))], axis=1)
    in_order = experts.reshape(1, -1), weights.reshape(1, -1).view(mx.int32)
    return ExpertChoice(mx.concatenate([sorted_pairs(experts.reshape(-1)), *in_order]), len(gate))


def sorted_pairs(experts: mx.array) -> mx.array:
    """Returns the first two rows of `ExpertChoice.pairs`, for the experts of P pairs."""
    experts = experts.astype(mx.int32)
    order = mx.argsort(experts).astype(mx.int32)
    return mx.stack([experts[order], order])


def _applies(router: Router, _: mx.Dtype) -> bool:
    few = router.experts <= _MOST_EXPERTS and router.chosen <= min(_MOST_CHOSEN, router.experts)
    return few and router.experts % gpu.LANES == 0


def _error(router: Router, dtype: mx.Dtype) -> float:
    """Returns the largest difference of weights, or 1 if choice or order differ."""
    permuted = np.random.default_rng(0).permuted
    # Each value occurs twice, so that there are ties.
    steps = np.arange(router.experts, dtype=np.float32) // 2 / 8
    rows = np.stack([permuted(steps) for _ in range(_MOST_WARPS + 1)])  # two groups of a prompt
    logits, gate = (mx.array(a).astype(dtype) for a in (rows, rows[:, :1] / 8))
    found, alone = run_kernel(logits, gate, router), choose_experts(logits, gate, router)
    mx.eval(found.pairs, alone.pairs)
    with mx.stream(mx.cpu):
        true = portable(logits, gate, router)
        both = (found.pairs[:3], true.pairs[:3]), (alone.pairs, found.pairs[2:])
        same = all(mx.array_equal(a, b).item() for a, b in both)
        return self_check.difference([found.weights], [true.weights]) if same else 1.0


def _arguments(router: Router, dtype: mx.Dtype, tokens: int) -> tuple[Any, ...]:
    shape = tokens, router.experts + 1
    both = mx.random.normal(shape, key=mx.random.key(0)).astype(dtype)
    columns = ((0, router.experts), (router.experts, 1))
    logits, gate = (column_view(both, (tokens,), at, 1, (width,)) for at, width in columns)
    return logits, gate, router


_INPUTS = ["logits", "gate"]
KERNEL = gpu.Kernel("router", _INPUTS, ["pairs"], _BODY, contiguous=True, columns=_INPUTS)
ROUTER = gpu.Operation(
    "router kernel / mlx", "router", _error, _applies, run_kernel, portable, _arguments
)
