"""GEMMs of few rows, where a row's result has the same bits whatever rows are beside it.

mlx's own read the weights once a row on CUDA, up to 7 rows. On Metal they do so too for affine
formats on M1 and M2; elsewhere its `qmv_wide` (since 0.32.0) reads them once for every five rows,
up to 12. `cuda.skinny_gemm` and `metal.skinny_gemm` share these arguments, and how their sources
begin; `models.gemm` decides when a model is loaded which layers run them.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.kernels.formats import Weight

_GATE_AND_UP = "    w_up = w1; s_up = s1; b_up = b1;\n"
# The expert behind the last one, which all tokens share, has weights of its own.
_SHARED = """
    if (expert == w0_shape[0]) {
      base = 0;
      w_at = wI; s_at = sI; b_at = bI;
      w_up = wL; s_up = sL; b_up = bL;
    }
"""


class SkinnyGemm(NamedTuple):
    """Products of x [S, K] with transposes of weights of one format, [N, K].

    With one part each weight has a result [S, N]. With two they are gate and up of one result,
    silu(gate) * up. With P pairs of token and expert the weights are those of all experts
    [E, N, K], one of each part, then those of the shared expert E, [N, K], if it takes part; the
    result is [P, N], and P / S pairs in a row have one row of x.
    """

    x: mx.array
    weights: Sequence[Weight]
    parts: int = 1
    # int32 [P]: the experts of all pairs, ascending, and which pair each of these is; or nothing.
    pairs: Sequence[mx.array] = ()
    # A row has the same bits at all numbers of rows, and not only within a band of them. Products
    # for CUDA and those of pairs always are so.
    one_order: bool = False

    @property
    def rows(self) -> int:
        """Rows of the results: of x, or pairs."""
        return self.pairs[0].size if self.pairs else len(self.x)

    @property
    def outputs(self) -> list[int]:
        """Columns of each result."""
        weights = self.weights[:1] if self.pairs else self.weights[:: self.parts]
        return [weight.codes.shape[-2] for weight in weights]

    @property
    def input_arrays(self) -> list[mx.array]:
        """The arrays that a kernel takes, as `input_names` has them."""
        arrays = itertools.chain(*(weight[:3] for weight in self.weights))
        return [self.x, *arrays, *self.pairs]


def input_names(count: int, of_experts: bool) -> list[str]:
    """Of a kernel for a number of weights."""
    weights = (f"{name}{number}" for number in range(count) for name in "wsb")
    return ["x", *weights, *(["experts", "order"] if of_experts else [])]


def prologue(start: str, rows: str, count: int, parts: int, of_experts: bool) -> str:
    """How a source begins: which weights a block has, then which rows of x."""
    source = start.replace("AXIS", "01"[of_experts]) + (_GATE_AND_UP if parts == 2 else "") + rows
    if of_experts and count > parts:
        source += _SHARED.replace("I", str(parts)).replace("L", str(count - 1))
    return source
