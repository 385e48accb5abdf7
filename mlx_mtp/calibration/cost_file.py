"""The file that keeps the costs of steps and chunks between runs."""

import hashlib
import json
import logging
import os
import platform
import stat
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import mlx.core as mx
from mlx.utils import tree_flatten
from pydantic import Field, TypeAdapter, ValidationError

from mlx_mtp import __version__
from mlx_mtp.kept import keep_json
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.speculative.costs import LEAST_COST, CostKey, Table

logger = logging.getLogger(__name__)

_FORMAT = 9
_LARGEST = 1 << 22  # maximum size of a file, in bytes
_FRESH_SECONDS = 30 * 24 * 3600.0  # maximum age: the fingerprint does not cover drivers
_Size = Annotated[float, Field(ge=0, le=1 << 20)]
_Cost = Annotated[float, Field(ge=LEAST_COST, le=1e6)]
_Count = Annotated[int, Field(ge=1, le=1 << 20)]
_COSTS = TypeAdapter(list[tuple[str, _Count, _Size, _Cost]])


class CostFile:
    """Keeps a table of costs in a file in `folder`, named by `fingerprint`; no folder: no file."""

    def __init__(self, folder: Path | None, fingerprint: str) -> None:
        name = f"step-costs-{_FORMAT}-{fingerprint[:32]}.json"
        self.path = None if folder is None else folder / name

    def save(self, table: Table) -> None:
        """Replace the file atomically; a failure is logged."""
        try:
            if self.path is not None:
                keep_json(self.path, [(*key, cost) for key, cost in table.items()])
        except OSError as error:
            logger.warning("Step costs are not kept for the next run: %s", error)

    def load(self) -> Table:
        """Returns the costs that an earlier run saved, or {} if they can't be used."""
        if self.path is None or not self.path.exists():
            return {}
        try:
            status = self.path.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
                raise ValueError(f"it is not a file of at most {_LARGEST:,} bytes")
            if abs(time.time() - status.st_mtime) > _FRESH_SECONDS:
                raise ValueError("it is too old")
            costs = _COSTS.validate_json(self.path.read_bytes())
        except (OSError, ValueError) as error:
            # `save` will replace the file with the costs that this run measures.
            why = "it is damaged" if isinstance(error, ValidationError) else error
            logger.warning("%s is not used: %s", self.path, why)
            return {}
        return {CostKey(kind, rows, size): cost for kind, rows, size, cost in costs}


def fingerprint(model: LoadedModel, num_draft_ids: int | None, sources: Sequence[str]) -> str:
    """Returns a hash of everything costs depend on: model, draft ids, sources, mlx, device."""
    parameters = tree_flatten(model.model.parameters())
    device = mx.device_info()
    parts = [
        model.config,
        [(name, list(value.shape), str(value.dtype)) for name, value in parameters],
        [str(device.get(name)) for name in ("device_name", "architecture", "memory_size")],
        [str(mx.default_device()), platform.platform(), os.cpu_count(), metadata.version("mlx")],
        [__version__, *sources, num_draft_ids],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
