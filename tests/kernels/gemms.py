"""The skinny GEMMs as functions of separate weights."""

import mlx.core as mx

from mlx_mtp.kernels.formats import Weight
from mlx_mtp.kernels.skinny_gemm import SkinnyGemm
from mlx_mtp.models.gemm.routes import skinny_kernel


def stacked(weights):
    arrays = zip(*(weight[:3] for weight in weights), strict=True)
    return Weight(*map(mx.concatenate, arrays), weights[0].form)


def products(x, weights):
    y = skinny_kernel().run_kernel(SkinnyGemm(x, stacked(weights)))
    firsts, first = [], 0
    for weight in weights:
        firsts.append(first := first + len(weight.codes))
    return mx.split(y, firsts[:-1], axis=1)


def gate_and_up(x, gate, up):
    return skinny_kernel().run_kernel(SkinnyGemm(x, stacked([gate, up]), 2))


def experts(x, weights, shared, chosen, order):
    alone = (Weight(*(each[None] for each in weight[:3]), weight.form) for weight in shared)
    pairs = mx.stack([chosen, order])
    gemm = SkinnyGemm(x, stacked([*weights, *alone]), len(weights), pairs, bool(shared))
    return skinny_kernel().run_kernel(gemm)
