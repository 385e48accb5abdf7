"""The backend: which installations are refused, with which advice, and which BLAS is loaded."""

import os
import platform
import shutil
import subprocess
import sys

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
        assert prepare()[:3] == (device, blas, "0.32")


@pytest.mark.parametrize(
    ("system", "path", "given", "changed"),
    [
        ("Linux", "/lib/mi.so.3", {}, {"LD_PRELOAD": "/lib/mi.so.3"}),
        ("Linux", "/lib/mi.so.3", {"LD_PRELOAD": "a.so"}, {"LD_PRELOAD": "a.so:/lib/mi.so.3"}),
        ("Linux", "/lib/mi.so.3", {"LD_PRELOAD": "libtcmalloc.so.4"}, {}),
        ("Linux", "/lib/mi.so.3", {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, {}),
        ("Linux", None, {}, {}),
        ("Darwin", "/lib/mi.so.3", {}, {}),
    ],
)
def test_a_program_on_linux_begins_again_with_a_faster_malloc(
    monkeypatch, system, path, given, changed
):
    started, environ = [], dict(given)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(backend, "_mimalloc", lambda: path)
    monkeypatch.setattr(os, "execve", lambda *command: started.append(command[2]))
    backend.use_fast_malloc(environ)
    assert len(started) == bool(changed) and environ == given
    if started:
        (again,) = started
        assert again.items() >= (given | changed).items()
        backend.use_fast_malloc(again)
        assert len(started) == 1, "not twice, also where the variable has no effect"
        assert again == given, "for the processes that it starts"
        backend.use_fast_malloc(given | {backend._BEFORE: "1:/other.so"})  # another process's
        assert len(started) == 2 and started[1].items() >= changed.items()


def test_a_program_that_cannot_begin_again_runs_with_the_malloc_that_it_has(monkeypatch):
    def refuse(*_):
        raise OSError("Argument list too long")

    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(backend, "_mimalloc", lambda: "/lib/mi.so.3")
    monkeypatch.setattr(os, "execve", refuse)
    environ = {"LD_PRELOAD": "a.so"}
    backend.use_fast_malloc(environ)
    assert environ == {"LD_PRELOAD": "a.so"}


@pytest.mark.skipif(platform.system() != "Linux", reason="LD_PRELOAD is Linux's")
@pytest.mark.parametrize("folder", ["packages", "a folder:of packages"])
def test_the_program_keeps_its_arguments_and_its_process(tmp_path, folder):
    info = tmp_path / folder / "cmeel_mimalloc-3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cmeel-mimalloc\nVersion: 3\n")
    library = tmp_path / folder / "cmeel.prefix" / "lib" / "libmimalloc.so.3"
    library.parent.mkdir(parents=True)
    library.symlink_to(backend._mimalloc())
    program = tmp_path / "mlx-mtp"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\nsys.path.insert(0, {str(tmp_path / folder)!r})\n"
        "print('begun', os.getpid(), sys.argv[1:], flush=True)\n"
        "from mlx_mtp import backend, safe_path\n"
        "safe_path.drop_current_directory()\n"
        "before = os.environ.get('LD_PRELOAD')\nbackend.use_fast_malloc()\n"
        "print(before, os.environ.get('LD_PRELOAD'), sys.stdin.read(), backend.prepare().malloc)\n"
        "print(open('/proc/self/comm').read())\n"
    )
    program.chmod(0o755)
    names = os.environ.keys() - {"GLIBC_TUNABLES", "LD_PRELOAD", "PYTHONSAFEPATH"}
    process = subprocess.run(
        [str(program), "a b", "-x"],
        cwd=tmp_path,
        env={name: os.environ[name] for name in names},
        input="typed",
        capture_output=True,
        text=True,
        check=True,
    )
    *begun, last, name, _ = process.stdout.splitlines()
    can_be_named = folder == "packages"  # LD_PRELOAD has no way to quote a space
    assert len(begun) == 1 + can_be_named and len({*begun}) == 1
    assert begun[0].endswith("['a b', '-x']")
    assert last == (f"{library} None typed mimalloc" if can_be_named else "None None typed ")
    assert name == "mlx-mtp", "for pgrep and killall"
    assert not process.stderr


def test_a_program_that_imports_this_one_does_not_begin_again():
    assert run("print('begun'); import mlx_mtp.__main__", LD_PRELOAD="").stdout == "begun\n"


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
