"""The arguments of `mlx-mtp selftest`. Nothing heavy is imported here: --help answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_mtp.flags import at_least, text
from mlx_mtp.options import MODEL_DEFAULT, MODEL_HELP, add_dtype


def add_selftest(subparsers: Any) -> None:
    """Register `selftest`.

    Args:
        subparsers: as argparse's `add_subparsers` returns it.
    """
    parser = subparsers.add_parser(
        "selftest",
        help="check this machine in a minute, and print a table for a report",
        description="Check the kernels against the portable code and MTP's output against plain "
        "decoding, measure acceptance and speed, and print one table for a report.",
        epilog="Exit status: 0 all is well, 1 a check failed, 2 it could not be run.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        type=text,
        metavar="MODEL",
        help=f"{MODEL_HELP} (default: {MODEL_DEFAULT})",
    )
    add_dtype(parser)
    parser.add_argument(
        "--seconds",
        type=at_least(1.0),
        default=60.0,
        metavar="SECONDS",
        help="time to take after loading; what doesn't fit is skipped (default: 60)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything that was measured"
    )
