"""The arguments of `selftest`. Heavy imports are deferred, so that --help answers quickly."""

import argparse
import os
from pathlib import Path
from typing import Any

from mlx_mtp.flags import Flag, add_flags, at_least
from mlx_mtp.options import DTYPE, MODEL_FLAG
from mlx_mtp.prepare import prepare_command


def add_selftest(subparsers: Any) -> None:
    """Register `selftest`."""
    parser = subparsers.add_parser(
        "selftest",
        help="check this machine in a minute, and print a table for a report",
        description="Check the kernels against the portable code and MTP's output against plain "
        "decoding, measure acceptance and speed, and print one table for a report.",
        epilog="Exit status: 0 all is well, 1 a check failed, 2 it could not be run.",
    )
    parser.set_defaults(run=_run_selftest)
    seconds = "time to take after loading; what doesn't fit is skipped"
    add_flags(
        parser,
        MODEL_FLAG,
        DTYPE,
        Flag("--seconds SECONDS", seconds, at_least(1.0), default=60.0),
        Flag("--json FILE", "write everything that was measured", Path),
        Flag("--report FILE", "write the table and all of that, to be pasted into an issue", Path),
    )


def _run_selftest(options: argparse.Namespace) -> int:
    from mlx_mtp.bench.report import check_writable

    check_writable(options.json, options.report)
    if options.dtype == "float32":
        # TF32 would round float32 products; mlx reads the variable at its first product.
        os.environ.setdefault("MLX_ENABLE_TF32", "0")
    info = prepare_command(options)

    from mlx_mtp import build

    loaded, tokenizer = build.load(options, enable_mtp=True)
    from mlx_mtp.selftest.run import run_selftest

    return run_selftest(options, loaded, tokenizer, str(info))
