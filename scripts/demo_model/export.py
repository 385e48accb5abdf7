"""Checkpoints in the layout of the published models: read and written."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demo_model.network.config import ModelConfig, config_json
from demo_model.network.model import DemoModel
from demo_model.tokenizer import END_ID, PAD_ID, write_files

MAX_FILE = 15 << 20
"""Bytes of one file of tensors."""
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


def published(model: DemoModel) -> dict[str, Tensor]:
    """The model's tensors in BF16, by the names of the published checkpoint of its family."""
    out: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.detach().float().cpu()
        if "norm" in name and not name.endswith("linear_attn.norm.weight"):
            # Some loaders add the 1 of a zero-centred norm in BF16: 1 + w is to lose nothing then.
            value = (1.0 + value).bfloat16().float() - 1.0
        out.update(_apart(name, value))
    return {_outer(k, model.config): v.bfloat16().contiguous() for k, v in out.items()}


def _apart(name: str, value: Tensor) -> dict[str, Tensor]:
    """Stacked experts one by one; anything else as it is."""
    base, _, last = name.rpartition(".")
    if not base.endswith("experts"):
        return {name: value}
    if last == "down_proj":
        return {f"{base}.{i}.down_proj.weight": one for i, one in enumerate(value)}
    out: dict[str, Tensor] = {}
    for i, one in enumerate(value):
        gate, up = one.chunk(2)
        out |= {f"{base}.{i}.gate_proj.weight": gate, f"{base}.{i}.up_proj.weight": up}
    return out


def _outer(name: str, config: ModelConfig) -> str:
    """Qwen3.5's text model lies beside a vision tower."""
    if config.family == "qwen3_5" and name.startswith("model."):
        return name.replace("model.", "model.language_model.", 1)
    return name


def load_published(model: DemoModel, directory: Path) -> DemoModel:
    """Give a model the weights of a checkpoint that `write_checkpoint` wrote."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("model*.safetensors")):
        found |= load_file(file)
    experts: dict[str, dict[tuple[int, str], Tensor]] = defaultdict(dict)
    state: dict[str, Tensor] = {}
    for name, value in found.items():
        name = name.replace("model.language_model.", "model.", 1)
        match = _EXPERT.fullmatch(name)
        if match:
            experts[match[1]][int(match[2]), match[3]] = value.float()
        else:
            state[name] = value.float()
    for base, parts in experts.items():
        count = range(len(parts) // 3)
        joined = [torch.cat([parts[i, "gate"], parts[i, "up"]]) for i in count]
        state[f"{base}gate_up_proj"] = torch.stack(joined)
        state[f"{base}down_proj"] = torch.stack([parts[i, "down"] for i in count])
    model.load_state_dict(state)
    return model


def write_checkpoint(model: DemoModel, directory: Path) -> dict[str, Tensor]:
    """Write weights, configuration and tokenizer; returns the weights as they were rounded."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("model*.safetensors*"):
        old.unlink()
    tensors = published(model)
    _write_tensors(tensors, directory)
    _write_json(directory / "config.json", config_json(model.config))
    generation = {"do_sample": False, "eos_token_id": [END_ID, PAD_ID], "pad_token_id": PAD_ID}
    _write_json(directory / "generation_config.json", generation)
    write_files(directory, model.config.tool_format)
    return tensors


def _write_tensors(tensors: dict[str, Tensor], directory: Path) -> None:
    """In files of at most `MAX_FILE` bytes with an index, or in one without; the head is last."""
    from safetensors.torch import save_file

    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name in sorted(tensors, key=lambda name: (name.startswith("mtp."), name)):
        nbytes = tensors[name].numel() * 2
        if files[-1] and size + nbytes > MAX_FILE:
            files.append({})
            size = 0
        files[-1][name] = tensors[name]
        size += nbytes
    if len(files) == 1:
        save_file(files[0], directory / "model.safetensors", metadata={"format": "pt"})
        return
    where: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(part, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    total = sum(value.numel() * 2 for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
