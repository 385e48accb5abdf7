"""Step costs before the first request and between runs: measured, and kept in a file."""

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated

import mlx.core as mx
from mlx.utils import tree_flatten
from pydantic import AllowInfNan, BaseModel, NonNegativeInt, PositiveFloat, PositiveInt

from mlx_mtp import __version__
from mlx_mtp.config import MAX_DRAFT_TOKENS, EngineConfig
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.controller import Seconds, StepCosts
from mlx_mtp.speculative.depth import DecodeStep, FixedDepth

logger = logging.getLogger(__name__)

# (rows, depth), the most useful first: time may run out. Others are inferred from these.
_CELLS = (
    *((1, depth) for depth in (0, 1, 2, 3)),
    *((4, depth) for depth in (0, 1, 3)),
    *((2, depth) for depth in (0, 1, 3)),
    *((1, depth) for depth in (4, 6, 8)),
    *((4, depth) for depth in (2, 5, 8)),
)
_CHECKED = frozenset(_CELLS[:4])  # measured at every start: an earlier machine may have been busy
_PROMPT_TOKENS = 8
_TIMED_STEPS = 6  # of a cell; the first compiles kernels and isn't used
_MOST_STEPS = 40  # of a cell, timed or not
_SAVE_SECONDS = 300.0
_FORMAT = 1
_FRESH_SECONDS = 30 * 24 * 3600.0  # drivers and systems change without a new fingerprint


class _Recorder(FixedDepth):
    """Records costs; the acceptance of random tokens says nothing about real ones."""

    def __init__(self, costs: StepCosts) -> None:
        super().__init__(0)
        self._costs = costs
        self.num_timed = 0

    def observe(self, step: DecodeStep) -> None:
        self._costs.observe(step.batch_size, step.depth, step.seconds)
        self.num_timed += step.seconds is not None


def calibrate(
    costs: StepCosts,
    config: EngineConfig,
    runner: ModelRunner,
    *,
    stopping: Callable[[], bool],
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Measure step costs for `config.calibration_seconds` at most, or until `stopping()`.

    Requests of fixed depths run through a scheduler and a core of their own, so that the server's
    counters and rates are not touched. What `costs` already has is measured again in part.
    """
    deadline = clock() + config.calibration_seconds
    recorder = _Recorder(costs)
    core = EngineCore(Scheduler(config, recorder), runner, overlap=config.overlap, clock=clock)

    def over() -> bool:
        return stopping() or clock() > deadline

    table = costs.table()
    # A size that lacks a depth is measured whole: only what ran side by side can be compared.
    partial = {size for size, depth in _CELLS if depth not in table.get(size, ())}
    for size, depth in _CELLS:
        if size > config.max_num_seqs or not (size in partial or (size, depth) in _CHECKED):
            continue
        if over() or not _measure(core, recorder, size, depth, over):
            break
    costs.settle()


def _measure(
    core: EngineCore, recorder: _Recorder, size: int, depth: int, over: Callable[[], bool]
) -> bool:
    """Measure one cell; False if a step failed."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    prompt = (0,) * _PROMPT_TOKENS
    for row in range(size):
        request = Request(f"calibration-{row}", prompt, sampling, num_draft_tokens=depth)
        core.add(Sequence(request, (), _MOST_STEPS * (MAX_DRAFT_TOKENS + 1)))
    recorder.num_timed = 0
    healthy = True
    for _ in range(_MOST_STEPS):
        if over() or recorder.num_timed == _TIMED_STEPS or core.idle:
            break
        healthy = all(output.error is None for output in core.step())
        if not healthy:
            logger.warning("A step failed while step costs were measured")
            break
    core.cancel()
    while not core.idle:
        core.step()
    return healthy


class CostKeeper:
    """Loads or measures costs before the first request, and saves them in `folder`, if any."""

    def __init__(
        self,
        costs: StepCosts,
        config: EngineConfig,
        folder: Path | None,
        fingerprint: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = None if folder is None else folder / f"step-costs-{fingerprint[:32]}.json"
        self._costs = costs
        self._config = config
        self._fingerprint = fingerprint
        self._clock = clock
        self._saved_at = clock()
        self._saved: Seconds = {}
        self._warned = False

    def begin(self, runner: ModelRunner, *, stopping: Callable[[], bool]) -> None:
        """Load what an earlier run measured, and measure what is missing (see `calibrate`)."""
        self._saved = self.load()
        if self._saved:
            self._costs.load(self._saved)
            logger.debug("Step costs of an earlier run: %s", self._saved)
        if self._config.calibration_seconds > 0:
            began, most = self._clock(), self._config.calibration_seconds
            logger.info("Measuring step costs for up to %.0f s.", most)
            calibrate(self._costs, self._config, runner, stopping=stopping)
            logger.info("Step costs measured in %.1f s.", self._clock() - began)
            logger.debug("Step costs: %s", self._costs.table())
            self.save()

    def save_periodically(self) -> None:
        if self._clock() - self._saved_at > _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Replace the file atomically, if there is anything new; a failure is logged once."""
        self._saved_at = self._clock()
        table, path = self._costs.table(), self.path
        if path is None or not table or table == self._saved:
            return
        mark = {"format": _FORMAT, "fingerprint": self._fingerprint, "saved_at": time.time()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A temporary folder is removed with its content, whatever fails.
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".step-costs-") as beside:
                temporary = Path(beside) / path.name
                temporary.write_text(json.dumps(mark | {"seconds": table}))
                os.replace(temporary, path)
            self._saved = table
        except OSError as error:
            if not self._warned:
                logger.warning("Step costs are not kept for the next run: %s", error)
            self._warned = True

    def load(self) -> Seconds:
        if self.path is None:
            return {}
        try:
            file = _File.model_validate_json(self.path.read_bytes())
            if (file.format, file.fingerprint) != (_FORMAT, self._fingerprint):
                raise ValueError("it is of another version, model or machine")
            if not 0 <= time.time() - file.saved_at < _FRESH_SECONDS:
                raise ValueError("it is too old")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            # It will be replaced by what this run measures.
            logger.warning("%s is not used: %s", self.path, str(error).partition("\n")[0])
            return {}
        return file.seconds


class _File(BaseModel):
    format: int
    fingerprint: str
    saved_at: float
    seconds: dict[PositiveInt, dict[NonNegativeInt, Annotated[PositiveFloat, AllowInfNan(False)]]]


def fingerprint(
    model: LoadedModel, num_draft_ids: int | None = None, draft_source: str = "mtp"
) -> str:
    """Of all that a step's cost depends on: the model as loaded, its drafts, mlx, the device."""
    parameters = tree_flatten(model.model.parameters())
    device = mx.device_info()
    parts = [
        model.config,
        [(name, list(value.shape), str(value.dtype)) for name, value in parameters],
        [str(device.get(name)) for name in ("device_name", "architecture", "memory_size")],
        [str(mx.default_device()), platform.platform(), os.cpu_count(), metadata.version("mlx")],
        [__version__, draft_source, num_draft_ids],
    ]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
