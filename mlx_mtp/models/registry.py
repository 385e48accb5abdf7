"""The families this package serves."""

from __future__ import annotations

from typing import Any

from mlx_mtp.errors import UnsupportedModelError
from mlx_mtp.models.family import Family
from mlx_mtp.models.qwen3_5 import Qwen35
from mlx_mtp.models.qwen3_next import Qwen3Next

FAMILIES: dict[str, Family] = {
    model_type: family for family in (Qwen3Next(), Qwen35()) for model_type in family.model_types
}


def family_of(config: dict[str, Any], where: str) -> Family:
    """The family that serves a config.json.

    Raises:
        UnsupportedModelError: lists the model types that are supported.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModelError(
            f"{where} has model_type {model_type!r}, which mlx-mtp does not serve. "
            f"Supported: {', '.join(sorted(FAMILIES))}."
        )
    return family
