"""An MLX model with its head from a Hugging Face checkpoint: mlx-lm's conversion, then ours."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from mlx_lm.convert import convert as mlx_lm_convert

from mlx_mtp.convert.add_head import Request, add_head
from mlx_mtp.convert.console import Console
from mlx_mtp.convert.quantization import Flags
from mlx_mtp.convert.source import open_source
from mlx_mtp.errors import ConvertError


@dataclass(frozen=True)
class ConvertRequest:
    """What the command line asks for.

    Args:
        source: a Hugging Face checkpoint with its head, a directory or a hub id.
        output: the directory to make.
        quantize: trunk and head; otherwise they stay as they are.
        flags: how.
        dtype: of what isn't quantized; None for the source's.
        revision: of the source.
        verify: measure the head's drafts before the directory is put in place.
    """

    source: str
    output: Path
    quantize: bool
    flags: Flags
    dtype: str | None = None
    revision: str | None = None
    verify: bool = False


def convert_model(request: ConvertRequest, console: Console) -> Path:
    """Convert trunk and head into a new directory, which is there as a whole or not at all.

    Raises:
        ModelError: the source can't be used or has no head.
        ConvertError: the output exists, or mlx-lm can't convert the trunk.
    """
    output = request.output.resolve()
    if output.exists():
        raise ConvertError(f"{output} already exists: give --output a new directory.")
    # Whether there is a head should not be learnt after the trunk's long conversion.
    source = open_source(request.source, request.revision)
    method = source.config.get("quantization_config", {}).get("quant_method")
    if method is not None:
        raise ConvertError(
            f"{source.name} is quantized ({method}), which mlx-lm does not convert for this "
            "family. Convert the BF16 original; a head alone may come from an FP8 source."
        )
    unfinished = output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _convert_trunk(request, unfinished)
        head = Request(
            model=str(unfinished),
            source=request.source,
            revision=request.revision,
            verify=request.verify,
        )
        add_head(head, console)
        unfinished.rename(output)
    except OSError as error:
        raise ConvertError(f"{output} can't be written: {error}. Nothing was changed.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return output


def _convert_trunk(request: ConvertRequest, directory: Path) -> None:
    source = Path(request.source).expanduser()
    try:
        mlx_lm_convert(
            str(source) if source.is_dir() else request.source,
            mlx_path=str(directory),
            quantize=request.quantize,
            q_group_size=request.flags.group_size,
            q_bits=request.flags.bits,
            q_mode=request.flags.mode or "affine",
            dtype=request.dtype,
            revision=request.revision,
        )
    except OSError:
        raise
    except Exception as error:
        # mlx-lm raises many kinds; whichever it is, this checkpoint is not one that it converts.
        raise ConvertError(f"mlx-lm can't convert {request.source}: {error}") from error
