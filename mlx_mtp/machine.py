"""The memory that this machine has for a model."""

import logging
import os
import platform
import re
import sys
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

logger = logging.getLogger(__name__)

_GPU_KEYS = (
    ("max_recommended_working_set_size", "what Metal recommends at most"),
    ("free_memory", "free on the GPU"),
    ("total_memory", "of the GPU"),
    ("memory_size", "of the machine"),
)
_WIRED_SINCE = 15  # first version of macOS with a wired limit
_SMALL_MAC = 32  # GiB; Metal recommends a smaller share of the memory up to this size

MOST_TEXT_BYTES = 576 << 20


def client_text_bytes(nbytes: int) -> int:
    """Returns the bytes of a server's `nbytes` that bodies and answers of requests may take."""
    return min(MOST_TEXT_BYTES, nbytes // 32)


class MemoryLimit(NamedTuple):
    """The memory that may be used."""

    nbytes: int
    source: str  # a description of where the number is from


def memory_limit(given: int | None, least: int | None = None) -> MemoryLimit:
    """Returns the value of --memory-limit (bytes) if given, or else the machine's memory.

    The limit is at most `least`, the bytes that every rank has.
    """
    limit = machine_memory() if given is None else MemoryLimit(given, "--memory-limit")
    if least is not None and least < limit.nbytes:
        return MemoryLimit(least, "on the rank that has the least")
    return limit


def machine_memory() -> MemoryLimit:
    """Returns the memory for a model to be loaded: the GPU's, or else the host's free memory."""
    if mx.default_device() == mx.gpu:
        info = mx.device_info()
        for key, source in _GPU_KEYS:
            if (nbytes := int(info.get(key, 0))) > 0:
                return MemoryLimit(nbytes, source)
    return _host_memory()


def mac_memory(gigabytes: int) -> MemoryLimit:
    """Returns the maximum of a Mac's memory that Metal recommends to use, by users' reports."""
    # github.com/ggml-org/llama.cpp: issue 1870, pull request 2011. Newer macOS recommends more.
    share = 2 / 3 if gigabytes <= _SMALL_MAC else 3 / 4
    source = f"assumed to be usable of a Mac's {gigabytes} GB"
    return MemoryLimit(int(gigabytes * 2**30 * share), source)


def wire_memory(limit: MemoryLimit) -> str:
    """Set mlx's memory limit on CUDA; on a Mac, wire the model's memory, as mlx-lm does.

    Returns a text on the Mac's wired limit; an empty text elsewhere.
    """
    if mx.cuda.is_available():
        # Prefill expands quantized weights; mlx allocates them ahead of the GPU up to this limit.
        mx.set_memory_limit(limit.nbytes)
        return ""
    # Setting a limit above Metal's recommendation, or before macOS 15, fails. Not run on a Mac yet.
    version = re.match(r"[0-9]+", platform.mac_ver()[0])
    if not mx.metal.is_available() or version is None:
        return ""
    if int(version[0]) < _WIRED_SINCE:
        return f"not set before macOS {_WIRED_SINCE}"
    recommended = int(mx.device_info().get("max_recommended_working_set_size", 0))
    wired = min(limit.nbytes, recommended)
    try:
        mx.set_wired_limit(wired)
    except (ValueError, RuntimeError) as error:
        logger.warning("The wired limit was not set: %s", error)
        return f"not set: {error}"
    return f"set to {wired / 1e9:.1f} GB"


def physical_memory() -> int:
    """Returns the bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _host_memory() -> MemoryLimit:
    total = physical_memory()
    limit = MemoryLimit(total, "of the machine")
    available = _meminfo("MemAvailable")
    if available is not None:  # This process can also use the memory it already has.
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        available += pages * os.sysconf("SC_PAGE_SIZE")
        limit = MemoryLimit(min(total, available), "available on the machine")
    capped = _cgroup_limit()
    return MemoryLimit(capped, "of this container") if capped < limit.nbytes else limit


def _meminfo(name: str, path: Path = Path("/proc/meminfo")) -> int | None:
    try:
        match = re.search(rf"^{name}:\s+([0-9]+) kB$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) << 10 if match else None


def _cgroup_limit(path: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # The file may say "max".
        return sys.maxsize
