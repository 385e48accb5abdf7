"""Whether a source's norms are zero-centred, by where it comes from and never by their values."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_mtp.convert.safetensors_file import SafetensorsFile
from mlx_mtp.convert.source import Source, trunk_file
from mlx_mtp.errors import ConvertError
from mlx_mtp.models.head_weights import NORM_CONVENTION_KEY, Convention, head_name

_CONVOLUTION = "conv1d.weight"


def norm_convention(
    files: Iterable[SafetensorsFile], source: Source, asked: Convention | None
) -> Convention:
    """The convention of the norms in a head's files.

    In this order: what a header says in so many words; the flag; the layout of a convolution in the
    same file, which whoever wrote it must have treated alike ([C, 1, K] in HF files, [C, K, 1] in
    MLX ones); PyTorch's mark in the header; a convolution elsewhere in the source, if it is HF's.

    Args:
        files: that hold the head.
        source: for its other files.
        asked: the flag --mtp-norms.

    Raises:
        ConvertError: the files can't tell and there is no flag, or they contradict it or each
            other.
    """
    files = list(files)
    stated = {f.metadata.get(NORM_CONVENTION_KEY) for f in files} - {None}
    if asked and stated - {asked}:
        raise ConvertError(
            f"--mtp-norms says {asked}, but the header of {files[0].path} says "
            f"{NORM_CONVENTION_KEY} {', '.join(map(str, stated))}."
        )
    found = {_of_file(file, source) if asked is None else asked for file in files}
    if len(found) == 1 and (convention := found.pop()) is not None:
        return convention
    names = ", ".join(str(file.path) for file in files)
    raise ConvertError(
        f"Whether the norms in {names} are zero-centred can't be determined from the headers or "
        "from a convolution's layout, and guessing would give a head that drafts badly. Say "
        "where the head comes from: --mtp-norms hf for tensors as Hugging Face stores them (w), "
        "--mtp-norms mlx where the 1 has been added (1 + w)."
    )


def _of_file(file: SafetensorsFile, source: Source) -> Convention | None:
    stated = file.metadata.get(NORM_CONVENTION_KEY)
    if stated is not None:
        return "hf" if stated == "hf" else "mlx" if stated == "mlx" else None
    beside = _of_convolution(file)
    if beside is not None:
        return beside
    if file.metadata.get("format") == "pt":
        return "hf"
    elsewhere = trunk_file(source.directory, _CONVOLUTION) if source.directory else None
    if elsewhere is not None:
        with SafetensorsFile(elsewhere) as other:
            # The reverse proves nothing: a raw head is easily put beside a converted trunk.
            return "hf" if _of_convolution(other) == "hf" else None
    return None


def _of_convolution(file: SafetensorsFile) -> Convention | None:
    for name, tensor in file.tensors.items():
        if name.endswith(_CONVOLUTION) and head_name(name) is None and len(tensor.shape) == 3:
            return "mlx" if tensor.shape[-1] == 1 else "hf"
    return None
