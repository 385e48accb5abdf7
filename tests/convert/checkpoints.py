"""Sources and targets for the converter, written and read with NumPy and nothing of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.tiny_models import Layout, config_json, hf_tensors

NORM_NAMES = ("norm.weight", "layernorm.weight", "pre_fc_norm_embedding.weight")
NORM_NAMES += ("pre_fc_norm_hidden.weight", "q_norm.weight", "k_norm.weight")
_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4", "U8": "u1", "F8_E4M3": "u1"}


class Raw(NamedTuple):
    """A tensor as a file has it: the format's type name, and its bits."""

    dtype: str
    bits: np.ndarray


def bf16(values: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16, to nearest and ties to even."""
    words = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """The reverse, which is exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def e4m3_value(code: int) -> float:
    """One code of E4M3, from the definition of the type."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 0xF, code & 0x7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


_VALUES = np.array([e4m3_value(code) for code in range(256)], dtype=np.float32)
_MIDDLES = (_VALUES[1:0x7F] + _VALUES[: 0x7F - 1]) / 2


def to_fp8(values: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The nearest codes, BF16 bits of the scales, and the float32 values that they stand for.

    Args:
        values: [.., out, in].
        block: rows and columns that share a scale.
    """
    *lead, rows, columns = values.shape
    scales = np.zeros((*lead, -(-rows // block), -(-columns // block)), np.uint16)
    codes, meant = np.zeros(values.shape, np.uint8), np.zeros(values.shape, np.float32)
    for index in np.ndindex(*scales.shape):
        *which, i, j = index
        there = (*which, slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
        part = values[there]
        scales[index] = bf16(np.abs(part).max().reshape(1) / 448)[0]
        scale = from_bf16(scales[index].reshape(1))[0]
        nearest = np.searchsorted(_MIDDLES, np.abs(part / scale)).astype(np.uint8)
        codes[there] = np.where(part < 0, nearest | 0x80, nearest)
        meant[there] = _VALUES[codes[there]] * scale
    return codes, scales, meant


def write_file(path: Path, tensors: Mapping[str, Raw], metadata: Mapping[str, str]) -> None:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, raw in tensors.items():
        begin, end = end, end + raw.bits.nbytes
        shape = list(raw.bits.shape)
        header[name] = {"dtype": raw.dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    data = [np.ascontiguousarray(raw.bits).tobytes() for raw in tensors.values()]
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


def read_file(path: Path) -> tuple[dict[str, Raw], dict[str, str]]:
    """Its tensors and metadata."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + n for n in entry["data_offsets"])
        bits = np.frombuffer(data[begin:end], _NUMPY[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = Raw(entry["dtype"], bits)
    return tensors, metadata


def encode(values: np.ndarray, storage: str) -> Raw:
    """float32 in a type of this name."""
    return Raw(storage, bf16(values) if storage == "BF16" else values.astype(_NUMPY[storage]))


def decode(raw: Raw) -> np.ndarray:
    """float32 of any float type."""
    return from_bf16(raw.bits) if raw.dtype == "BF16" else raw.bits.astype(np.float32)


def is_norm(name: str) -> bool:
    return name.endswith(NORM_NAMES)


def encode_all(
    tensors: Mapping[str, np.ndarray], storage: str, block: int = 32
) -> tuple[dict[str, Raw], dict[str, np.ndarray]]:
    """A checkpoint's tensors as a file has them, and the float32 values that they stand for.

    Args:
        tensors: by their names in the checkpoint.
        storage: "BF16", "F16", "F32" or "FP8"; with FP8, norms and routers are BF16 as published.
        block: of FP8.
    """
    raws: dict[str, Raw] = {}
    meant: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        plain = values.ndim < 2 or name.endswith(("mlp.gate.weight", "expert_gate.weight"))
        if storage == "FP8" and not plain and "conv1d" not in name:
            codes, scales, meant[name] = to_fp8(values, block)
            raws[name] = Raw("F8_E4M3", codes)
            raws[f"{name}_scale_inv"] = Raw("BF16", scales)
        else:
            raws[name] = encode(values, "BF16" if storage == "FP8" else storage)
            meant[name] = decode(raws[name])
    return raws, meant


def write_source(
    path: Path,
    layout: Layout,
    storage: str = "BF16",
    *,
    shards: int = 1,
    change: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """A Hugging Face checkpoint; returns what its tensors stand for, in float32.

    Args:
        storage: see `encode_all`.
        shards: files; above one there is an index, and the head is spread over the last two.
        change: of config.json.
    """
    config = {**config_json(layout), **(change or {})}
    if storage == "FP8":
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    raws, meant = encode_all(hf_tensors(layout), storage)
    if shards == 1:
        write_file(path / "model.safetensors", raws, {"format": "pt"})
        return meant
    head = [name for name in raws if "mtp." in name]
    trunk = [name for name in raws if "mtp." not in name]
    groups = [*np.array_split(trunk, shards - 2), *np.array_split(head, 2)]
    names = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    _write_groups(path, dict(zip(names, groups)), raws, {"format": "pt"}, "model")
    return meant


def split_sidecar(directory: Path) -> None:
    """A sidecar of two files and an index, in the place of one."""
    tensors, metadata = read_file(directory / "mtp.safetensors")
    (directory / "mtp.safetensors").unlink()
    names = [f"mtp-0123abcd-0000{number}-of-00002.safetensors" for number in (1, 2)]
    groups = np.array_split(list(tensors), 2)
    _write_groups(directory, dict(zip(names, groups)), tensors, metadata, "mtp")


def _write_groups(path, groups, raws, metadata, stem) -> None:
    weight_map: dict[str, str] = {}
    for file, names in groups.items():
        write_file(path / file, {str(name): raws[name] for name in names}, metadata)
        weight_map |= {str(name): file for name in names}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def write_target(
    path: Path, layout: Layout, quantization: Mapping[str, Any] | None = None, **change: Any
) -> Path:
    """An MLX model's directory as far as the converter looks at it: config.json."""
    path.mkdir(parents=True, exist_ok=True)
    config = config_json(layout)
    config.get("text_config", config).update(change)
    if quantization is not None:
        config["quantization"] = dict(quantization)
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_large_source(path: Path, experts: int) -> None:
    """A head of 1.6 MB per expert, stacked, so that a run takes time and memory."""
    layout = Layout("qwen3_next", stacked_experts=True)
    write_target(path, layout, num_experts=experts, moe_intermediate_size=4096)
    raws, _ = encode_all(hf_tensors(layout), "BF16")
    some, mlp = raws["model.embed_tokens.weight"].bits[:89], "mtp.layers.0.mlp."
    for name, shape in (
        ("gate.weight", (experts, 64)),
        ("experts.gate_up_proj", (experts, 8192, 64)),
        ("experts.down_proj", (experts, 64, 4096)),
    ):
        raws[mlp + name] = Raw("BF16", np.resize(some, shape))
    write_file(path / "model.safetensors", raws, {"format": "pt"})


def expected_head(meant: Mapping[str, np.ndarray], prefix: str = "mtp.") -> dict[str, np.ndarray]:
    """The head in MLX's layout, float32, with 1 + w in the norms: the reference."""
    own = {k.removeprefix(prefix): v for k, v in meant.items() if k.startswith(prefix)}
    out = {
        name: (values + np.float32(1)).astype(np.float32) if is_norm(name) else values
        for name, values in own.items()
        if ".experts." not in name
    }
    experts, switch = "layers.0.mlp.experts.", "layers.0.mlp.switch_mlp."
    if f"{experts}gate_up_proj" in own:
        both = own[f"{experts}gate_up_proj"]
        half = both.shape[1] // 2
        out[f"{switch}gate_proj.weight"] = both[:, :half]
        out[f"{switch}up_proj.weight"] = both[:, half:]
        out[f"{switch}down_proj.weight"] = own[f"{experts}down_proj"]
    elif f"{experts}0.up_proj.weight" in own:
        for part in ("gate_proj", "up_proj", "down_proj"):
            count = sum(k.startswith(experts) and k.endswith(f"{part}.weight") for k in own)
            stack = [own[f"{experts}{i}.{part}.weight"] for i in range(count)]
            out[f"{switch}{part}.weight"] = np.stack(stack)
    return out
