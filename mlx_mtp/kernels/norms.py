"""RMS norms fused with the operations before and after them, one launch each.

A row's result does not depend on the other rows of its step or chunk, and sums are float32. Each
kernel has a form in mlx operations, which runs where the kernel can't.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_mtp.kernels import gpu, self_check
from mlx_mtp.kernels.view import Operand, View, to_array

_MOST_WARPS = 32  # of a row in a decode step
_PROMPT_WARPS = 8  # of a row in a prompt: while one threadgroup adds up or writes, others read
_HEADS_AT_ONCE = 4  # heads of a threadgroup
_CHECKED_ROWS = 3, gpu.MOST_ROWS + 1  # of a step and of a prompt

Sizes = list[tuple[int, ...]]

# A warp computes a head of a row.
_HEAD = """
    float value[DIM / 32];
    float squares = 0.0f;
    for (int i = 0; i < DIM / 32; ++i) {
      value[i] = static_cast<float>(from[32 * i + lane]);
      squares = fma(value[i], value[i], squares);
    }
    for (int other = 16; other > 0; other /= 2) {
      squares += SHUFFLE_XOR(squares, other);
    }
    const float scale = 1.0f / sqrt(squares / DIM + 1.0f / INVERSE_EPS);
"""
GATED_HEAD = f"""
    {_HEAD}
    for (int i = 0; i < DIM / 32; ++i) {{
      const int c = 32 * i + lane;
      const float gate = static_cast<float>(gates[c]);
      const float scaled = value[i] * scale * static_cast<float>(weight[c]);
      to[c] = static_cast<InT>(scaled * (gate / (1.0f + exp(-gate))));
    }}
"""
_GATED = f"""
    const int head = grid_y;
    if (head >= HEADS) {{
      return;
    }}
    const auto from = x + (grid_x * HEADS + head) * DIM;
    const auto gates = z + Z_AT + static_cast<size_t>(grid_x) * Z_BY0 + head / RATIO * Z_BY1
                     + head % RATIO * Z_BY2;
    const auto to = y + (grid_x * HEADS + head) * DIM;
    {GATED_HEAD}
"""
_GATE = """
    const int head = grid_y;
    if (head >= HEADS) {
      return;
    }
    const size_t token = grid_x;
    const auto gates = gate + GATE_AT + token * GATE_BY0 + head * GATE_BY1;
    const size_t first = (token * HEADS + head) * DIM;
    for (int c = lane; c < DIM; c += 32) {
      const float share = 1.0f / (1.0f + exp(-static_cast<float>(gates[c])));
      y[first + c] = static_cast<InT>(static_cast<float>(x[first + c]) * share);
    }
"""
# Of the ROTATED dimensions, i and i + ROTATED / 2 are a pair; one lane has both.
_ROTATE = f"""
    const int head = grid_y;
    if (head >= HEADS + 2 * KEYS) {{
      return;
    }}
    const bool is_query = head < HEADS;
    const size_t token = grid_x;
    const int own = is_query ? head : head - HEADS;
    const auto to = is_query ? queries + (grid_x * HEADS + own) * DIM
                             : entries + (grid_x * 2 * KEYS + own) * DIM;
    if (head >= HEADS + KEYS) {{
      const auto value = v + V_AT + token * V_BY0 + (own - KEYS) * V_BY1;
      for (int i = lane; i < DIM; i += 32) {{
        to[i] = value[i];
      }}
      return;
    }}
    const auto from = is_query ? q + Q_AT + token * Q_BY0 + own * Q_BY1
                               : k + K_AT + token * K_BY0 + own * K_BY1;
    const auto weight = is_query ? q_weight : k_weight;
    {_HEAD}
    for (int i = 0; i < DIM / 32; ++i) {{
      // Rounded as an array of this type would be.
      value[i] = static_cast<float>(
          static_cast<InT>(value[i] * scale * static_cast<float>(weight[32 * i + lane])));
    }}
    constexpr int HALF = ROTATED / 64;
    const float position = static_cast<float>(positions[grid_x]) * rotation[1];
    for (int i = 0; i < HALF; ++i) {{
      const float share = static_cast<float>(32 * i + lane) / static_cast<float>(32 * HALF);
      const float angle = position * exp2(-share * rotation[0]);
      const float a = value[i];
      const float b = value[i + HALF];
      value[i] = a * cos(angle) - b * sin(angle);
      value[i + HALF] = a * sin(angle) + b * cos(angle);
    }}
    for (int i = 0; i < DIM / 32; ++i) {{
      to[32 * i + lane] = static_cast<InT>(value[i]);
    }}
"""


class NormShape(NamedTuple):
    """What a kernel is compiled for; sizes that an operation does not use are 0."""

    dim: int  # dimension of the norm
    eps: float
    heads: int = 0  # heads of a token, or of its queries
    keys: int = 0  # KV heads of a token
    rotated: int = 0  # dimensions that RoPE rotates
    base: float = 0.0  # of RoPE
    scale: float = 1.0  # RoPE's factor of positions
    ratio: int = 0  # value heads per key head
    chosen: int = 0  # experts of a token that are added up


class FusedNorm(gpu.Operation):
    """A norm fused with the operations around it, or attention's gate.

    Takes a shape, and operands, the first [N, ..].

    If the shape has heads, a warp computes a head of a token; else a threadgroup computes a token.
    """

    def __init__(
        self,
        name: str,
        inputs: list[str],
        outputs: list[str],
        body: str,
        portable: Callable[..., list[mx.array]],
        sizes: Callable[[NormShape, int], tuple[Sizes, Sizes]],  # shapes of inputs and outputs by N
    ) -> None:
        super().__init__(
            f"{name.replace('_', ' ')} kernel / mlx",
            name,
            self._error,
            self._applies,
            self.by_kernel,
            portable,
            self._random_arguments,
        )
        self.inputs, self.portable, self.sizes = inputs, portable, sizes
        names = [*inputs, *(["rotation"] if "rotation" in body else [])]
        self._views = [name for name in inputs if f"{name.upper()}_AT" in body]
        own = self._views
        self.kernel = gpu.Kernel(name, names, outputs, body, contiguous=bool(own), columns=own)

    def __call__(self, shape: NormShape, *inputs: Operand) -> list[mx.array]:
        if self.works(shape, inputs[1].dtype):  # A mixture's x can be a float32 sum.
            return self.by_kernel(shape, *inputs)
        return self.portable(shape, *map(to_array, inputs))

    def by_kernel(self, shape: NormShape, *inputs: Operand) -> list[mx.array]:
        """Returns the kernel's outputs."""
        rows, dtype, heads = inputs[0].shape[0], inputs[1].dtype, shape.heads + 2 * shape.keys
        most = _MOST_WARPS if gpu.few(rows) else _PROMPT_WARPS
        warps = heads or min(most, shape.dim // 32)
        template: dict[str, Any] = {"InT": dtype}
        template |= {n.upper(): v for n, v in shape._asdict().items() if isinstance(v, int)}
        template |= {"INVERSE_EPS": round(1 / shape.eps), "WARPS": warps}
        views = dict(zip(self.inputs, map(View.of, inputs), strict=True))
        for name in self._views:
            template |= views[name].constants(name.upper())
        more = [_rotation(shape.base, shape.scale)] if shape.rotated else []
        return self.kernel(
            [*(view.array for view in views.values()), *more],
            template,
            (rows, warps, 1),
            [(size, dtype) for size in self.sizes(shape, rows)[1]],
            _HEADS_AT_ONCE if heads else warps,
        )

    def _random_arguments(self, shape: NormShape, dtype: mx.Dtype, rows: int) -> list[Any]:
        random, arguments = np.random.default_rng(0), list[Any]([shape])
        for name, size in zip(self.inputs, self.sizes(shape, rows)[0], strict=True):
            array = mx.array(random.standard_normal(size, dtype=np.float32))
            if name == "positions":
                array = mx.array(np.resize([0, 7, 3000], rows), dtype=mx.int32)
            elif name == "pairs":
                array = array.view(mx.int32)
            elif name != "weights":
                array = array.astype(dtype)
            arguments.append(array)
        return arguments

    def _applies(self, shape: NormShape, _: mx.Dtype) -> bool:
        return shape.dim % gpu.LANES == 0 and shape.rotated % (2 * gpu.LANES) == 0

    def _error(self, shape: NormShape, dtype: mx.Dtype) -> float:
        def exact(_: NormShape, *inputs: mx.array) -> Any:
            inputs32 = [a.astype(mx.float32) if a.dtype == dtype else a for a in inputs]
            return self.portable(shape, *inputs32)

        differences = []
        with gpu.decode_pass(False):
            for rows in _CHECKED_ROWS:
                arguments = self._random_arguments(shape, dtype, rows)
                differences.append(
                    self_check.largest_difference(
                        lambda run: run(*arguments),  # noqa: B023
                        self.by_kernel,
                        exact,
                    )
                )
        return float(np.max(differences))


def _gated_norm(shape: NormShape, z: mx.array, x: mx.array, weight: mx.array) -> list[mx.array]:
    normed = mx.fast.rms_norm(x, weight, shape.eps).astype(mx.float32)
    gated = normed * nn.silu(z.astype(mx.float32)).reshape(x.shape)
    return [gated.astype(x.dtype).reshape(len(z), -1)]


def _gate(_: NormShape, x: mx.array, gate: mx.array) -> list[mx.array]:
    return [(x * mx.sigmoid(gate)).flatten(1)]


def _rotate(
    shape: NormShape,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    q_weight: mx.array,
    k_weight: mx.array,
    positions: mx.array,  # int32 [N]
) -> list[mx.array]:
    pairs = (q, q_weight), (k, k_weight)
    normed = (mx.fast.rms_norm(x, weight, shape.eps)[:, :, None] for x, weight in pairs)
    turn = functools.partial(
        mx.fast.rope, dims=shape.rotated, traditional=False, base=shape.base, scale=shape.scale
    )
    queries, keys = (turn(x, offset=positions).squeeze(2) for x in normed)
    return [queries, mx.stack([keys, v], axis=1)]


@functools.cache
def _rotation(base: float, scale: float) -> mx.array:
    rotation = mx.array([math.log2(base), scale], dtype=mx.float32)
    mx.eval(rotation)
    return rotation


GATED_NORM = FusedNorm(
    "gated_norm",
    ["z", "x", "weight"],
    ["y"],
    _GATED,
    _gated_norm,
    lambda s, n: (
        [(n, s.heads // s.ratio, s.ratio, s.dim), (n, s.heads, s.dim), (s.dim,)],
        [(n, s.heads * s.dim)],
    ),
)
GATE = FusedNorm(
    "gate",
    ["x", "gate"],
    ["y"],
    _GATE,
    _gate,
    lambda s, n: ([(n, s.heads, s.dim)] * 2, [(n, s.heads * s.dim)]),
)
ROTATE = FusedNorm(
    "norm_rotate",
    ["q", "k", "v", "q_weight", "k_weight", "positions"],
    ["queries", "entries"],
    _ROTATE,
    _rotate,
    lambda s, n: (
        [(n, s.heads, s.dim), *[(n, s.keys, s.dim)] * 2, (s.dim,), (s.dim,), (n,)],
        [(n, s.heads or 1, s.dim), (n, 2, s.keys or 1, s.dim)],
    ),
)


def rotate(
    shape: NormShape,
    queries: Operand | None,
    entries: Sequence[Operand],  # keys and values, or nothing
    q_weight: mx.array,
    k_weight: mx.array,
    positions: mx.array,
) -> list[mx.array]:
    """Run `ROTATE` by its kernel; the result for absent queries or entries is meaningless."""
    if queries is None:
        shape = shape._replace(heads=0)
    if not entries:
        shape = shape._replace(keys=0)
    q = entries[0] if queries is None else queries
    k, v = entries or (q, q)
    return ROTATE.by_kernel(shape, q, k, v, q_weight, k_weight, positions)
