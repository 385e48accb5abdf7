"""A GPU that is emulated on the CPU."""

import functools
import importlib
import pkgutil

import mlx.core as mx
import pytest

from mlx_mtp import kernels
from mlx_mtp.kernels import gpu, norms
from mlx_mtp.kernels.cuda import decode_attention, flash_attention, mma
from mlx_mtp.selftest import timing
from tests.kernels.emulator import WHY_NOT, EmulatedKernel
from tests.kernels.matrix_units import MATRIX_UNITS, WARPGROUP
from tests.kernels.metal_source import MetalKernel

_NAMES = [each.name for each in pkgutil.walk_packages(kernels.__path__, "mlx_mtp.kernels.")]
_NAMES.append("mlx_mtp.models.gemm.routes")  # It keeps compiled calls of kernels.
OBJECTS = [each for name in _NAMES for each in vars(importlib.import_module(name)).values()]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """A function that makes emulated kernels, and compiles each only once."""
    folder = tmp_path_factory.mktemp("kernels")
    kept = {}

    def make(kind=EmulatedKernel, **asked):
        key = kind, repr(asked)
        return kept.setdefault(key, kind(folder, **asked))

    return make


@pytest.fixture(autouse=True)
def orders(request, monkeypatch):
    """Run threadgroups in both orders; the quick suite does so for one module, to save time."""
    is_quick = request.config.option.markexpr == "not full"
    both = not is_quick or request.module.__name__.endswith("skinny_gemm_metal")
    monkeypatch.setattr(EmulatedKernel, "both_orders", both)


@pytest.fixture
def unbuilt(monkeypatch, tmp_path_factory):
    """Resets the package to a state in which no kernel has been built or compared."""
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(gpu, "shared_memory", lambda: 227 << 10)
    monkeypatch.setattr(timing, "_ROUNDS", 1)
    monkeypatch.setattr(
        timing, "_LEAST_SECONDS", 0.0
    )  # of a round: an emulator's times mean nothing
    monkeypatch.setattr(mx, "compile", lambda function: function)
    norm_kernels = [each.kernel for each in OBJECTS if isinstance(each, norms.FusedNorm)]
    for each in [*OBJECTS, *norm_kernels]:
        if isinstance(each, gpu.Kernel):
            monkeypatch.setattr(each, "_built", {})
        if isinstance(each, gpu.Operation):
            monkeypatch.setattr(each, "_works", {})
    forget_kernels()
    yield
    forget_kernels()


def forget_kernels():
    """Make kernels for a backend, a format or a shape be built again from their sources."""
    for each in OBJECTS:
        getattr(each, "cache_clear", lambda: None)()


# Both backends have the same bodies, and compiling them for each shape and type takes time.
@pytest.fixture(params=["cuda", pytest.param("metal", marks=pytest.mark.full)])
def emulated(request, monkeypatch, compiled, unbuilt):
    """Makes all code find the emulated GPU; returns its backend."""
    monkeypatch.setattr(gpu, "backend", lambda: request.param)
    make = functools.partial(compiled, MetalKernel)
    monkeypatch.setattr(mx.fast, f"{request.param}_kernel", make)
    return request.param


@pytest.fixture
def matrix_units(monkeypatch, compiled, unbuilt):
    """Makes kernels that only CUDA has find the emulated GPU, and its matrix units."""
    monkeypatch.setattr(gpu, "backend", lambda: "cuda")
    monkeypatch.setattr(mma, "CUDA", MATRIX_UNITS)
    monkeypatch.setattr(mma, "wgmma", lambda *_: WARPGROUP + mma.MATRIX)
    monkeypatch.setattr(flash_attention, "hopper", lambda: True)
    monkeypatch.setattr(decode_attention, "STREAM", "")
    monkeypatch.setattr(mx.fast, "cuda_kernel", compiled, raising=False)


@pytest.fixture
def spoil(monkeypatch):
    """A function that replaces a part of a kernel's source, an attribute of `owner`, by another."""

    def replace(owner, name, right, wrong, count=-1):
        source = getattr(owner, name)
        assert right in source
        monkeypatch.setattr(owner, name, source.replace(right, wrong, count))

    return replace
