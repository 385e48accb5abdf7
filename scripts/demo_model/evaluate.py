"""Measures a checkpoint's directory by PyTorch or by the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from demo_model.dice import DEFAULT_LEAN
from demo_model.evaluation import EvaluationSettings, Log, evaluate
from demo_model.mixture import Settings
from demo_model.network.config import PRESETS, ModelConfig, config_json, smaller
from demo_model.tokenizer import load

_GPU_POSITIONS = 400_000
_CPU_POSITIONS = 16_000
_SMOKE_TOKENS = 24


def config_of(directory: Path) -> ModelConfig:
    """The shape of a checkpoint that this recipe wrote.

    Raises:
        ValueError: it is none of this recipe's.
    """
    found = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for preset in PRESETS.values():
        for config in (preset, smaller(preset)):
            if config_json(config) == found:
                return config
    raise ValueError(f"{directory}/config.json is not of a model that this recipe makes")


def generator_of(directory: Path) -> Settings:
    """What the checkpoint's data was made with."""
    path = directory / "metrics.json"
    if not path.exists():
        return Settings(lean=DEFAULT_LEAN)
    metrics = json.loads(path.read_text(encoding="utf-8"))
    return Settings(**metrics["training"]["generator"])


def settings_of(per_task: int, per_length: int | None, smoke: bool) -> EvaluationSettings:
    """How much is asked; of each length as much as of each task, if nothing else is said."""
    if smoke:
        return EvaluationSettings(per_task, 1, (64,), _SMOKE_TOKENS)
    return EvaluationSettings(per_task, per_task if per_length is None else per_length)


def measure_with_torch(
    directory: Path, config: ModelConfig, device: str, settings: EvaluationSettings, log: Log
) -> dict[str, Any]:
    """The checkpoint's BF16 weights in float32 mathematics."""
    from demo_model.export import load_published
    from demo_model.network.model import DemoModel
    from demo_model.torch_backend import torch_backend

    model = load_published(DemoModel(config), directory).to(device)
    positions = _GPU_POSITIONS if device == "cuda" else _CPU_POSITIONS
    backend = torch_backend(model, positions, settings.max_new_tokens)
    return evaluate(backend, load(), config, settings, generator_of(directory), log)


def measure_with_engine(
    directory: Path, config: ModelConfig, settings: EvaluationSettings, log: Log
) -> dict[str, Any]:
    """The same by this project's engine."""
    from demo_model.engine_backend import engine_backend

    backend, engine = engine_backend(directory, 16, settings.max_new_tokens)
    try:
        return evaluate(backend, load(), config, settings, generator_of(directory), log)
    finally:
        engine.stop()
