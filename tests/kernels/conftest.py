"""A GPU that is emulated on the CPU."""

import functools

import mlx.core as mx
import pytest

from mlx_mtp.kernels import attention_plan, gated_delta, gpu, norms, short_conv, topk
from mlx_mtp.kernels.cuda import (
    decode_attention,
    dequantize,
    flash_attention,
    gated_delta_chunks,
    gated_delta_prepare,
    grouped_gemm,
    mma,
    skinny_gemm,
)
from mlx_mtp.kernels.metal import skinny_gemm as metal_gemm
from tests.kernels.emulator import WHY_NOT, EmulatedKernel
from tests.kernels.matrix_units import MATRIX_UNITS, WARPGROUP
from tests.kernels.metal_source import MetalKernel


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Compiled sources, by what was asked of mlx."""
    folder = tmp_path_factory.mktemp("kernels")
    kept = {}

    def make(kind=EmulatedKernel, **asked):
        key = kind, repr(asked)
        return kept.setdefault(key, kind(folder, **asked))

    return make


@pytest.fixture(autouse=True)
def orders(request, monkeypatch):
    """It takes as long again, so the quick suite does it where pairs are shared out alone."""
    is_quick = request.config.option.markexpr == "not full"
    both = not is_quick or request.module.__name__.endswith("few_rows_metal")
    monkeypatch.setattr(EmulatedKernel, "both_orders", both)


# The bodies are the same for both; a compiler's run for each shape and type takes its time.
@pytest.fixture(params=["cuda", pytest.param("metal", marks=pytest.mark.full)])
def emulated(request, monkeypatch, compiled):
    """Everything that asks for a GPU finds this one."""
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    monkeypatch.setattr(gpu, "backend", lambda: request.param)
    monkeypatch.setattr(gpu, "shared_memory", lambda: 227 << 10)
    make = functools.partial(compiled, MetalKernel)
    monkeypatch.setattr(mx.fast, f"{request.param}_kernel", make)
    monkeypatch.setattr(mx, "compile", lambda function: function)
    kernels = [module.KERNEL for module in (gated_delta, short_conv, topk)]
    for kernel in [*kernels, *(each.kernel for each in norms.OPERATIONS)]:
        monkeypatch.setattr(kernel, "_built", {})
        monkeypatch.setattr(kernel, "_works", {})
    metal_gemm._kernel.cache_clear()
    yield request.param
    metal_gemm._kernel.cache_clear()


@pytest.fixture
def matrix_units(monkeypatch, compiled):
    """The kernels for CUDA alone find it, and its matrix units."""
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    for module in (decode_attention, skinny_gemm, flash_attention, gpu):
        monkeypatch.setattr(module, "backend", lambda: "cuda")
    monkeypatch.setattr(mma, "CUDA", MATRIX_UNITS)
    monkeypatch.setattr(mma, "wgmma", lambda *_: WARPGROUP + mma.MATRIX)
    monkeypatch.setattr(flash_attention, "hopper", lambda: True)
    monkeypatch.setattr(gpu, "shared_memory", lambda: 227 << 10)
    for kernel in (
        grouped_gemm._ARRANGE,
        grouped_gemm._ORDER,
        dequantize.KERNEL,
        gated_delta.KERNEL,
    ):
        monkeypatch.setattr(kernel, "_built", {})
    monkeypatch.setattr(decode_attention, "STREAM", "")
    monkeypatch.setattr(mx.fast, "cuda_kernel", compiled, raising=False)
    monkeypatch.setattr(mx, "compile", lambda function: function)
    of_attention = (
        decode_attention._kernel,
        decode_attention._works,
        decode_attention._launchers,
        attention_plan.plan,
    )
    of_chunks = gated_delta_prepare.kernel, gated_delta_chunks._works
    of_prompts = flash_attention._kernel, flash_attention._works, *of_chunks
    cached = (gpu.launcher, skinny_gemm._kernel, grouped_gemm._kernel, *of_attention, *of_prompts)
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


@pytest.fixture
def spoil(monkeypatch):
    """Puts something wrong in place of a part of a kernel's source, an attribute of its owner."""

    def replace(owner, name, right, wrong, count=-1):
        source = getattr(owner, name)
        assert right in source
        monkeypatch.setattr(owner, name, source.replace(right, wrong, count))

    return replace
