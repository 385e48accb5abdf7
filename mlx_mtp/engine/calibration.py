"""Measures what a step costs at a few batch sizes and depths, before requests are served."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from mlx_mtp.config import MAX_DRAFT_TOKENS, EngineConfig
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.costs import StepCosts
from mlx_mtp.speculative.depth import DecodeStep, FixedDepth

logger = logging.getLogger(__name__)

_CELLS = (
    *((1, depth) for depth in (0, 1, 2, 3)),
    *((4, depth) for depth in (0, 1, 3)),
    *((2, depth) for depth in (0, 1, 3)),
    *((1, depth) for depth in (4, 6, 8)),
    *((4, depth) for depth in (2, 5, 8)),
)
"""(rows, depth), the most telling first: time may run out. The others are inferred from these."""
_CHECKED = frozenset(_CELLS[:4])
"""Measured at every start, even if they are known: an earlier run's machine may have been busy."""
_PROMPT_TOKENS = 8
_STEPS = 6
"""Timed steps of a cell; the first compiles kernels and isn't used."""
_PATIENCE = 40
"""Steps after which a cell is given up, should they not be timed."""


class _Recorder(FixedDepth):
    """Takes in costs; what random tokens get accepted says nothing about real ones."""

    def __init__(self, costs: StepCosts) -> None:
        super().__init__(0)
        self._costs = costs
        self.num_timed = 0

    def observe(self, step: DecodeStep) -> None:
        """See `DepthPolicy`."""
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
    """Run requests of fixed depths through a scheduler and a core of their own.

    The server's counters and rates of acceptance so stay untouched.

    Args:
        costs: takes in what is measured; what it knows already is measured again in part.
        config: `calibration_seconds` and the limits.
        runner: idle, and idle again afterwards.
        stopping: asked after each step; ends it.
        clock: seconds; times the steps and the whole.
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
        if not (size in partial or (size, depth) in _CHECKED):
            continue
        if over() or (
            size <= config.max_num_seqs and not _measure(core, recorder, size, depth, over)
        ):
            break
    costs.settle()


def _measure(
    core: EngineCore, recorder: _Recorder, size: int, depth: int, over: Callable[[], bool]
) -> bool:
    """One cell; False if a step failed."""
    sequences = list(_sequences(size, depth))
    for sequence in sequences:
        core.add(sequence)
    recorder.num_timed = 0
    healthy = True
    for _ in range(_PATIENCE):
        if over() or recorder.num_timed == _STEPS or core.idle:
            break
        healthy = all(output.error is None for output in core.step())
        if not healthy:
            logger.warning("A step failed while step costs were measured")
            break
    for sequence in sequences:
        core.cancel(sequence.request_id)
    while not core.idle:
        core.step()
    return healthy


def _sequences(size: int, depth: int) -> Iterator[Sequence]:
    for row in range(size):
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        request = Request(
            f"calibration-{row}", (0,) * _PROMPT_TOKENS, sampling, num_draft_tokens=depth
        )
        yield Sequence(request, (), _PATIENCE * (MAX_DRAFT_TOKENS + 1))
