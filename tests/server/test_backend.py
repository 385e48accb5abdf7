"""The backend: which installations are refused with what advice, and which BLAS is loaded."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_mtp import backend
from mlx_mtp.errors import BackendError

ON_LINUX_CPU = platform.system() == "Linux" and backend._version("mlx-cpu") is not None
on_linux_cpu = pytest.mark.skipif(not ON_LINUX_CPU, reason="only there another BLAS is needed")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    backend.prepare.cache_clear()
    yield
    backend.prepare.cache_clear()


@pytest.mark.parametrize(
    ("system", "installed", "device", "words"),
    [
        ("Linux", ("mlx", "mlx-cpu"), "CPU", []),
        ("Linux", ("mlx", "mlx-cuda-13"), "CUDA", []),
        ("Linux", ("mlx", "mlx-cuda-12"), "CUDA", []),
        ("Darwin", ("mlx",), "Metal", []),
        ("Linux", ("mlx",), None, ["no backend", ".[cpu]", ".[cuda]", "never both"]),
        ("Linux", (), None, ["not installed", ".[cpu]"]),
        ("Darwin", (), None, ["not installed", "Apple silicon", "pip install ."]),
        ("Linux", ("mlx", "mlx-cpu", "mlx-cuda-13"), None, ["overwrites", "mlx-cuda-13", "Unin"]),
    ],
)
def test_one_backend_is_found_and_none_and_two_are_refused_with_advice(
    monkeypatch: pytest.MonkeyPatch,
    system: str,
    installed: tuple[str, ...],
    device: str | None,
    words: list[str],
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(backend, "_version", lambda name: "0.32" if name in installed else None)
    monkeypatch.setattr(backend, "_fast_blas", lambda: "some BLAS")
    if device is None:
        with pytest.raises(BackendError) as caught:
            backend.prepare()
        assert all(word in str(caught.value) for word in words)
    else:
        info = backend.prepare()
        assert (info.device, info.blas) == (device, "some BLAS" if device == "CPU" else "")
        assert f"mlx 0.32 on {device}" in str(info)


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own: what is loaded here stays loaded."""
    argv = [sys.executable, "-c", code]
    env = os.environ | environ
    return subprocess.run(argv, capture_output=True, text=True, check=True, env=env)


@on_linux_cpu
def test_mlx_gets_openblas() -> None:
    code = """
import ctypes, sys
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
    if low <= address < high:
        print(line.split()[-1])
"""
    assert "openblas" in run(code).stdout


@on_linux_cpu
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is no core to be left")
def test_one_core_is_left_to_the_thread_that_builds_the_steps() -> None:
    code = """
import ctypes
from mlx_mtp import backend
backend.prepare()
print(ctypes.CDLL(None).openblas_get_num_threads())
"""
    unset = dict.fromkeys(backend._BLAS_THREADS, "")

    def threads(**environ: str) -> int:
        return int(run(code, **unset | environ).stdout)

    cores = len(os.sched_getaffinity(0))
    assert threads() == max(threads(OPENBLAS_NUM_THREADS=str(cores)) - 1, 1)
    assert threads(OMP_NUM_THREADS="2") == 2


@on_linux_cpu
def test_coming_after_mlx_is_told() -> None:
    code = """
import logging, mlx.core
logging.basicConfig()
from mlx_mtp import backend
print(backend.prepare().blas)
"""
    result = run(code)
    assert "reference" in result.stdout
    assert "before backend.prepare()" in result.stderr


def fails(error: Exception) -> Any:
    def source() -> Any:
        raise error

    return source


def test_the_sources_are_tried_in_their_order(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # As if neither mlx nor OpenBLAS had been loaded.
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    for name in ("_system", "_ngsolve", "_cmeel"):
        monkeypatch.setattr(backend, name, lambda name=name: (object(), name))
    assert backend._fast_blas() == "OpenBLAS (_system)"
    monkeypatch.setattr(backend, "_system", fails(OSError("no such library")))
    assert backend._fast_blas() == "OpenBLAS (_ngsolve)"
    monkeypatch.setattr(backend, "_ngsolve", fails(LookupError("no such package")))
    assert backend._fast_blas() == "OpenBLAS (_cmeel)"
    monkeypatch.setattr(backend, "_cmeel", fails(OSError("no")))
    with caplog.at_level(logging.WARNING):
        assert "slow" in backend._fast_blas()
    assert "libopenblas0" in caplog.text


def test_the_links_are_gone_after_loading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blas = "ngsolve_openblas/libopenblasp-r0.so"
    bundled = [f"mlx_cpu.libs/{name}" for name in ("libgfortran-1.so.5.0.0", "libquadmath-2.so.0")]
    for name in (blas, "mlx/core.so", *bundled):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    seen: dict[str, str] = {}

    def load(path: str) -> object:
        seen["path"] = path
        seen.update((link.name, str(link.resolve())) for link in Path(path).parent.iterdir())
        return object()

    monkeypatch.setattr(backend, "_package_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(backend, "_load", load)
    assert backend._ngsolve()[1] == "ngsolve-openblas"
    assert seen["libopenblas.so.0"].endswith("libopenblasp-r0.so")
    assert seen["libgfortran.so.5"].endswith("libgfortran-1.so.5.0.0")
    assert seen["libquadmath-2.so.0"].endswith("libquadmath-2.so.0")
    assert not Path(seen["path"]).parent.exists()
