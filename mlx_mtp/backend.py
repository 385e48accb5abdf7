"""Prepares mlx before its import: one backend, a fast BLAS and, on Linux, a fast malloc.

mlx's CPU library is linked against the slow reference BLAS. If an OpenBLAS has been loaded earlier
with global symbols, mlx uses OpenBLAS's functions instead.
"""

import contextlib
import ctypes
import functools
import importlib.util
import logging
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, MutableMapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from mlx_mtp.errors import BackendError

logger = logging.getLogger(__name__)

_CUDA_DISTRIBUTIONS = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")
_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_REFERENCE_BLAS = "reference BLAS (slow)"
_SCRIPT = "mlx-mtp"
# Environment variable: the process that changed LD_PRELOAD, and its value before, as in "123:a.so".
_BEFORE = "MLX_MTP_LD_PRELOAD"


class BackendInfo(NamedTuple):
    """The backend that mlx computes on."""

    device: str  # Metal, CUDA or CPU
    blas: str  # the BLAS library; empty unless the device is the CPU
    mlx_version: str
    malloc: str = ""  # the allocator; empty if it is the system's

    def __str__(self) -> str:
        parts = f"mlx {self.mlx_version} on {self.device}", self.blas, self.malloc
        return ", ".join(filter(None, parts))


@functools.lru_cache(maxsize=1)
def prepare() -> BackendInfo:
    """Prepare mlx, once per process, and return its backend.

    Raises BackendError, which says what to install, if mlx has no backend, or two.
    """
    _keep_file_limit()
    device = _device()
    blas = _fast_blas() if device == "CPU" else ""
    malloc = "mimalloc" if hasattr(ctypes.CDLL(None), "mi_version") else ""
    return BackendInfo(device, blas, _installed_version("mlx") or "unknown", malloc)


def use_fast_malloc(environ: MutableMapping[str, str] = os.environ) -> None:
    """On Linux, start this program anew with mimalloc in place of the C library's malloc.

    mlx makes and frees thousands of small objects per step. Only a new program can get another
    malloc: call this before anything else. The process stays the same, with its open files, but
    begins again. Programs that it starts get the environment as it was.
    """
    process, _, before = environ.pop(_BEFORE, "").partition(":")
    if process == str(os.getpid()):  # It has begun again.
        environ.pop("LD_PRELOAD", None)
        if before:
            environ["LD_PRELOAD"] = before
        # Linux names a process after its script, but after Python's file if it begins again.
        if os.path.basename(sys.argv[0]) == _SCRIPT:
            with contextlib.suppress(OSError):
                Path("/proc/self/comm").write_text(_SCRIPT)
        return
    before = environ.get("LD_PRELOAD", "")
    mimalloc = _mimalloc()
    chosen = "malloc" in before + environ.get("GLIBC_TUNABLES", "")
    if mimalloc is None or chosen or platform.system() != "Linux":
        return
    preload = f"{before}:{mimalloc}".lstrip(":")
    changed = {**environ, _BEFORE: f"{os.getpid()}:{before}", "LD_PRELOAD": preload}
    if not sys.flags.safe_path:
        changed.pop("PYTHONSAFEPATH", None)  # See `safe_path`; this program sets it again.
    with contextlib.suppress(OSError):  # The environment is too large, or Python was replaced.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], changed)


def _mimalloc() -> str | None:
    """Returns the path of mimalloc's library, if LD_PRELOAD can name it."""
    try:
        package = metadata.distribution("cmeel-mimalloc")
    except metadata.PackageNotFoundError:
        return None
    path = str(package.locate_file("cmeel.prefix/lib/libmimalloc.so.3"))
    separators = set(": ") & set(path)
    return path if os.path.exists(path) and not separators else None


def _keep_file_limit() -> None:
    """Let mlx-lm raise the limit of open files, but not lower it or fail because of it.

    When it is imported, mlx-lm sets the soft limit to 2,048 and the hard limit to 4,096.
    """
    original = resource.setrlimit

    def raise_limit(which: int, limits: tuple[int, int]) -> None:
        if which != resource.RLIMIT_NOFILE or "mlx_lm.utils" not in sys.modules:
            original(which, limits)
            return
        resource.setrlimit = original
        soft, hard = resource.getrlimit(which)
        infinite = resource.RLIM_INFINITY
        raised = limits[0] if hard == infinite else min(limits[0], hard)
        if soft != infinite and soft < raised:
            with contextlib.suppress(ValueError, OSError):
                original(which, (raised, hard))

    if "mlx_lm.utils" not in sys.modules:
        resource.setrlimit = raise_limit


def _device() -> str:
    if _installed_version("mlx") is None:
        raise BackendError(f"mlx is not installed. {_install_hint()}")
    if platform.system() == "Darwin":
        return "Metal"
    cuda = next((name for name in _CUDA_DISTRIBUTIONS if _installed_version(name)), None)
    cpu = _installed_version("mlx-cpu") is not None
    if cuda and cpu:
        raise BackendError(
            f"both mlx-cpu and {cuda} are installed, and each overwrites the other's library. "
            f"Uninstall mlx, mlx-cpu and {cuda}, and start again. {_install_hint()}"
        )
    if cuda:
        return "CUDA"
    if not cpu:
        raise BackendError(f"mlx has no backend on this machine. {_install_hint()}")
    return "CPU"


def _install_hint() -> str:
    if platform.system() == "Darwin":
        return "On Apple silicon: pip install mlx-mtp (in a clone: pip install .)."
    extra, have = ("cuda", "an") if shutil.which("nvidia-smi") else ("cpu", "no")
    return (
        f"This machine has {have} NVIDIA GPU: pip install 'mlx-mtp[{extra}]' (in a clone: "
        f"'.[{extra}]'). Of the extras cpu and cuda, never install both."
    )


def _installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _fast_blas() -> str:
    process = ctypes.CDLL(None)
    if hasattr(process, "openblas_get_config"):
        return f"{_describe(process)} (already loaded)"
    if "mlx.core" in sys.modules:  # mlx has already bound the BLAS functions.
        logger.warning("mlx was imported before backend.prepare(): its slow reference BLAS stays.")
        return _REFERENCE_BLAS
    sources: tuple[Callable[[], tuple[ctypes.CDLL, str]], ...] = (_system, _ngsolve, _cmeel)
    for source in sources:
        try:
            library, where = source()
        except (OSError, LookupError, ValueError) as error:
            logger.debug("no OpenBLAS from %s: %s", source.__name__.strip("_"), error)
            continue
        _leave_a_core(library)
        return f"{_describe(library)} ({where})"
    logger.warning(
        "No OpenBLAS found: mlx falls back to the reference BLAS, whose matrix products are about "
        "four times slower (prefill nine times). Install libopenblas0 (Debian, Ubuntu), openblas "
        "(Fedora, Arch), or pip install ngsolve-openblas."
    )
    return _REFERENCE_BLAS


def _system() -> tuple[ctypes.CDLL, str]:
    return _load("libopenblas.so.0"), "system"


def _ngsolve() -> tuple[ctypes.CDLL, str]:
    # The library looks for libgfortran in its own folder, but mlx-cpu has libgfortran in another:
    # load the library from a temporary folder with links to both.
    package = _package_folder("ngsolve_openblas")
    blas = min(package.glob("libopenblas*.so*"))
    bundled = _package_folder("mlx").parent / "mlx_cpu.libs"
    with tempfile.TemporaryDirectory(prefix="mlx-mtp-blas-") as folder:
        links = Path(folder)
        (links / "libopenblas.so.0").symlink_to(blas)
        (links / "libgfortran.so.5").symlink_to(min(bundled.glob("libgfortran-*.so.5*")))
        for quadmath in bundled.glob("libquadmath-*"):
            (links / quadmath.name).symlink_to(quadmath)
        return _load(str(links / "libopenblas.so.0")), "ngsolve-openblas"


def _cmeel() -> tuple[ctypes.CDLL, str]:
    prefix = _package_folder("mlx").parent / "cmeel.prefix"
    return _load(str(prefix / "lib" / "libopenblas.so.0")), "cmeel-openblas"


def _load(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def _leave_a_core(library: ctypes.CDLL) -> None:
    # Leave one core to the engine's thread: OpenBLAS's threads spin between matrix products.
    if any(os.environ.get(name) for name in _BLAS_THREADS):
        return
    with contextlib.suppress(AttributeError):  # Some builds lack these functions.
        library.openblas_set_num_threads(max(library.openblas_get_num_threads() - 1, 1))


def _package_folder(name: str) -> Path:
    # Don't import the package: ngsolve_openblas prints text, and mlx must not be loaded yet.
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"the package {name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _describe(library: ctypes.CDLL) -> str:
    config: Any = getattr(library, "openblas_get_config", lambda: None)
    config.restype = ctypes.c_char_p
    text = config() or b""
    return " ".join(text.decode(errors="replace").split()[:2]) or "OpenBLAS"
