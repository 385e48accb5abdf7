"""The residual stream: sums of the layers' outputs, each with the norm that follows, in one launch.

A layer adds attention's output to the stream and norms the sum for its MLP; then it adds the MLP's
output, or the weighted outputs of its experts, and norms the sum for the next layer. The first sum
is not kept: the second kernel adds again, as an output takes the host longer than an addition takes
a GPU. In a mixture's prompt x already has the first sum, and the shared expert's share.
"""

from collections.abc import Callable

import mlx.core as mx

from mlx_mtp.kernels import topk
from mlx_mtp.kernels.norms import FusedNorm, NormShape, Sizes

# A threadgroup computes a row of the residual stream.
_BODY = """
    constexpr int EACH = (DIM + 32 * WARPS - 1) / (32 * WARPS);
    THREADGROUP(float, parts, WARPS);
    const int row = grid_x;
    float value[EACH];
    float squares = 0.0f;
    #pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int c = 32 * (i * WARPS + warp) + lane;
      if (c < DIM) {
        float sum = static_cast<float>(x[row * DIM + c]);
        ADD
        value[i] = sum;
        squares = fma(sum, sum, squares);
      }
    }
    for (int other = 16; other > 0; other /= 2) {
      squares += SHUFFLE_XOR(squares, other);
    }
    if (lane == 0) {
      parts[warp] = squares;
    }
    BARRIER;
    squares = 0.0f;
    for (int i = 0; i < WARPS; ++i) {
      squares += parts[i];
    }
    const float scale = 1.0f / sqrt(squares / DIM + 1.0f / INVERSE_EPS);
    for (int i = 0; i < EACH; ++i) {
      const int c = 32 * (i * WARPS + warp) + lane;
      if (c < DIM) {
        KEEP
        normed[row * DIM + c] = static_cast<InT>(value[i] * scale * static_cast<float>(weight[c]));
      }
    }
"""
_KEEP = "residual[row * DIM + c] = static_cast<InT>(value[i]);"
_ROUND = "sum = static_cast<float>(static_cast<InT>(sum));"  # as an array would be
_ATTENDED = "sum += static_cast<float>(attended[row * DIM + c]);"
_ADDED = "sum += static_cast<float>(added[row * DIM + c]);"
_EXPERTS = """
        float mixed = 0.0f;
        #pragma unroll
        for (int j = 0; j < CHOSEN; ++j) {
          const size_t pair = row * CHOSEN + j;
          mixed = fma(SHARE, static_cast<float>(experts[pair * DIM + c]), mixed);
        }
        sum += mixed;
"""
_OF_STEP = _EXPERTS.replace("SHARE", "FLOAT_OF(pairs[3 * pairs_strides[0] + pair])")
_OF_PROMPT = _EXPERTS.replace("SHARE", "weights[row * weights_strides[0] + j]")


def _sum_norm(
    shape: NormShape, x: mx.array, attended: mx.array, weight: mx.array
) -> list[mx.array]:
    return [mx.fast.rms_norm(x + attended, weight, shape.eps)]


def _add_norm(
    shape: NormShape, x: mx.array, attended: mx.array, added: mx.array, weight: mx.array
) -> list[mx.array]:
    residual = x + attended + added
    return [residual, mx.fast.rms_norm(residual, weight, shape.eps)]


def add_up(experts: mx.array, weights: mx.array) -> mx.array:
    """Returns the sums [N, D] of experts' outputs [N * K, D] by their weights, float32 [N, K]."""
    by_token = experts.reshape(*weights.shape, -1)
    return (by_token * weights.astype(experts.dtype)[..., None]).sum(axis=-2)


def _mix_norm(
    shape: NormShape,
    x: mx.array,
    experts: mx.array,  # [N * K, D]
    weights: mx.array,  # float32 [N, K]
    weight: mx.array,
) -> list[mx.array]:
    residual = (x + add_up(experts, weights)).astype(experts.dtype)
    return [residual, mx.fast.rms_norm(residual, weight, shape.eps)]


def _add_mix_norm(
    shape: NormShape,
    x: mx.array,
    attended: mx.array,
    experts: mx.array,  # [N * K, D]
    pairs: mx.array,  # `topk.ExpertChoice.pairs`
    weight: mx.array,
) -> list[mx.array]:
    weights = topk.weights_of(pairs).reshape(len(x), -1)
    return _mix_norm(shape, x + attended, experts, weights, weight)


def _operation(
    name: str,
    inputs: str,
    additions: list[str],
    portable: Callable[..., list[mx.array]],
    keeps: bool = True,
) -> FusedNorm:
    """Returns an operation that adds to x, and norms the sum; it `keeps` the sum as an output."""
    body = _BODY.replace("KEEP", _KEEP if keeps else "")
    body = body.replace("ADD", "\n".join(f"{each}\n{_ROUND}" for each in additions))
    names, outputs = inputs.split(), ["residual", "normed"] if keeps else ["normed"]

    def sizes(shape: NormShape, rows: int) -> tuple[Sizes, Sizes]:
        stream, pairs = (rows, shape.dim), rows * shape.chosen
        of: dict[str, tuple[int, ...]] = {"weight": (shape.dim,), "weights": (rows, shape.chosen)}
        of |= {"experts": (pairs, shape.dim), "pairs": (4, pairs)}
        return [of.get(name, stream) for name in names], [stream] * len(outputs)

    return FusedNorm(name, names, outputs, body, portable, sizes)


SUM_NORM = _operation("sum_norm", "x attended weight", [_ATTENDED], _sum_norm, keeps=False)
ADD_NORM = _operation("add_norm", "x attended added weight", [_ATTENDED, _ADDED], _add_norm)
ADD_MIX_NORM = _operation(
    "add_mix_norm", "x attended experts pairs weight", [_ATTENDED, _OF_STEP], _add_mix_norm
)
MIX_NORM = _operation("mix_norm", "x experts weights weight", [_OF_PROMPT], _mix_norm)
