"""Finds an MTP head's tensors and gives them the names, layout and convention of `MTPHead`.

Whether norms are zero-centred (Hugging Face stores w, MLX 1 + w) is decided by where a file comes
from, never by the values: real weights fool every threshold.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import infer_quant_config

from mlx_mtp.errors import CheckpointError
from mlx_mtp.models.files import few_names, read_header, read_index

SIDECAR = "mtp.safetensors"
SIDECAR_INDEX = "mtp.safetensors.index.json"  # written last, when all shards are there
SIDECAR_PATTERN = "mtp*.safetensors"
NESTED_SIDECAR = "mtp/weights.safetensors"  # where some MLX programs write the head
FP8_SCALES = "_scale_inv"  # suffix of a tensor's scales, after the tensor's name
NORM_CONVENTION_KEY = "norm_convention"
PREFIXES = ("mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp.")

Convention = Literal["hf", "mlx"]
_SHARD = re.compile(r"^mtp-\d{5}-of-(\d{5})\.safetensors$")
EXPERT_KEY = re.compile(
    r"^(.*\.experts)\.(\d+)\.((?:gate_proj|up_proj|down_proj)\.(?:weight|scales|biases))$"
)
CONVOLUTION = "conv1d.weight"
# The keys in a repository of a head alone have no prefix: they begin with one of `_BARE`, and one
# key is `_MARK_OF_HEAD`, which no target model has.
_MARK_OF_HEAD = "pre_fc_norm_hidden.weight"
_BARE = ("fc.", "norm.", "pre_fc_norm_", "layers.0.")
NORMS = (
    *("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"),
    *("layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"),
    *("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight"),
)
# Copies of the target model's own matrices that some checkpoints carry in the head.
TIED = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")


class HeadTensors(NamedTuple):
    """The tensors of a head as they are stored."""

    tensors: dict[str, mx.array]  # by name without the `mtp.` prefix, as stored
    convention: Convention  # how its norm weights are stored
    source: str  # where it was found, for messages


def head_name(key: str) -> str | None:
    """Returns a checkpoint key without its `mtp.` prefix; None for a key of the target model."""
    return next((key.removeprefix(p) for p in PREFIXES if key.startswith(p)), None)


def head_names(keys: Iterable[str]) -> dict[str, str]:
    """Returns the MTP head's keys in a checkpoint, each with its name in `MTPHead`.

    These keys begin with one of `PREFIXES`; in a repository of a head alone they have no prefix.
    """
    keys = list(keys)
    bare = _BARE if _MARK_OF_HEAD in keys else ()
    names = {key: head_name(key) or (key if key.startswith(bare) else None) for key in keys}
    return {key: name for key, name in names.items() if name is not None}


def split_head(weights: dict[str, mx.array]) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Separate a checkpoint's target model from its head, and strip the prefix of head keys."""
    names = head_names(weights)
    head = {name: weights[key] for key, name in names.items()}
    return {key: value for key, value in weights.items() if key not in names}, head


def trunk_convention(shapes: Mapping[str, tuple[int, ...]]) -> Convention | None:
    """Returns "hf" or "mlx" by the layout of the target model's convolutions: [C, 1, K] or
    [C, K, 1]. None if there are none.
    """
    layouts = {
        shape[-1] != 1
        for key, shape in shapes.items()
        if key.endswith(CONVOLUTION) and head_name(key) is None
    }
    return None if not layouts else "hf" if True in layouts else "mlx"


def stated_convention(
    file: Path, metadata: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> Convention | None:
    """Returns how a file's norms are stored, by the file's origin; None if that is unknown.

    `norm_convention` in the header decides; else the layout of the target model's convolutions, if
    the file has any; else the header's `format`. A file without a `format` is MLX's if its keys
    have no prefix or if it is a `NESTED_SIDECAR`: only MLX programs, which add the 1, write these.
    """
    if (stated := metadata.get(NORM_CONVENTION_KEY)) is not None:
        return "hf" if stated == "hf" else "mlx" if stated == "mlx" else None
    if (by_trunk := trunk_convention(shapes)) is not None:
        return by_trunk
    made_by = metadata.get("format")
    if made_by == "pt":
        return "hf"
    is_mlx = made_by == "mlx" or _MARK_OF_HEAD in shapes or file.match(NESTED_SIDECAR)
    return "mlx" if is_mlx else None


def sidecar_files(model_path: Path) -> list[Path]:
    """Returns the sidecar's files: those that its index names, else `mtp.safetensors`, else all
    shards, else `NESTED_SIDECAR`, else none. Raises CheckpointError if a file is missing.
    """
    index = model_path / SIDECAR_INDEX
    if index.is_file():
        names = sorted(set(read_index(index).values()))
    elif (model_path / SIDECAR).is_file():
        names = [SIDECAR]
    else:
        counts = [m[1] for f in model_path.glob(SIDECAR_PATTERN) if (m := _SHARD.match(f.name))]
        count = int(counts[0]) if counts else 0
        names = [f"mtp-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        if not names and (model_path / NESTED_SIDECAR).is_file():
            names = [NESTED_SIDECAR]
    for name in names:
        if not (model_path / name).is_file():
            raise CheckpointError(f"The sidecar in {model_path} is incomplete: there is no {name}.")
    return [model_path / name for name in names]


def read_sidecar(model_path: Path) -> HeadTensors | None:
    """Returns the head in the model's sidecar, or None; raises CheckpointError if it is damaged."""
    files = sidecar_files(model_path)
    if not files:
        return None
    tensors: dict[str, mx.array] = {}
    conventions: set[Convention | None] = set()
    for file in files:
        read_header(file)  # checks more of the file than mlx does
        loaded: Any = mx.load(str(file), return_metadata=True)
        tensors.update(loaded[0])
        shapes = {key: value.shape for key, value in loaded[0].items()}
        conventions.add(stated_convention(file, loaded[1], shapes))
    convention = conventions.pop() if len(conventions) == 1 else None
    names = ", ".join(f.relative_to(model_path).as_posix() for f in files)
    if convention is None:
        raise CheckpointError(
            f"{names} in {model_path} does not say in its header whether its norms are "
            f"zero-centred (metadata key {NORM_CONVENTION_KEY!r}: 'hf' or 'mlx'). "
            f"Write it again with `mlx-mtp add-mtp-weights {model_path} --force`."
        )
    _, head = split_head(tensors)
    if not head:
        raise CheckpointError(
            f"{names} in {model_path} has no tensor whose name begins with 'mtp.'."
        )
    return HeadTensors(head, convention, f"sidecar {names}")


def to_mlx(head: HeadTensors) -> dict[str, mx.array]:
    """Returns a head's tensors with the names and expert layout of `MTPHead`.

    Zero-centred norms get their 1 added.
    """
    weights = stack_experts({k: v for k, v in head.tensors.items() if k not in TIED})
    if head.convention == "hf":
        for name in set(NORMS) & weights.keys():
            weights[name] = weights[name].astype(mx.float32) + 1.0
    return weights


def stack_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Returns the weights with all experts stacked under `switch_mlp`.

    The experts may be stored one by one, or as `gate_up_proj`. Raises CheckpointError if one is
    missing.
    """
    out: dict[str, mx.array] = {}
    single: dict[str, dict[int, mx.array]] = {}
    for key, value in weights.items():
        match = EXPERT_KEY.match(key)
        if match:
            name = f"{match[1].removesuffix('experts')}switch_mlp.{match[3]}"
            single.setdefault(name, {})[int(match[2])] = value
        elif key.endswith(".experts.gate_up_proj"):
            base = key.removesuffix("experts.gate_up_proj")
            half = value.shape[-2] // 2
            out[f"{base}switch_mlp.gate_proj.weight"] = value[..., :half, :]
            out[f"{base}switch_mlp.up_proj.weight"] = value[..., half:, :]
        elif key.endswith(".experts.down_proj"):
            out[key.replace(".experts.down_proj", ".switch_mlp.down_proj.weight")] = value
        else:
            out[key] = value
    for name, experts in single.items():
        missing = sorted(set(range(max(experts) + 1)) - set(experts))
        if missing:
            others = f", and so are {len(missing) - 1} others" if missing[1:] else ""
            raise CheckpointError(
                f"{name}: expert {missing[0]} is missing from the checkpoint{others}. Download it "
                "again."
            )
        out[name] = mx.stack([experts[i] for i in sorted(experts)])
    return out


def load_into(head: nn.Module, weights: dict[str, mx.array], source: str) -> None:
    """Load a head's weights for inference; raises CheckpointError if they are FP8 or don't fit."""
    fp8 = [k for k in weights if k.endswith(FP8_SCALES)]
    if fp8:
        raise CheckpointError(
            f"The head in {source} is stored as FP8 ({fp8[0]}), which MLX can't run. Convert it: "
            "`mlx-mtp add-mtp-weights MODEL --source-model MODEL --force`."
        )

    load_weights(head, weights, f"The head in {source}")
    head.eval()


def load_weights(module: nn.Module, weights: Mapping[str, mx.array], what: str) -> None:
    """Quantize the layers that have quantized tensors in `weights`, then load all tensors.

    Raises CheckpointError if they don't fit; its message calls the module `what`.
    """

    def quantization(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights or not hasattr(layer, "to_quantized"):
            return False
        config = infer_quant_config(path, layer, weights)
        return {k: config[k] for k in ("group_size", "bits", "mode")}

    try:
        nn.quantize(module, class_predicate=quantization)
    except (ValueError, ZeroDivisionError, KeyError) as error:
        raise CheckpointError(f"{what} is malformed where it is quantized: {error}") from error
    try:
        module.load_weights(list(weights.items()))
    except ValueError as error:
        why = few_names(str(error).split(",\n"))
        raise CheckpointError(f"{what} does not fit: {why}") from error


def has_router(names: Iterable[str]) -> bool:
    """Returns whether a head with tensors of these names has a mixture of experts."""
    return any(name.startswith("layers.0.mlp.gate.") for name in names)
