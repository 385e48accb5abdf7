"""The commands add-mtp-weights and convert; heavy imports are deferred until a command runs."""

import argparse
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_mtp import backend
from mlx_mtp.config import DTYPE_NAMES
from mlx_mtp.console import say_wrapped
from mlx_mtp.errors import UsageError
from mlx_mtp.flags import Flag, add_flags, nonempty_text

MODE_NAMES = ("affine", "mxfp4", "nvfp4", "mxfp8")
_MODEL = Flag("model MODEL", "", nonempty_text)
_DESCRIPTION = (
    "MLX conversions lose the multi-token-prediction head. This fetches it from the original "
    "checkpoint, quantizes it as the model is, and puts it beside the model as mtp.safetensors, "
    "which mlx-lm ignores. A vision tower that the conversion lost comes with it, as "
    "vision_tower.safetensors. Nothing else is changed."
)
_SOURCE = (
    "the checkpoint that has the head, usually the BF16 original (default: what the model's card "
    "says that it was made from)"
)
_OUTPUT = "new directory with links to the model's files and the head; the model's directory stays "
_NORMS = "whether the source's norms are zero-centred (hf) or have the 1 added (mlx), if its files "


def add_convert(subparsers: Any) -> None:
    """Register `add-mtp-weights` and `convert`."""
    adding = subparsers.add_parser(
        "add-mtp-weights", help="give an MLX model its MTP head back", description=_DESCRIPTION
    )
    adding.set_defaults(run=_run_conversion)
    add = adding.add_argument
    add_flags(adding, replace(_MODEL, help="the MLX model, a directory or a hub id"))
    default: Any = argparse.SUPPRESS
    add("--mlx-model-path", dest="model", default=default, help=argparse.SUPPRESS)
    add("--source-model", metavar="DIR_OR_HUB_ID", help=_SOURCE)
    _add_shared(adding, *["the model's own"] * 3)
    add("--output", type=Path, metavar="DIR", help=_OUTPUT + "as it is")
    add("--dry-run", action="store_true", help="check and report; write nothing")
    add("--force", action="store_true", help="replace an existing head")
    add("--mtp-norms", choices=("hf", "mlx"), help=_NORMS + "don't say")
    converting = subparsers.add_parser(
        "convert", help="make an MLX model with its MTP head from a Hugging Face checkpoint"
    )
    converting.set_defaults(run=_run_conversion)
    add = converting.add_argument
    checkpoint = "the Hugging Face checkpoint, a directory or a hub id"
    add_flags(converting, replace(_MODEL, help=checkpoint))
    add("--output", type=Path, required=True, metavar="DIR", help="a new directory")
    add("-q", "--quantize", action="store_true", help="quantize the model and its head")
    _add_shared(converting, "4", "64", "affine")
    dtype_help = "type of what isn't quantized (default: the source's)"
    add("--dtype", choices=DTYPE_NAMES, help=dtype_help)


def _add_shared(parser: argparse.ArgumentParser, bits: str, group_size: str, mode: str) -> None:
    add = parser.add_argument
    bits_help = f"bits per weight; 16: unquantized (default: {bits})"
    group_help = f"weights that share one scale (default: {group_size})"
    add("--bits", type=int, metavar="N", help=bits_help)
    add("--group-size", type=int, metavar="N", help=group_help)
    add("--mode", choices=MODE_NAMES, help=f"quantization mode (default: {mode})")
    add("--revision", help="branch, tag or commit of the source on the hub")
    verify_help = "measure the head's drafts before putting it in place"
    add("--verify", action="store_true", help=verify_help)
    vision_help = "bits per weight of the vision tower (default: as in the source)"
    add("--vision-bits", type=int, choices=(4, 8), help=vision_help)


def _run_conversion(options: argparse.Namespace) -> int:
    values = {
        name: value for name, value in vars(options).items() if name not in ("command", "run")
    }
    if (model := values.pop("model")) is None:
        raise UsageError(f"{options.command} needs a MODEL (see mlx-mtp {options.command} --help).")
    flags = {name: values.pop(name) for name in ("bits", "group_size", "mode")}
    values["flags"] = {name: value for name, value in flags.items() if value is not None}
    if values["flags"] and not values.get("quantize", True):
        raise UsageError("--bits, --group-size and --mode need --quantize (-q).")
    # An exit removes half-written files; after kill -9, the next run removes them.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    backend.prepare()
    from mlx_mtp.convert.convert import add_head, convert_model
    from mlx_mtp.inspect.choose import choose_model

    if options.command == "convert":
        result = values.pop("output").resolve()
        convert_model(model, result, **values)
    else:
        model = choose_model(model) or model
        # Suggest the same name for `serve`: the weights of a hub id may not be in the cache yet.
        result = add_head(model, values.pop("source_model"), **values) or model
    if not values.get("dry_run"):
        say_wrapped(f"Next: mlx-mtp serve {result}")
    return 0
