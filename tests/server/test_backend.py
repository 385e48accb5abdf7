"""The backend: which installations are refused, with which advice, and which BLAS is loaded."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mlx_mtp import backend
from mlx_mtp.errors import BackendError

ON_LINUX_CPU = platform.system() == "Linux" and backend._installed_version("mlx-cpu") is not None


@pytest.mark.parametrize(
    ("system", "installed", "device", "words"),
    [
        ("Linux", ("mlx", "mlx-cpu"), "CPU", []),
        ("Linux", ("mlx", "mlx-cuda-12"), "CUDA", []),
        ("Darwin", ("mlx",), "Metal", []),
        ("Linux", ("mlx",), None, ["no backend", "has no NVIDIA", "'mlx-mtp[cpu]'", "'.[cpu]'"]),
        ("Linux", ("nvidia-smi",), None, ["not installed", "has an NVIDIA", "'mlx-mtp[cuda]'"]),
        ("Darwin", (), None, ["not installed", "Apple silicon", "pip install mlx-mtp"]),
        ("Linux", ("mlx", "mlx-cpu", "mlx-cuda-13"), None, ["overwrites", "mlx-cuda-13", "Unin"]),
    ],
)
def test_one_backend_is_found_and_none_and_two_are_refused_with_advice(
    monkeypatch, system, installed, device, words
):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(
        backend, "_installed_version", lambda name: "0.32" if name in installed else None
    )
    monkeypatch.setattr(shutil, "which", lambda name: name if name in installed else None)
    monkeypatch.setattr(backend, "_fast_blas", lambda: "some BLAS")
    prepare = backend.prepare.__wrapped__  # uncached: other tests keep their backend
    if device is None:
        with pytest.raises(BackendError) as caught:
            prepare()
        assert all(word in str(caught.value) for word in words)
    else:
        blas = "some BLAS" if device == "CPU" else ""
        assert prepare() == backend.BackendInfo(device, blas, "0.32")


@pytest.mark.parametrize(
    ("device", "symbol", "is_told"),
    [
        ("CUDA", "", True),
        ("CUDA", "mallctl", False),
        ("CUDA", "tc_malloc", False),
        ("CPU", "", False),
    ],
)
def test_jemalloc_is_recommended_beside_a_gpu(monkeypatch, caplog, device, symbol, is_told):
    monkeypatch.setattr(backend, "_device", lambda: device)
    monkeypatch.setattr(backend, "_fast_blas", lambda: "")
    monkeypatch.setattr(
        ctypes, "CDLL", lambda _: SimpleNamespace(**{symbol: None} if symbol else {})
    )
    with caplog.at_level("INFO", "mlx_mtp"):
        backend.prepare.__wrapped__()
    assert ("LD_PRELOAD=libjemalloc.so.2" in caplog.text) == is_told


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, as loaded libraries stay loaded."""
    env = os.environ | dict.fromkeys(backend._BLAS_THREADS, "") | environ
    argv = [sys.executable, "-c", code]
    return subprocess.run(argv, capture_output=True, text=True, check=True, env=env)


@pytest.mark.skipif(not ON_LINUX_CPU, reason="only there another BLAS is needed")
def test_mlx_gets_openblas_and_leaves_a_core():
    code = """
import ctypes, os, sys
from mlx_mtp import backend
info = backend.prepare()
assert backend.prepare() is info
assert "mlx.core" not in sys.modules
assert info.blas.startswith("OpenBLAS"), info
import mlx.core as mx
assert mx.allclose(mx.eye(64) @ mx.ones((64, 64)), mx.ones((64, 64))).item()
# Where the name that mlx calls leads to, in this process's global scope:
address = ctypes.cast(ctypes.CDLL(None).cblas_sgemm, ctypes.c_void_p).value
for line in open("/proc/self/maps"):
    low, high = (int(part, 16) for part in line.split()[0].split("-"))
    assert not low <= address < high or "openblas" in line, line
print(ctypes.CDLL(None).openblas_get_num_threads())
"""
    cores = len(os.sched_getaffinity(0))
    most = int(run(code, OPENBLAS_NUM_THREADS=str(cores)).stdout)
    assert int(run(code).stdout) == max(most - 1, 1)
    assert int(run(code, OMP_NUM_THREADS="2").stdout) == min(most, 2)
