"""What a report must say of the machine, the versions and the model."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

import mlx.core as mx

from mlx_mtp import __version__
from mlx_mtp.kernels import gpu
from mlx_mtp.machine import physical_memory
from mlx_mtp.models.loaded import LoadedModel

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it ran.

    Args:
        versions: of this package, mlx, mlx-lm and Python.
        os: name and release.
        device: that mlx computes on, by name.
        memory: of the device, bytes.
        backend: "cpu", "metal" or "cuda".
        details: what else there is to know of the backend, in words.
    """

    versions: dict[str, str]
    os: str
    device: str
    memory: int
    backend: str
    details: str

    @property
    def memory_text(self) -> str:
        """In GiB."""
        return f"{self.memory / _GIB:.0f} GiB"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What was tested.

    Args:
        path: of its directory.
        model_type: as in config.json.
        dtype: that it computes in.
        quantization: bits and group size in words; None without.
        head: where its head came from.
    """

    path: str
    model_type: str
    dtype: str
    quantization: str | None
    head: str | None


def describe_machine(details: str) -> Machine:
    """This one.

    Args:
        details: of the backend, in words.
    """
    info = mx.device_info()
    memory = info.get("memory_size") or info.get("total_memory") or physical_memory()
    versions = {"mlx-mtp": __version__, "mlx": _version("mlx"), "mlx-lm": _version("mlx-lm")}
    return Machine(
        versions=versions | {"Python": platform.python_version()},
        os=platform.platform(),
        device=str(info.get("device_name") or info.get("architecture") or platform.machine()),
        memory=int(memory),
        backend=gpu.backend() or "cpu",
        details=details,
    )


def describe_model(model: LoadedModel) -> ModelFacts:
    """A loaded one."""
    told = model.config.get("quantization")
    quantization = None
    if isinstance(told, Mapping):
        quantization = f"{told.get('bits')} bits, groups of {told.get('group_size')}"
    return ModelFacts(
        path=str(model.path),
        model_type=model.model_type,
        dtype=str(compute_dtype(model)).removeprefix("mlx.core."),
        quantization=quantization,
        head=model.head_source,
    )


def compute_dtype(model: LoadedModel) -> mx.Dtype:
    """What the model's activations are."""
    dtype: mx.Dtype = model.causal_lm.model.norm.weight.dtype
    return dtype


def computes_exactly(dtype: mx.Dtype) -> bool:
    """Whether products are float32 with all their digits, so that only ties may part two runs.

    GPUs round their inputs to TF32 unless MLX_ENABLE_TF32 is 0.
    """
    rounded = gpu.backend() is not None and os.environ.get("MLX_ENABLE_TF32", "1") != "0"
    return dtype == mx.float32 and not rounded


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
