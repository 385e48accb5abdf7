"""What the skinny GEMMs of CUDA and Metal share: their arguments, and how their sources begin."""

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
    """Products of x [S, K] with weights [N, K], and what is done with them.

    With one part each weight has a result. With two they are gate and up of one result. With pairs
    of token and expert the weights are those of all experts [E, N, K], then those of the shared
    expert, if it takes part.
    """

    x: mx.array
    weights: Sequence[Weight]
    parts: int = 1
    pairs: Sequence[mx.array] = ()  # see `skinny_gemm.experts`

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
    def inputs(self) -> list[mx.array]:
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
