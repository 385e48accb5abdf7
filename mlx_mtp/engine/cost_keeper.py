"""Step costs across runs: loaded or measured before the first request, and saved now and then."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from importlib import metadata

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_mtp import __version__
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.calibration import calibrate
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.speculative.cost_store import CostStore
from mlx_mtp.speculative.costs import Seconds, StepCosts

logger = logging.getLogger(__name__)

_SAVE_SECONDS = 300.0


class CostKeeper:
    """Looks after the costs that the depth follows. All of it happens on the engine's thread.

    Args:
        costs: those that the controller uses and keeps up to date.
        store: where they are kept between runs, or None.
        clock: seconds.
    """

    def __init__(
        self,
        costs: StepCosts,
        store: CostStore | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._costs = costs
        self._store = store
        self._clock = clock
        self._saved_at = clock()
        self._saved: Seconds = {}

    def begin(
        self, config: EngineConfig, runner: ModelRunner, *, stopping: Callable[[], bool]
    ) -> None:
        """Load what an earlier run measured; measure what is missing, if there is time for it.

        Args:
            config: the engine's.
            runner: idle, and idle again afterwards.
            stopping: asked after each step; ends the measuring.
        """
        self._saved = self._store.load() if self._store is not None else {}
        if self._saved:
            self._costs.load(self._saved)
            logger.debug("Step costs of an earlier run: %s", _described(self._saved))
        if config.calibration_seconds > 0:
            began = self._clock()
            calibrate(self._costs, config, runner, stopping=stopping)
            logger.info("Step costs measured in %.1f s.", self._clock() - began)
            logger.debug("Step costs: %s", _described(self._costs.table()))
            self.save()

    def save_now_and_then(self) -> None:
        """Called after every step."""
        if self._clock() - self._saved_at > _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write what is known, if there is anything new."""
        self._saved_at = self._clock()
        table = self._costs.table()
        if self._store is not None and table and table != self._saved:
            self._store.save(table)
            self._saved = table


def fingerprint(model: LoadedModel, num_draft_ids: int | None = None) -> str:
    """Of all that a step's cost depends on: the model as it is loaded, mlx, the device, us.

    Args:
        model: as it is loaded.
        num_draft_ids: size of a reduced draft vocabulary.
    """
    parameters = tree_flatten(model.model.parameters())
    device = mx.device_info()
    parts = [
        model.config,
        [(name, list(value.shape), str(value.dtype)) for name, value in parameters],
        {name: str(device.get(name)) for name in ("device_name", "architecture", "memory_size")},
        [str(mx.default_device()), platform.platform(), os.cpu_count(), metadata.version("mlx")],
        __version__,
        num_draft_ids,
    ]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _described(table: Seconds) -> str:
    """For the log: milliseconds at each depth, by batch size."""
    rows = []
    for size, row in table.items():
        cells = ", ".join(f"{depth}: {seconds * 1e3:.2f}" for depth, seconds in row.items())
        rows.append(f"{size} {'row' if size == 1 else 'rows'} {{{cells}}} ms")
    return "; ".join(rows) or "none"
