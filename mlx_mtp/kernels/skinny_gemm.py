"""GEMMs of few rows, where a row's result has the same bits whatever rows are beside it.

mlx's own read the weights once a row, up to 7 rows on CUDA and more on Metal: what a verify window
costs there. The kernels are `cuda.skinny_gemm` and `metal.skinny_gemm`; `models.gemm` decides when
a model is loaded which layers run them.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_mtp.kernels import gpu
from mlx_mtp.kernels.cuda import skinny_gemm as cuda_gemm
from mlx_mtp.kernels.formats import Weight
from mlx_mtp.kernels.metal import skinny_gemm as metal_gemm
from mlx_mtp.kernels.skinny_source import SkinnyGemm


def products(x: mx.array, weights: Sequence[Weight]) -> list[mx.array]:
    """x [M, K] times the transpose of each of some weights [N, K] of one format: [M, N] each."""
    return _run(SkinnyGemm(x, weights))


def gate_and_up(x: mx.array, gate: Weight, up: Weight) -> mx.array:
    """silu(x [M, K] times the transpose of gate [N, K]) times that of up: [M, N]."""
    return _run(SkinnyGemm(x, [gate, up], 2))[0]


def experts(
    x: mx.array,  # [S, K]
    weights: Sequence[Weight],  # of all experts, [E, N, K]; of two, as in `gate_and_up`
    shared: Sequence[Weight],  # of expert E, the same without an axis of experts; or none
    chosen: mx.array,  # int32 [P], the experts of all pairs, ascending
    order: mx.array,  # int32 [P], which pair each of these is
) -> mx.array:
    """Each pair's product with its expert, [P, N]; P / S pairs in a row have one row of x."""
    return _run(SkinnyGemm(x, [*weights, *shared], len(weights), (chosen, order)))[0]


def applies(weight: Weight, dtype: mx.Dtype) -> bool:
    """Whether a kernel is made for such a weight, activations, and this backend."""
    return cuda_gemm.applies(weight, dtype) or metal_gemm.applies(weight, dtype)


def bands(weight: Weight) -> dict[int, range]:
    """The numbers of tokens of a decode step that it may serve, each by that to time it with."""
    ranges: dict[int, range] = kernel().bands(weight)
    return ranges


def kernel() -> Any:
    """The module of the kernel for this backend."""
    return metal_gemm if gpu.backend() == "metal" else cuda_gemm


def _run(gemm: SkinnyGemm) -> list[mx.array]:
    results: list[mx.array] = kernel().run_kernel(gemm)
    return results
