"""Sources and targets for the converter, and the head that it should make from a source."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.support.tiny_models import Layout, config_json, hf_tensors

BLOCK = (24, 40)  # rows and columns of an FP8 block; neither divides all matrices
PT = {"format": "pt"}
TYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32, "FP8": mx.bfloat16}
_NORMS = ("norm.weight", "layernorm.weight", "pre_fc_norm_embedding.weight")
_NORMS += ("pre_fc_norm_hidden.weight", "q_norm.weight", "k_norm.weight")
_NAMES = {mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32", mx.int64: "I64"}
_NAMES |= {mx.uint8: "U8", mx.uint16: "U16", mx.uint32: "U32", mx.int32: "I32"}
Tensors = Mapping[str, mx.array]


def is_norm(name: str) -> bool:
    return name.endswith(_NORMS)


def to_fp8(values: np.ndarray) -> tuple[mx.array, mx.array, mx.array]:
    """Returns FP8 codes, a BF16 scale for each block, and the float32 values that they encode."""
    *lead, rows, columns = values.shape
    shape = (*lead, -(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    scales = mx.array(0.01 + 0.003 * (np.arange(np.prod(shape)) % 7).reshape(shape))
    scales = scales.astype(mx.bfloat16)
    each = np.kron(np.array(scales.astype(mx.float32)), np.ones((*[1] * len(lead), *BLOCK)))
    each = mx.array(each[..., :rows, :columns].astype(np.float32))
    codes = mx.to_fp8(mx.array(values) / each)
    return codes, scales, mx.from_fp8(codes, mx.float32) * each


def write_file(path: Path, tensors: Tensors, metadata: Mapping[str, str] = PT) -> None:
    """Write a safetensors file; uint8 tensors are FP8, except scales of some of mlx's modes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    data = bytearray()  # a bytearray grows in place
    for name, value in tensors.items():
        is_fp8 = value.dtype == mx.uint8 and not name.endswith(".scales")
        dtype = "F8_E4M3" if is_fp8 else _NAMES[value.dtype]
        own = np.array(mx.contiguous(value).view(mx.uint8)).tobytes()
        offsets = [len(data), len(data) + len(own)]
        header[name] = {"dtype": dtype, "shape": value.shape, "data_offsets": offsets}
        data += own
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_file(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    tensors, metadata = mx.load(str(path), return_metadata=True)
    mx.eval(tensors)
    return tensors, metadata


def encode_all(
    tensors: Mapping[str, np.ndarray], storage: str = "BF16", bf16: tuple[str, ...] = ()
) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Returns a checkpoint's tensors as stored in a file, and the float32 values they encode.

    `storage` is "BF16", "F16", "F32" or "FP8". With "FP8", norms and routers are BF16 as in
    published checkpoints, and so are names that end with one of `bf16`.
    """
    stored: dict[str, mx.array] = {}
    meant: dict[str, mx.array] = {}
    for name, values in tensors.items():
        plain = values.ndim < 2 or name.endswith(("mlp.gate.weight", "expert_gate.weight"))
        if storage == "FP8" and not plain and "conv1d" not in name and not name.endswith(bf16):
            stored[name], stored[f"{name}_scale_inv"], meant[name] = to_fp8(values)
        else:
            stored[name] = mx.array(values).astype(TYPES[storage])
            meant[name] = stored[name].astype(mx.float32)
    return stored, meant


def write_source(
    path: Path,
    layout: Layout,
    storage: str = "BF16",
    *,
    shards: int = 1,
    bf16: tuple[str, ...] = (),
    **change: Any,
) -> dict[str, mx.array]:
    """Write a Hugging Face checkpoint; returns the values that its tensors encode, in float32.

    With several shards there is an index, and the head is in the last two; `change` updates
    config.json.
    """
    config = {**config_json(layout), **change}
    if storage == "FP8":
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": BLOCK}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    stored, meant = encode_all(hf_tensors(layout), storage, bf16)
    if shards == 1:
        write_file(path / "model.safetensors", stored)
        return meant
    head = [name for name in stored if "mtp." in name]
    trunk = [name for name in stored if "mtp." not in name]
    groups = [*np.array_split(trunk, shards - 2), *np.array_split(head, 2)]
    names = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    _write_groups(path, dict(zip(names, groups)), stored, PT, "model")
    return meant


def split_sidecar(directory: Path) -> None:
    """Replace a directory's sidecar by one of two files and an index."""
    tensors, metadata = read_file(directory / "mtp.safetensors")
    (directory / "mtp.safetensors").unlink()
    names = [f"mtp-0123abcd-0000{number}-of-00002.safetensors" for number in (1, 2)]
    groups = dict(zip(names, np.array_split(list(tensors), 2)))
    _write_groups(directory, groups, tensors, metadata, "mtp")


def _write_groups(path, groups, stored, metadata, stem) -> None:
    for file, names in groups.items():
        write_file(path / file, {str(name): stored[name] for name in names}, metadata)
    weight_map = {str(name): file for file, names in groups.items() for name in names}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def write_target(
    path: Path, layout: Layout, quantization: Mapping[str, Any] | None = None, **change: Any
) -> Path:
    """Write what the converter reads of an MLX model's directory: config.json."""
    path.mkdir(parents=True, exist_ok=True)
    config = config_json(layout)
    config.get("text_config", config).update(change)
    if quantization is not None:
        config["quantization"] = dict(quantization)
    (path / "config.json").write_text(json.dumps(config))
    return path


def expected_head(meant: Tensors, prefix: str = "mtp.") -> dict[str, mx.array]:
    """Returns the reference head: in MLX's layout and float32, with 1 + w in the norms."""
    own = {k.removeprefix(prefix): v for k, v in meant.items() if k.startswith(prefix)}
    experts, switch = "layers.0.mlp.experts.", "layers.0.mlp.switch_mlp."
    out = {k: v + 1 if is_norm(k) else v for k, v in own.items() if experts not in k}
    if f"{experts}gate_up_proj" in own:
        both = own[f"{experts}gate_up_proj"]
        half = both.shape[1] // 2
        out[f"{switch}gate_proj.weight"] = both[:, :half]
        out[f"{switch}up_proj.weight"] = both[:, half:]
        out[f"{switch}down_proj.weight"] = own[f"{experts}down_proj"]
    elif f"{experts}0.up_proj.weight" in own:
        count = sum(k.startswith(experts) for k in own) // 3
        for part in ("gate_proj", "up_proj", "down_proj"):
            stack = [own[f"{experts}{i}.{part}.weight"] for i in range(count)]
            out[f"{switch}{part}.weight"] = mx.stack(stack)
    return out
