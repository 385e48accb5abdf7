"""The command line of `mlx-mtp inspect`. Nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
from typing import Any

from mlx_mtp.config import DTYPE_NAMES
from mlx_mtp.flags import size
from mlx_mtp.options import MODEL_DEFAULT, MODEL_HELP


def add_inspect(subparsers: Any) -> None:
    """Register `inspect`; its parsed namespace has a `run` that takes it and returns a status.

    Args:
        subparsers: as argparse's `add_subparsers` returns it.
    """
    parser = subparsers.add_parser(
        "inspect",
        help="show whether a model fits this machine and whether it has its MTP head",
        description="Show whether a model fits this machine and up to which context, what it is, "
        "whether it has its MTP head, and the next command to type. No weights are downloaded.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"{MODEL_HELP} (default: {MODEL_DEFAULT})",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", *DTYPE_NAMES),
        default="auto",
        help="plan the memory for computing in this type (default: auto, the type serve would use)",
    )
    parser.add_argument(
        "--memory-limit",
        type=size,
        metavar="SIZE",
        help="plan for this much memory, such as 48GB (default: what this machine has)",
    )
    parser.set_defaults(run=run_inspect)


def run_inspect(options: argparse.Namespace) -> int:
    """Print what a model is; returns the exit status."""
    from mlx_mtp import backend

    backend.prepare()
    from mlx_mtp.inspect.report import inspect_model

    print("\n".join(inspect_model(options.model, options.dtype, options.memory_limit)))
    return 0
