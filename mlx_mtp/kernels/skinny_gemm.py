"""GEMMs of few rows, where a row's result has the same bits whatever the other rows are.

mlx's own operations read the weights once per row on CUDA, for up to 7 rows, and on Metal for
affine formats on M1 and M2; elsewhere on Metal `qmv_wide` (since 0.32.0) reads them once for every
five rows, up to 12. `cuda.skinny_gemm` and `metal.skinny_gemm` share these arguments and the
beginning of their sources; `models.gemm` decides when a model is loaded which layers run them.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.kernels.formats import Weight

_GATE_AND_UP = "    w_up = w1; s_up = s1; b_up = b1;\n"
_PAIRS = "    const auto experts = pairs; const auto order = pairs + pairs_shape[1];\n"
# The shared expert has its own weights; its number follows the last expert's.
_SHARED = """
    if (expert == w0_shape[0]) {
      base = 0;
      w_at = wI; s_at = sI; b_at = bI;
      w_up = wL; s_up = sL; b_up = bL;
    }
"""


class SkinnyGemm(NamedTuple):
    """Products of x [S, K] with transposed weights [N, K] of one format.

    With one part each weight has a result [S, N]. With two parts the weights are gate and up of
    one result, silu(gate) * up. With P (token, expert) pairs the weights are those of all experts
    [E, N, K], one for each part, then those of the shared expert E, [N, K], if it takes part. The
    result is then [P, N], and P / S consecutive pairs share a row of x.
    """

    x: mx.array
    weights: Sequence[Weight]
    parts: int = 1
    # Int32 [2 or more, P]: the pairs' experts, ascending, and the index of each of these pairs.
    pairs: mx.array | None = None
    # A row must have the same bits for all numbers of rows, not only within a band. On CUDA, and
    # for pairs, this is always so.
    one_order: bool = False

    @property
    def of_experts(self) -> bool:
        return self.pairs is not None

    @property
    def rows(self) -> int:
        """Number of rows of each result: rows of x, or pairs."""
        return len(self.x) if self.pairs is None else self.pairs.shape[1]

    @property
    def outputs(self) -> list[int]:
        """Number of columns of each result."""
        weights = self.weights[:1] if self.of_experts else self.weights[:: self.parts]
        return [weight.codes.shape[-2] for weight in weights]

    @property
    def input_arrays(self) -> list[mx.array]:
        """The input arrays of a kernel, in the order of `input_names`."""
        arrays = itertools.chain(*(weight[:3] for weight in self.weights))
        return [self.x, *arrays, *([] if self.pairs is None else [self.pairs])]


def input_names(count: int, of_experts: bool) -> list[str]:
    """Returns the names of the inputs of a kernel for `count` weights."""
    weights = (f"{name}{number}" for number in range(count) for name in "wsb")
    return ["x", *weights, *(["pairs"] if of_experts else [])]


def prologue(start: str, rows: str, count: int, parts: int, of_experts: bool) -> str:
    """Returns the beginning of a source: it selects a block's weights, then its rows of x."""
    source = start.replace("AXIS", "01"[of_experts]) + (_GATE_AND_UP if parts == 2 else "")
    source += (_PAIRS if of_experts else "") + rows
    if of_experts and count > parts:
        source += _SHARED.replace("I", str(parts)).replace("L", str(count - 1))
    return source
