"""Dequantizes, casts, quantizes and writes a conversion's target model, one tensor at a time."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from mlx_lm.utils import (
    create_model_card,
    load_config,
    load_tokenizer,
    make_shards,
    quantize_model,
    save_config,
)

from mlx_mtp.console import say_wrapped, size_text
from mlx_mtp.convert.files import FP8, SafetensorsFile, StoredTensor, dequantize, write_tensors
from mlx_mtp.convert.source import INDEX, with_scales
from mlx_mtp.errors import ConvertError
from mlx_mtp.models.files import shapes_in
from mlx_mtp.models.head_weights import FP8_SCALES
from mlx_mtp.models.loader import DTYPES, family_of, load_trunk
from mlx_mtp.models.sizes import check_sizes
from mlx_mtp.progress import Bar

_GENERATION = "generation_config.json"
_DEQUANTIZING = 2 * 4  # bytes per element: its scale and value in float32
_AT_ONCE = 20  # number of a graph's branches, here experts, that mlx evaluates side by side
_STACKED = "experts.gate_up_proj"


class _Working(NamedTuple):
    """What determines the memory that converting a module takes."""

    matrices: Container[tuple[int, ...]]  # shapes of the FP8 matrices
    expert_copies: int  # number of copies of a stack of experts that exist at the same time
    expert_bytes: int  # per element of an expert that is being dequantized

    @classmethod
    def of(cls, names: Iterable[str], fp8: Mapping[str, StoredTensor]) -> _Working:
        """Count 2 copies if the source has separate experts: these and their stack.

        Stacked experts take 4, or 5 in FP8: gate and up in one stack (2), and one of them twice.
        """
        is_stacked = any(name.endswith(_STACKED) for name in names)
        in_fp8 = any(".experts." in name for name in fp8)
        copies = (4 + in_fp8) if is_stacked else 2
        shapes = {tensor.shape for tensor in fp8.values()}
        return cls(shapes, copies, in_fp8 * (1 + is_stacked) * (4 + _DEQUANTIZING))

    def peak(self, plain: Sequence[mx.array], made: Sequence[mx.array]) -> int:
        """Returns the bytes for a module whose arrays `plain` become `made` when quantized."""
        total = sum(array.nbytes for array in made)
        for array in plain:
            if array.ndim == 3:
                at_once = min(len(array), _AT_ONCE) * array.size // len(array)
                total += self.expert_copies * array.nbytes + at_once * self.expert_bytes
            else:
                total += 2 * array.nbytes  # as read, and as cast
                total += _DEQUANTIZING * array.size * (array.shape in self.matrices)
        return total


class _Trunk(NamedTuple):
    model: nn.Module  # lazy: its parameters are graphs that begin at the source's files
    config: dict[str, Any]
    peak: int  # maximum bytes that converting one module takes


def convert_trunk(
    path: Path,
    output: Path,
    hub_id: str | None,
    *,
    quantize: bool,
    flags: Mapping[str, Any],
    dtype: str | None,
) -> None:
    """Write a Hugging Face checkpoint's target model, tokenizer and configuration for MLX.

    `flags` may have bits, group_size and mode; `dtype` is the type of unquantized tensors, by
    default the type in config.json, or else that of the final norm (bfloat16 for FP8 sources). The
    planned peak of memory is printed first. Raises UnsupportedModelError, CheckpointError or
    ConvertError if the checkpoint can't be converted.
    """
    check_sizes(load_config(path), Path(hub_id or path), shapes_in(path))
    trunk = _planned(path, quantize, flags, dtype)
    parameters = dict(tree_flatten(trunk.model.parameters()))
    nbytes = sum(array.nbytes for array in parameters.values())
    if (free := shutil.disk_usage(output.parent).free) < nbytes:
        raise ConvertError(
            f"{output.parent} has {size_text(free)} free; the model takes {size_text(nbytes)}."
        )
    own = _resident_peak()
    say_wrapped(
        f"The model will take {size_text(nbytes)} on the disk. Planned peak of memory: "
        f"{size_text(own + trunk.peak)}, of which {size_text(own)} are in use now."
    )
    output.mkdir()
    # Now only `parameters` holds the weights, so each is freed when it has been written.
    trunk.model.update(tree_map(lambda _: mx.array([]), trunk.model.parameters()))
    _write_weights(output, parameters, nbytes)
    save_config(trunk.config, output / "config.json")
    eos = trunk.config.get("eos_token_id")
    load_tokenizer(path, eos_token_ids=eos).save_pretrained(output)
    if (path / _GENERATION).is_file():
        shutil.copy(path / _GENERATION, output)
    create_model_card(output, hub_id)


def _planned(path: Path, quantize: bool, flags: Mapping[str, Any], dtype: str | None) -> _Trunk:
    config = load_config(path)
    parts = config, config.get("text_config", {})
    files = [SafetensorsFile(file) for file in sorted(path.glob("model*.safetensors"))]
    stored = {name: tensor for file in files for name, tensor in file.tensors.items()}
    fp8 = {n: tensor for n, tensor in with_scales(stored, config).items() if tensor.dtype == FP8}
    stated = (part.get(key) for part in parts for key in ("torch_dtype", "dtype"))
    named = next((name for name in (dtype, *stated) if name in DTYPES), None)
    target = DTYPES[named] if named else mx.bfloat16 if fp8 else None
    model, _, _, of_norm = load_trunk(
        path,
        family_of(config, str(path)),
        lambda weights: _dequantized(weights, fp8, target or mx.bfloat16),
    )
    is_cast = getattr(model, "cast_predicate", lambda _: True)

    def cast(name: str, value: mx.array) -> mx.array:
        floating = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(target or of_norm) if floating and is_cast(name) else value

    model.update(tree_map_with_path(cast, model.parameters()))
    plain = _module_arrays(model)
    for part in parts if fp8 else ():
        part.pop("quantization_config", None)
    if quantize:
        given = {"group_size": None, "bits": None, **flags}
        model, config = quantize_model(model, config, **given)
    made = _module_arrays(model)
    working = _Working.of(stored, fp8)
    peak = max(working.peak(plain[path], made[path]) for path in plain)
    return _Trunk(model, config, peak)


def _module_arrays(model: nn.Module) -> dict[str, list[mx.array]]:
    """Returns the parameters of each module by its path."""
    arrays: dict[str, list[mx.array]] = {}
    for name, array in tree_flatten(model.parameters()):
        arrays.setdefault(name.rpartition(".")[0], []).append(array)
    return arrays


def _dequantized(
    weights: dict[str, mx.array], fp8: Mapping[str, StoredTensor], dtype: mx.Dtype
) -> dict[str, mx.array]:
    """Returns a trunk's tensors without scales, FP8 ones dequantized to `dtype`, unevaluated."""
    for name in weights.keys() & fp8.keys():
        scales = weights.pop(f"{name}{FP8_SCALES}")
        weights[name] = dequantize(weights[name], scales, fp8[name].block, dtype)
    return weights


def _write_weights(output: Path, parameters: dict[str, mx.array], nbytes: int) -> None:
    """Evaluate and write the arrays one by one, and remove them from the dictionary."""
    shards = [list(shard) for shard in make_shards(parameters)]
    file_of = dict[str, str]()
    with Bar(desc="Converting", total=nbytes) as bar:
        for number, names in enumerate(shards, start=1):
            file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            file_name = file_name if shards[1:] else "model.safetensors"
            file_of |= dict.fromkeys(names, file_name)
            like = {
                name: mx.zeros(parameters[name].shape, parameters[name].dtype) for name in names
            }

            def arrays(names: list[str] = names) -> Iterator[tuple[int, dict[str, mx.array]]]:
                for name in names:
                    array = mx.contiguous(parameters.pop(name)).view(mx.uint8)
                    yield 0, {name: array}
                    bar.update(array.nbytes)
                    del array
                    mx.clear_cache()

            with (output / file_name).open("wb") as file:
                write_tensors(file, like, lambda: {"format": "mlx"}, arrays())
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(file_of.items()))}
    (output / INDEX).write_text(json.dumps(index, indent=4))


def _resident_peak() -> int:
    """Returns the maximum bytes of memory that this process has used so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
