"""GEMMs of few rows, where a row's result has the same bits whatever the other rows are.

mlx's own operations read the weights once per row on CUDA, for up to 7 rows, and on Metal for
affine formats on M1 and M2; elsewhere on Metal `qmv_wide` (since 0.32.0) reads them once for every
five rows, up to 12. `cuda.skinny_gemm` and `metal.skinny_gemm` share these arguments and the
beginning of their sources; `models.gemm` decides when a model is loaded which layers run them.
"""

from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.kernels.formats import Weight

# Part p of feature f has line `base + p * up + f` of the weights: in plain products ...
_PLAIN = """
    const int N = w_shape[0] / PARTS;
    const int base = 0, up = N;
"""
# ... and for experts: first their part 0, then their part 1, then both parts of the shared one,
# whose number follows the last expert's.
_OF_EXPERTS = """
    const int N = w_shape[1], E = w_shape[0] / PARTS - SHARED;
    const auto experts = pairs, order = pairs + pairs_shape[1];
"""
_EXPERT = """
    const int base = (expert < E ? expert : PARTS * E) * N;
    const int up = (expert < E ? E : 1) * N;
"""


class SkinnyGemm(NamedTuple):
    """A product of x [S, K] with transposed weights [N, K].

    With two parts the weights are [2 N, K], gate then up, and the result is silu(gate) * up. With
    P (token, expert) pairs they are [parts * E, N, K], part 0 of all E experts first. A shared
    expert's parts follow these; its number is E. The result is then [P, N], and P / S consecutive
    pairs share a row of x.
    """

    x: mx.array
    weight: Weight
    parts: int = 1
    # Int32 [2 or more, P]: the pairs' experts, ascending, and the index of each of these pairs.
    pairs: mx.array | None = None
    shared: bool = False
    # A row must have the same bits for all numbers of rows, not only within a band. On CUDA, and
    # for pairs, this is always so.
    one_order: bool = False

    @property
    def of_experts(self) -> bool:
        return self.pairs is not None

    @property
    def rows(self) -> int:
        """Number of rows of the result: rows of x, or pairs."""
        return len(self.x) if self.pairs is None else self.pairs.shape[1]

    @property
    def outputs(self) -> int:
        """Number of columns of the result."""
        return self.weight.codes.shape[-2] // (1 if self.of_experts else self.parts)

    @property
    def input_arrays(self) -> list[mx.array]:
        """The input arrays of a kernel, in the order of `input_names`."""
        return [self.x, *self.weight[:3], *([] if self.pairs is None else [self.pairs])]

    @property
    def constants(self) -> dict[str, int]:
        """The constants of `prologue`, and for experts PAIRS, which share a row of x."""
        pairs = {"PAIRS": self.rows // len(self.x), "SHARED": self.shared}
        return {"PARTS": self.parts, **(pairs if self.of_experts else {})}


def input_names(of_experts: bool) -> list[str]:
    """Returns the names of a kernel's inputs."""
    return ["x", "w", "s", "b", *(["pairs"] if of_experts else [])]


def prologue(rows: str, of_experts: bool) -> str:
    """Returns the beginning of a source: N, and the `rows` of x, where EXPERT is the place for
    the lines of the `expert`.
    """
    return (_OF_EXPERTS if of_experts else _PLAIN) + rows.replace("EXPERT", _EXPERT)
