"""PyTorch and our OpenBLAS in one process."""

import importlib.util
import os
import sys


def load_torch() -> None:
    """Import PyTorch, if it is installed, so that it calls its own OpenBLAS.

    Our OpenBLAS is loaded with global symbols, which mlx needs; PyTorch's calls would resolve to
    them and crash. mlx_lm imports transformers, which imports PyTorch, so call this before.
    """
    if importlib.util.find_spec("torch") is None or not hasattr(os, "RTLD_DEEPBIND"):
        return
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_DEEPBIND)
    try:
        importlib.import_module("torch")
    finally:
        sys.setdlopenflags(flags)
