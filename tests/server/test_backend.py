"""The backend: which installations are refused with what advice, and which BLAS is loaded."""

import ctypes
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from mlx_mtp import backend
from mlx_mtp.errors import BackendError

ON_LINUX_CPU = platform.system() == "Linux" and backend._version("mlx-cpu") is not None


@pytest.mark.parametrize(
    ("system", "installed", "device", "words"),
    [
        ("Linux", ("mlx", "mlx-cpu"), "CPU", []),
        ("Linux", ("mlx", "mlx-cuda-12"), "CUDA", []),
        ("Darwin", ("mlx",), "Metal", []),
        ("Linux", ("mlx",), None, ["no backend", ".[cpu]", ".[cuda]", "never both"]),
        ("Linux", (), None, ["not installed", ".[cpu]"]),
        ("Darwin", (), None, ["not installed", "Apple silicon", "pip install ."]),
        ("Linux", ("mlx", "mlx-cpu", "mlx-cuda-13"), None, ["overwrites", "mlx-cuda-13", "Unin"]),
    ],
)
def test_one_backend_is_found_and_none_and_two_are_refused_with_advice(
    monkeypatch, system, installed, device, words
):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(backend, "_version", lambda name: "0.32" if name in installed else None)
    monkeypatch.setattr(backend, "_fast_blas", lambda: "some BLAS")
    prepare = backend.prepare.__wrapped__  # What is prepared stays so for the other tests.
    if device is None:
        with pytest.raises(BackendError) as caught:
            prepare()
        assert all(word in str(caught.value) for word in words)
    else:
        blas = "some BLAS" if device == "CPU" else ""
        assert prepare() == backend.BackendInfo(device, blas, "0.32")


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own: what is loaded here stays loaded."""
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
    assert int(run(code, OMP_NUM_THREADS="2").stdout) == 2


@pytest.mark.skipif(not ON_LINUX_CPU, reason="only there another BLAS is needed")
def test_coming_after_mlx_is_told():
    done = run("import mlx.core; from mlx_mtp import backend; print(backend.prepare().blas)")
    assert "reference" in done.stdout
    assert "before backend.prepare()" in done.stderr


def test_the_sources_are_tried_in_their_order(monkeypatch, caplog):
    # As if neither mlx nor OpenBLAS had been loaded.
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    names = ("_system", "_ngsolve", "_cmeel")
    for name in names:
        monkeypatch.setattr(backend, name, lambda name=name: (object(), name))

    for name, error in zip(names, (OSError("no file"), LookupError("no package"), OSError("no"))):
        assert backend._fast_blas() == f"OpenBLAS ({name})"
        monkeypatch.setattr(backend, name, Mock(__name__=name, side_effect=error))
    with caplog.at_level(logging.WARNING):
        assert "slow" in backend._fast_blas()
    assert "libopenblas0" in caplog.text


def test_the_links_are_gone_after_loading(monkeypatch, tmp_path):
    links = {
        "libopenblas.so.0": "ngsolve_openblas/libopenblasp-r0.so",
        "libgfortran.so.5": "mlx_cpu.libs/libgfortran-1.so.5.0.0",
        "libquadmath-2.so.0": "mlx_cpu.libs/libquadmath-2.so.0",
    }
    for name in (*links.values(), "mlx/core.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    seen = {}

    def load(path: str) -> object:
        seen.update({link: link.resolve() for link in Path(path).parent.iterdir()})
        return object()

    monkeypatch.setattr(backend, "_package_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(backend, "_load", load)
    assert backend._ngsolve()[1] == "ngsolve-openblas"
    found = {link.name: str(target.relative_to(tmp_path)) for link, target in seen.items()}
    assert found == links
    assert not any(link.parent.exists() for link in seen)
