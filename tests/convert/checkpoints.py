"""Sources and targets for the converter, written and read with NumPy and nothing of ours."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_models import Layout, config_json, hf_tensors

NORM_NAMES = ("norm.weight", "layernorm.weight", "pre_fc_norm_embedding.weight")
NORM_NAMES += ("pre_fc_norm_hidden.weight", "q_norm.weight", "k_norm.weight")
_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4", "U8": "u1", "F8_E4M3": "u1"}
_NUMPY |= {"I64": "<i8", "U16": "<u2"}
_NAMES = {np.dtype(v).newbyteorder("<"): k for k, v in _NUMPY.items() if k not in ("BF16", "U16")}


@dataclass(frozen=True)
class Raw:
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
_POSITIVE = _VALUES[:0x7F]


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """The nearest codes."""
    middles = (_POSITIVE[1:] + _POSITIVE[:-1]) / 2
    codes = np.searchsorted(middles, np.abs(values)).astype(np.uint8)
    return np.where(values < 0, codes | 0x80, codes).astype(np.uint8)


def to_fp8(values: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, BF16 bits of the scales, and the float32 values that they stand for, block by block.

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
        scales[index] = bf16(np.abs(part).max(keepdims=True).ravel()[:1] / 448)[0]
        scale = from_bf16(scales[index].reshape(1))[0]
        codes[there] = to_e4m3(part / scale)
        meant[there] = _VALUES[codes[there]] * scale
    return codes, scales, meant


def write_file(path: Path, tensors: Mapping[str, Raw], metadata: Mapping[str, str]) -> None:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, raw in tensors.items():
        end = offset + raw.bits.nbytes
        shape = list(raw.bits.shape)
        header[name] = {"dtype": raw.dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for raw in tensors.values():
            file.write(np.ascontiguousarray(raw.bits).tobytes())


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
    if storage == "BF16":
        return Raw("BF16", bf16(values))
    return Raw(storage, values.astype(_NUMPY[storage]))


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
    metadata: Mapping[str, str] | None = None,
) -> dict[str, np.ndarray]:
    """A Hugging Face checkpoint; returns what its tensors stand for, in float32.

    Args:
        path: the directory to make.
        layout: family, experts, prefix of the head.
        storage: see `encode_all`.
        shards: files; above one there is an index, and the head is spread over the last two.
        change: of config.json.
        metadata: of the files.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {**config_json(layout), **(change or {})}
    if storage == "FP8":
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (path / "config.json").write_text(json.dumps(config))
    raws, meant = encode_all(hf_tensors(layout), storage)
    said = {"format": "pt"} if metadata is None else metadata
    if shards == 1:
        write_file(path / "model.safetensors", raws, said)
    else:
        write_shards(path, raws, shards, said)
    return meant


def write_shards(
    path: Path, raws: Mapping[str, Raw], shards: int, metadata: Mapping[str, str]
) -> dict[str, str]:
    """Files and index; the trunk lies in the first ones, the head in the last two."""
    weight_map: dict[str, str] = {}
    trunk = [name for name in raws if "mtp." not in name]
    head = [name for name in raws if "mtp." in name]
    groups = [*_parts(trunk, shards - 2), *_parts(head, 2)]
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        write_file(path / file, {name: raws[name] for name in names}, metadata)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map


def _parts(names: list[str], count: int) -> Iterable[list[str]]:
    return [[str(n) for n in part] for part in np.array_split(np.array(names), count)]


def write_target(
    path: Path, layout: Layout, quantization: Mapping[str, Any] | None = None, **change: Any
) -> Path:
    """An MLX model's directory as far as the converter looks at it: config.json."""
    path.mkdir(parents=True, exist_ok=True)
    config = config_json(layout)
    inner = config.get("text_config", config)
    inner.update(change)
    if quantization is not None:
        config["quantization"] = dict(quantization)
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_large_source(path: Path, experts: int) -> None:
    """A head of 1.6 MB per expert, so that a run takes time and memory."""
    rng = np.random.default_rng(0)
    config = json.loads((write_target(path, Layout("qwen3_next")) / "config.json").read_text())
    config |= {"num_experts": experts, "moe_intermediate_size": 512, "hidden_size": 512}
    (path / "config.json").write_text(json.dumps(config))
    mlp = "layers.0.mlp."
    shapes = {
        **{f"{n}.weight": (512,) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")},
        "layers.0.input_layernorm.weight": (512,),
        "layers.0.post_attention_layernorm.weight": (512,),
        "layers.0.self_attn.q_norm.weight": (32,),
        "layers.0.self_attn.k_norm.weight": (32,),
        "layers.0.self_attn.q_proj.weight": (256, 512),
        "layers.0.self_attn.k_proj.weight": (64, 512),
        "layers.0.self_attn.v_proj.weight": (64, 512),
        "layers.0.self_attn.o_proj.weight": (512, 128),
        "fc.weight": (512, 1024),
        f"{mlp}gate.weight": (experts, 512),
        f"{mlp}shared_expert_gate.weight": (1, 512),
        f"{mlp}shared_expert.gate_proj.weight": (32, 512),
        f"{mlp}shared_expert.up_proj.weight": (32, 512),
        f"{mlp}shared_expert.down_proj.weight": (512, 32),
        f"{mlp}experts.gate_up_proj": (experts, 1024, 512),
        f"{mlp}experts.down_proj": (experts, 512, 512),
    }
    raws = {
        f"mtp.{name}": Raw("BF16", bf16(rng.standard_normal(shape, dtype=np.float32)))
        for name, shape in shapes.items()
    }
    write_file(path / "model.safetensors", raws, {"format": "pt"})


def expected_head(meant: Mapping[str, np.ndarray], prefix: str = "mtp.") -> dict[str, np.ndarray]:
    """The head in MLX's layout, float32, with 1 + w in the norms: the reference."""
    own = {k.removeprefix(prefix): v for k, v in meant.items() if k.startswith(prefix)}
    out: dict[str, np.ndarray] = {}
    mlp = "layers.0.mlp."
    for name, values in own.items():
        if ".experts." in name:
            continue
        out[name] = (values + np.float32(1)).astype(np.float32) if is_norm(name) else values
    if f"{mlp}experts.gate_up_proj" in own:
        both = own[f"{mlp}experts.gate_up_proj"]
        half = both.shape[1] // 2
        out[f"{mlp}switch_mlp.gate_proj.weight"] = both[:, :half]
        out[f"{mlp}switch_mlp.up_proj.weight"] = both[:, half:]
        out[f"{mlp}switch_mlp.down_proj.weight"] = own[f"{mlp}experts.down_proj"]
    elif f"{mlp}experts.0.up_proj.weight" in own:
        for part in ("gate_proj", "up_proj", "down_proj"):
            count = sum(k.endswith(f".{part}.weight") and ".experts." in k for k in own)
            stack = [own[f"{mlp}experts.{i}.{part}.weight"] for i in range(count)]
            out[f"{mlp}switch_mlp.{part}.weight"] = np.stack(stack)
    return out


def affine(values: np.ndarray, bits: int, group_size: int) -> tuple[np.ndarray, ...]:
    """MLX's affine quantization in NumPy: codes [.., in], BF16 bits of scales and biases."""
    groups = values.astype(np.float32).reshape(*values.shape[:-1], -1, group_size)
    top = np.float32(2**bits - 1)
    low, high = groups.min(-1), groups.max(-1)
    from_below = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / top, np.float32(1e-7))
    scale = np.where(from_below, scale, -scale)
    edge = np.where(from_below, low, high)
    steps = np.rint(edge / scale)
    nonzero = steps != 0
    scale = np.where(nonzero, edge / np.where(nonzero, steps, 1), scale).astype(np.float32)
    bias = np.where(nonzero, edge, 0).astype(np.float32)
    codes = np.clip(np.rint((groups - bias[..., None]) / scale[..., None]), 0, top)
    return codes.reshape(values.shape).astype(np.uint32), bf16(scale), bf16(bias)


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes out of 32-bit words, lowest bits first; for 2, 4 and 8 bits."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = words[..., None] >> shifts & np.uint32(2**bits - 1)
    return codes.reshape(*words.shape[:-1], -1)
