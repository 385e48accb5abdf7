"""Builds a model that runs on this package's caches, with its MTP head, from a directory."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import dequantize_model
from mlx_lm.utils import load_model as mlx_lm_load_model

from mlx_mtp.config import DTYPE_NAMES
from mlx_mtp.errors import (
    CheckpointError,
    MissingHeadError,
    MlxMtpError,
    ModelError,
    UnsupportedModelError,
    UsageError,
)
from mlx_mtp.machine import machine_memory
from mlx_mtp.models import head_weights
from mlx_mtp.models.family import Family, text_config
from mlx_mtp.models.files import few_names, read_index, read_json, shapes_in
from mlx_mtp.models.head_weights import (
    FP8_SCALES,
    PREFIXES,
    SIDECAR_PATTERN,
    HeadTensors,
    head_name,
)
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.models.qwen3_5 import PRISM_HADAMARD, QWEN3_5
from mlx_mtp.models.qwen3_next import QWEN3_NEXT
from mlx_mtp.models.sizes import check_sizes
from mlx_mtp.models.tensor_parallel import shard
from mlx_mtp.models.tower_weights import SIDECAR, VisionTower, load_tower, read_tower, tower_name

logger = logging.getLogger(__name__)

FAMILIES: dict[str, Family] = {
    model_type: family
    for family in (QWEN3_NEXT, QWEN3_5, PRISM_HADAMARD)
    for model_type in family.model_types
}
HEAD_ALONE = "qwen3_5_mtp"  # model_type of repositories with only an MTP head, of any family
DTYPES = {name: getattr(mx, name) for name in DTYPE_NAMES}
_DEQUANTIZED_SHARE = 0.5  # maximum share of memory for a model dequantized to float32
_FINAL_NORMS = ("model.norm.weight", "language_model.norm.weight")
_UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npz", ".gguf", ".h5", ".msgpack")


def load_model(
    path: Path,
    *,
    enable_mtp: bool,
    dtype: str = "auto",
    lazy: bool = False,
    memory: int | None = None,
    part: tuple[int, int] = (0, 1),
    see: bool = True,
) -> LoadedModel:
    """Load a checkpoint: HF or MLX, quantized or not, with or without its MTP head.

    `enable_mtp` loads the head, which must exist. `dtype` is one of `DTYPES`, or "auto": float32
    on the CPU (which has no MoE in any other dtype), else the stored one. `lazy` reads no weights
    until `LoadedModel.load_weights`. `memory` is the machine's memory in bytes: on the CPU a
    quantized model that fits half of it in float32 is dequantized. `part` is a rank and the number
    of ranks: only that rank's slice of the weights is loaded. `see` loads the vision tower, if any.

    Raises UsageError, or a ModelError: UnsupportedModelError, MissingHeadError, or CheckpointError
    if files are missing or damaged.
    """
    config, beside = _read_config(path), dict[str, mx.array]()
    if see and (path / SIDECAR).is_file():
        beside, more = read_tower(path / SIDECAR)
        config |= more
    generation_config = read_json(path / "generation_config.json", default={})
    family = family_of(config, str(path))
    shapes = shapes_in(path)
    refuse_fp8(config, str(path), shapes)
    if not shapes:
        raise CheckpointError(f"{path} has no model*.safetensors file{_unread_formats(path)}.")
    try:
        check_sizes(config, path, shapes)
        model, head_source, tower = _build_model(
            path, config, beside, family, dtype, memory, part, enable_mtp=enable_mtp, see=see
        )
    except UsageError:
        raise
    except Exception as error:
        if absent := _absent(path):
            raise CheckpointError(
                f"{path} lacks {few_names(absent)}, named by its index. Download it again."
            ) from error
        if isinstance(error, MlxMtpError):
            raise
        # Whatever mlx-lm and mlx raise, these files can't be used.
        logger.debug("Why %s can't be loaded", path, exc_info=True)
        what = few_names(f"{type(error).__name__}: {error}".split(",\n"))
        raise CheckpointError(f"{path} can't be loaded: {what:.1000}") from error
    files = config, generation_config
    loaded = LoadedModel(path, *files, model, family, head_source, part[1], tower)
    loaded.check_eos_token_ids()
    if not lazy:
        loaded.load_weights()
    return loaded


def _build_model(
    path: Path,
    config: dict[str, Any],
    beside: dict[str, mx.array],  # the vision tower's tensors, if they have a file of their own
    family: Family,
    dtype: str,
    memory: int | None,
    part: tuple[int, int],
    *,
    enable_mtp: bool,
    see: bool,
) -> tuple[nn.Module, str | None, VisionTower | None]:
    """Returns the patched model with its head, the head's source, and the tower, all lazy."""
    model, head, tower_weights, stored_dtype = load_trunk(path, family)
    tower_weights = tower_weights or beside
    family.patch(model)
    _check_rope(family.causal_lm(model).model.layers)
    head_source = None
    if enable_mtp:
        head = head_weights.read_sidecar(path) or head
        if head is None:
            raise missing_head(str(path))
        weights, args = head_weights.to_mlx(head), family.causal_lm(model).args
        model.mtp = family.make_head(args, moe=head_weights.has_router(weights))
        head_weights.load_into(model.mtp, weights, head.source)
        head_source = head.source
        del weights
    shard(family.causal_lm(model), model.get("mtp"), *part)
    del head  # else its stored tensors would stay in memory while the model is read
    memory = machine_memory().nbytes if memory is None else memory
    cast(model, dtype, stored_dtype, memory)
    tower = None
    if see and tower_weights and "vision_config" in config:
        args = family.causal_lm(model).args
        tower = load_tower(config, tower_weights, args.hidden_size)
        family.set_sections(model, config)
        cast(tower, dtype, stored_dtype, memory)
    return model, head_source, tower


def _check_rope(layers: Sequence[nn.Module]) -> None:
    """Raise ModelError if RoPE fails for the positions of two rows, or returns NaN or infinity."""
    attention = next(layer.self_attn for layer in layers if "self_attn" in layer)
    try:
        ones = mx.ones((2, 1, 2, attention.head_dim))
        finite = mx.isfinite(attention.rope(ones, offset=mx.array([0, 1]))).all().item()
        fault = "" if finite else ": it makes numbers that are not finite"
    except Exception as error:
        fault = f": {error}"
    if fault:
        raise ModelError(
            "The model's rope can't be used as rope_theta, rope_scaling or rope_parameters say"
            f"{fault:.300}"
        )


def family_of(config: dict[str, Any], where: str) -> Family:
    """Returns the family that serves a config.json; raises UnsupportedModelError if none does."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if model_type == HEAD_ALONE:
        raise UnsupportedModelError(
            f"{where} is an MTP head alone, which drafts for a model and can't be served by "
            "itself. Give it to its model, and serve that: `mlx-mtp add-mtp-weights MODEL "
            f"--source-model {where}`."
        )
    if family is None:
        raise UnsupportedModelError(
            f"{where} has model_type {model_type!r}, which mlx-mtp does not serve. "
            f"Supported: {', '.join(sorted(FAMILIES))}."
        )
    return family


def refuse_fp8(config: Mapping[str, Any], where: str, names: Iterable[str] = ()) -> None:
    """Raise UnsupportedModelError for an FP8 release, by its config.json or its tensors' names.

    The message has the command that converts the release.
    """
    tables = (part.get("quantization_config") for part in (config, text_config(config)))
    stated = any(isinstance(t, dict) and t.get("quant_method") == "fp8" for t in tables)
    if stated or any(name.endswith(FP8_SCALES) for name in names if head_name(name) is None):
        name = Path(where).name.removesuffix("-FP8")
        raise UnsupportedModelError(
            f"{where} is an FP8 release: its weights are 8-bit floats with a scale for each block, "
            "which MLX can't run. Make a model of it that can be served, in 4 bits, with its head: "
            f"`mlx-mtp convert {where} -q --output {name}-4bit`."
        )


def _read_config(path: Path) -> dict[str, Any]:
    """Returns config.json; raises UnsupportedModelError if it names a Python file to run.

    mlx-lm up to 0.31.3 ran that file unasked (CVE-2026-5843). No code of a model may run here.
    """
    config = read_json(path / "config.json")
    for part in (config, text_config(config)):
        if part.get("model_file") is not None:
            raise UnsupportedModelError(
                f"{path / 'config.json'} names a Python file to be run, as model_file "
                f"{str(part['model_file'])[:80]!r}. mlx-mtp runs no code that comes with a model; "
                "if the model is of a family that is served, remove that entry."
            )
    return config


def load_trunk(
    path: Path,
    family: Family,
    prepare: Callable[[dict[str, mx.array]], dict[str, mx.array]] = lambda weights: weights,
) -> tuple[nn.Module, HeadTensors | None, dict[str, mx.array], mx.Dtype]:
    """Load mlx-lm's model lazily; no weight is read.

    Returns the model, the MTP head in model*.safetensors if there is one, the vision tower's
    tensors there, and the dtype of activations. `prepare` can change the target model's tensors
    before `family.prepare_weights` does.
    """
    seen: dict[str, Any] = {}

    def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        base, args = family.classes(config)

        class Model(base):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                seen["tower"] = {k: v for k, v in weights.items() if tower_name(k)}
                trunk, seen["head"] = head_weights.split_head(weights)
                shapes = {key: value.shape for key, value in trunk.items()}
                seen["convention"] = head_weights.trunk_convention(shapes) or "mlx"
                trunk = family.prepare_weights(prepare(trunk))
                # Activations have the dtype of the final norm, however the matrices are packed.
                types = (v.dtype for k, v in trunk.items() if k.endswith(_FINAL_NORMS))
                seen["dtype"] = next(types, mx.bfloat16)
                for key, value in trunk.items() if seen["convention"] == "hf" else ():
                    # mlx-lm adds 1 to norms in their dtype; in float32 no digits are lost.
                    if key.endswith("norm.weight") and value.ndim == 1:
                        trunk[key] = value.astype(mx.float32)
                return super().sanitize(trunk)

        return Model, args

    model, _ = mlx_lm_load_model(path, lazy=True, get_model_classes=classes)
    # Popped because the model's class keeps `seen` alive.
    tensors, tower = seen.pop("head"), seen.pop("tower")
    source = f"{path / 'model*.safetensors'}"
    head = HeadTensors(tensors, seen["convention"], source) if tensors else None
    return model, head, tower, seen["dtype"]


def _absent(path: Path) -> list[str]:
    """Returns the missing files that the index names, as after an interrupted download."""
    index = path / "model.safetensors.index.json"
    with contextlib.suppress(MlxMtpError):
        return sorted({file for file in read_index(index).values() if not (path / file).exists()})
    return []


def _unread_formats(path: Path) -> str:
    others = sorted(each.name for each in path.glob("[!.]*") if each.suffix in _UNSAFE_SUFFIXES)
    if not others:
        return ""
    return (
        f", but {others[0]}: only safetensors are read, as the other formats can bring code or are "
        "not MLX's. Convert it with mlx_lm.convert, or take a repository that has safetensors"
    )


def cast(model: nn.Module, dtype: str, stored: mx.Dtype, memory: int) -> None:
    """Cast a model to `dtype` as `load_model` describes; `stored` is the checkpoint's dtype.

    Raises UsageError if `dtype` is unknown.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown; use auto, {', '.join(DTYPES)}.")
    on_cpu = mx.default_device() == mx.cpu
    target = DTYPES.get(dtype, mx.float32 if on_cpu else stored)
    _cast_floats(model, target)
    packed = [m for _, m in model.named_modules() if hasattr(m, "bits") and "scales" in m]
    dequantized = sum(4 * m.weight.size * 32 // m.bits for m in packed)
    if on_cpu and target == mx.float32 and dequantized < _DEQUANTIZED_SHARE * memory:
        # Quantized matmuls on the CPU are about five times slower than float32 ones.
        dequantize_model(model)
        # Quantization modes without float scales are dequantized to bfloat16.
        _cast_floats(model, target)


def _cast_floats(model: nn.Module, target: mx.Dtype) -> None:
    def is_cast(module: nn.Module, name: str, value: Any) -> bool:
        # A_log feeds an exponential of an exponential and is kept in float32, as mlx-lm does.
        return name != "A_log" and nn.Module.valid_parameter_filter(module, name, value)

    model.apply(lambda a: a.astype(target) if mx.issubdtype(a.dtype, mx.floating) else a, is_cast)


def missing_head(model: str, note: str = "") -> MissingHeadError:
    """Returns the error for a model without an MTP head; its message says how to add one."""
    return MissingHeadError(
        f"{model} has no MTP head: neither {SIDECAR_PATTERN} beside the model, nor tensors named "
        f"{', '.join(p + '*' for p in PREFIXES)} in its model*.safetensors. MLX conversions drop "
        f"the head. Add it with `mlx-mtp add-mtp-weights {model}`, or decode without "
        f"it by --no-enable-mtp.{note and ' ' + note}"
    )
