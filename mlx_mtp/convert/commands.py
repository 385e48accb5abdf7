"""The converter's commands: add-mtp-weights and convert.

Nothing heavy is imported before a command runs: --help answers at once, and mlx finds its backend
prepared.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlx_mtp.config import DTYPE_NAMES
from mlx_mtp.console import CommandParser
from mlx_mtp.errors import MlxMtpError

MODE_NAMES = ("affine", "mxfp4", "nvfp4", "mxfp8")
_ADD_HELP = "give an MLX model its MTP head back"


def add_subcommands(subparsers: Any) -> None:
    """Register the commands; each parsed namespace has a `run` that takes it and returns a status.

    Args:
        subparsers: as argparse's `add_subparsers` returns it.
    """
    adding = subparsers.add_parser("add-mtp-weights", help=_ADD_HELP, description=_DESCRIPTION)
    add_arguments(adding)
    converting = subparsers.add_parser(
        "convert", help="make an MLX model with its MTP head from a Hugging Face checkpoint"
    )
    _add_convert_arguments(converting)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of add-mtp-weights."""
    parser.add_argument(
        "--mlx-model-path", required=True, metavar="DIR_OR_HUB_ID", help="the MLX model"
    )
    parser.add_argument(
        "--source-model",
        required=True,
        metavar="DIR_OR_HUB_ID",
        help="the checkpoint that has the head, usually the BF16 original",
    )
    _add_quantization_arguments(parser, "the model's own")
    parser.add_argument("--revision", help="branch, tag or commit of the source on the hub")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="new directory with links to the model's files and the head; the model's directory "
        "stays as it is",
    )
    parser.add_argument("--dry-run", action="store_true", help="check and report; write nothing")
    parser.add_argument("--force", action="store_true", help="replace an existing head")
    _add_verify(parser)
    parser.add_argument(
        "--mtp-norms",
        choices=("hf", "mlx"),
        help="whether the source's norms are zero-centred (hf) or have the 1 added (mlx), if its "
        "files don't say",
    )
    parser.set_defaults(run=run_add)


def _add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a Hugging Face checkpoint, a directory or a hub id")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new directory")
    parser.add_argument("-q", "--quantize", action="store_true", help="quantize trunk and head")
    _add_quantization_arguments(parser, "4, 64, affine, as mlx-lm")
    parser.add_argument(
        "--dtype", choices=DTYPE_NAMES, help="type of what isn't quantized (default: the source's)"
    )
    parser.add_argument("--revision", help="branch, tag or commit of the source on the hub")
    _add_verify(parser)
    parser.set_defaults(run=run_convert)


def _add_quantization_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--bits",
        type=int,
        metavar="N",
        help=f"bits per weight; 16: unquantized (default: {default})",
    )
    parser.add_argument("--group-size", type=int, metavar="N", help="weights that share one scale")
    parser.add_argument("--mode", choices=MODE_NAMES, help="quantization mode")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verify",
        action="store_true",
        help="measure the head's drafts before putting it in place",
    )


def run_add(options: argparse.Namespace) -> int:
    """Convert a head; returns the exit status."""
    _prepare()
    from mlx_mtp.convert.add_head import Request, add_head
    from mlx_mtp.convert.console import Console

    request = Request(
        model=options.mlx_model_path,
        source=options.source_model,
        flags=_flags(options),
        revision=options.revision,
        output=options.output,
        dry_run=options.dry_run,
        force=options.force,
        verify=options.verify,
        mtp_norms=options.mtp_norms,
    )
    console = Console()
    add_head(request, console)
    if not options.dry_run:
        # By the name that was given: of a hub id, the weights may not be in the cache yet.
        console.say(f"Next: mlx-mtp serve {options.output or request.model} --enable-mtp")
    return 0


def run_convert(options: argparse.Namespace) -> int:
    """Convert a whole model; returns the exit status."""
    _prepare()
    from mlx_mtp.convert.console import Console
    from mlx_mtp.convert.convert_model import ConvertRequest, convert_model
    from mlx_mtp.errors import UsageError

    flags = _flags(options)
    if flags and not options.quantize:
        raise UsageError("--bits, --group-size and --mode need --quantize (-q).")
    request = ConvertRequest(
        source=options.source,
        output=options.output,
        quantize=options.quantize,
        flags=flags,
        dtype=options.dtype,
        revision=options.revision,
        verify=options.verify,
    )
    console = Console()
    directory = convert_model(request, console)
    console.say(f"Next: mlx-mtp serve {directory} --enable-mtp")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The script scripts/add_mtp_weights.py; returns the exit status."""
    parser = CommandParser(prog="add_mtp_weights.py", description=_DESCRIPTION)
    add_arguments(parser)
    options = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except MlxMtpError as error:
        print(f"add_mtp_weights.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _flags(options: argparse.Namespace) -> Any:
    from mlx_mtp.convert.quantization import Flags

    return Flags(options.bits, options.group_size, options.mode)


def _prepare() -> None:
    from mlx_mtp import backend

    # So that what is half written is removed; only a kill -9 leaves it to the next run.
    signal.signal(signal.SIGTERM, _terminate)
    backend.prepare()


def _terminate(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


_DESCRIPTION = (
    "MLX conversions lose the multi-token-prediction head. This fetches it from the original "
    "checkpoint, quantizes it as the model is, and puts it beside the model as mtp.safetensors, "
    "which mlx-lm ignores. Nothing else is changed."
)
