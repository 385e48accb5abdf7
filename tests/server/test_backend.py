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
    assert ("apt install libjemalloc2" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("installed", "can_load", "given", "changed"),
    [
        ("mlx-cuda-13", True, {}, {"LD_PRELOAD": "libjemalloc.so.2"}),
        ("mlx-cuda-12", True, {"LD_PRELOAD": "a.so"}, {"LD_PRELOAD": "a.so:libjemalloc.so.2"}),
        ("mlx-cuda-13", True, {"LD_PRELOAD": "libtcmalloc.so.4"}, {}),
        ("mlx-cuda-13", False, {}, {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=20000"}),
        ("mlx-cuda-13", False, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, {}),
        ("mlx-cpu", True, {}, {}),
    ],
)
def test_a_program_on_cuda_begins_again_with_a_faster_malloc(
    monkeypatch, installed, can_load, given, changed
):
    started, environ = [], dict(given)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(backend, "_installed_version", lambda name: "1" * (name == installed))
    monkeypatch.setattr(backend, "_can_load", lambda _: can_load)
    monkeypatch.setattr(os, "execv", lambda *command: started.append(command))
    backend.use_fast_malloc(environ)
    assert len(started) == bool(changed)
    assert environ.items() >= (given | changed).items()
    if started:
        backend.use_fast_malloc(environ)
        assert len(started) == 1, "not twice, also where the variable has no effect"
        assert environ == given, "for the processes that it starts"


@pytest.mark.skipif(platform.system() != "Linux", reason="CUDA is on Linux")
def test_the_program_keeps_its_arguments_and_its_process(tmp_path):
    info = tmp_path / "packages" / "mlx_cuda_13-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-cuda-13\nVersion: 1\n")
    (tmp_path / "program.py").write_text(
        "import os, sys\nprint('begun', os.getpid(), sys.argv[1:], flush=True)\n"
        "from mlx_mtp import backend, safe_path\n"
        "safe_path.drop_current_directory()\nbackend._can_load = lambda _: False\n"
        "before = os.environ.get('GLIBC_TUNABLES')\nbackend.use_fast_malloc()\n"
        "print(before, os.environ.get('GLIBC_TUNABLES'), sys.stdin.read())\n"
    )
    names = os.environ.keys() - {"GLIBC_TUNABLES", "LD_PRELOAD", "PYTHONSAFEPATH"}
    process = subprocess.run(
        [sys.executable, "-m", "program", "a b", "-x"],  # in the current directory
        cwd=tmp_path,
        env={name: os.environ[name] for name in names} | {"PYTHONPATH": str(info.parent)},
        input="typed",
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, last = process.stdout.splitlines()
    assert first == second and first.endswith("['a b', '-x']")
    assert last == "glibc.malloc.tcache_count=20000 None typed"


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
