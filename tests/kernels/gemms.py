"""The skinny GEMMs as functions."""

import mlx.core as mx

from mlx_mtp.kernels.skinny_gemm import SkinnyGemm
from mlx_mtp.models.gemm.routes import skinny_kernel


def products(x, weights):
    return skinny_kernel().run_kernel(SkinnyGemm(x, weights))


def gate_and_up(x, gate, up):
    return skinny_kernel().run_kernel(SkinnyGemm(x, [gate, up], 2))[0]


def experts(x, weights, shared, chosen, order):
    gemm = SkinnyGemm(x, [*weights, *shared], len(weights), mx.stack([chosen, order]))
    return skinny_kernel().run_kernel(gemm)[0]
