"""The price list between runs and while nobody asks: measured, and kept in a file."""

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from mlx_mtp.calibration.chunks import ChunkCalibration, spread
from mlx_mtp.calibration.cost_file import CostFile, Measured
from mlx_mtp.config import MAX_COPY_TOKENS, MAX_RUN, EngineConfig
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.costs import COPY, HEAD, Shape, StepCosts, Table
from mlx_mtp.speculative.draft_policy import Choice, DraftRow, FixedDrafts, VerifiedRow
from mlx_mtp.speculative.ngram import NgramPool

logger = logging.getLogger(__name__)


class Cell(NamedTuple):
    """Steps of so many rows with so many drafts each, of one source."""

    rows: int
    drafts: int
    source: str = HEAD


def _beside_plain(rows: int, *drafts: int, source: str = HEAD) -> Iterator[Cell]:
    """Plain steps before and after each: one reading alone may come from a busy moment."""
    yield Cell(rows, 0)
    for number in drafts:
        yield from (Cell(rows, number, source), Cell(rows, 0))


# The most useful first: time may run out. Others are inferred from these.
_CELLS = (
    *_beside_plain(1, 1, 2, 3),
    *_beside_plain(4, 1, 3),
    *_beside_plain(1, 4, 16, source=COPY),
    *_beside_plain(2, 1, 3),
    *_beside_plain(1, 4, 6, 8),
    *_beside_plain(16, 1, 2, 3),
    *_beside_plain(4, 4, 16, source=COPY),
    *_beside_plain(4, 2, 5, 8),
    *_beside_plain(16, 5),
)
# Measured at every start: an earlier machine may have been busy.
_CHECKED = frozenset(_beside_plain(1, 1, 2, 3))
_TIMES = 3  # that a cell is measured: the readings of a busy moment are outvoted
_PROMPT_TOKENS = 8
_TIMED_STEPS = 6  # of a cell; the first compiles kernels and isn't used
_MOST_STEPS = 40  # of a cell, timed or not
_SAVE_SECONDS = 300.0


class _Recorder(FixedDrafts):
    """Drafts as a cell says; the acceptance of random tokens says nothing about real ones."""

    def __init__(self, costs: StepCosts, cell: Cell) -> None:
        super().__init__(0)
        self._costs, self._cell = costs, cell
        self.num_timed = 0

    def choose(self, rows: Many[DraftRow], *, steady: bool) -> Choice:
        each = (self._cell.drafts,) * len(rows)
        none = (0,) * len(rows)
        return Choice(none, each) if self._cell.source == COPY else Choice(each, none)

    def observe(self, rows: Many[VerifiedRow], shape: Shape, seconds: float | None) -> None:
        self._costs.observe(shape, seconds)
        self.num_timed += seconds is not None


class Calibration:
    """Measures cells, a step at a time: it can be left after each, and a cell is begun anew.

    Requests run through a scheduler and a core of their own, so that the server's counters and
    rates are not touched.
    """

    def __init__(
        self,
        costs: StepCosts,
        config: EngineConfig,
        cells: Many[Cell],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._costs, self._config, self._clock = costs, config, clock
        self._left = config.calibration_seconds
        self._cells = list(cells)
        self._steps: Iterator[None] = iter(())
        self._core: EngineCore | None = None

    @property
    def over(self) -> bool:
        return not self._cells or self._left <= 0

    def step(self, runner: ModelRunner) -> None:
        """Run one step, and what ends a cell."""
        began = self._clock()
        if self._core is None:
            self._steps = self._measure(runner, self._cells[0])
        if next(self._steps, self) is self:
            del self._cells[:1]
            self.leave()
        self._left -= self._clock() - began
        if self.over:
            self.leave()

    def leave(self) -> None:
        """End what runs: the step in flight is waited for."""
        if self._core is not None:
            self._core.cancel()
            while not self._core.idle:
                self._core.step()
            self._core.release()
            self._core = None
            self._costs.end_reading()

    def forget(self) -> None:
        """Reset after a restart: if the engine died while it measured, measure no more."""
        if self._core is not None:
            self._cells.clear()
            self._core = None

    def _measure(self, runner: ModelRunner, cell: Cell) -> Iterator[None]:
        recorder = _Recorder(self._costs, cell)
        scheduler = Scheduler(self._config, recorder)
        core = self._core = EngineCore(
            scheduler, runner, overlap=self._config.overlap, clock=self._clock
        )
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        text = spread(runner.vocab_size, cell.rows * (_PROMPT_TOKENS + MAX_RUN))
        for row in range(cell.rows):
            own = text[row :: cell.rows]
            request = Request(f"calibration-{row}", own[:_PROMPT_TOKENS], sampling)
            sequence = Sequence(request, (), _MOST_STEPS * (MAX_COPY_TOKENS + 1))
            if cell.source == COPY:
                sequence.drafting.copier = NgramPool(0).of((), None)
                sequence.drafting.copier.run = own[_PROMPT_TOKENS:]
            core.add(sequence)
        for _ in range(_MOST_STEPS):
            if recorder.num_timed == _TIMED_STEPS or core.idle:
                return
            if any(output.error is not None for output in core.step()):
                logger.warning("A step failed while step costs were measured")
                self._cells.clear()
                return
            yield


def cells_to_measure(known: Table, most_rows: int, sources: Many[str]) -> list[Cell]:
    """What an earlier run has not measured, or is checked."""
    wanted = {COPY: COPY in sources, HEAD: any(source != COPY for source in sources)}
    possible = [
        cell
        for cell in _CELLS
        if cell.rows <= most_rows and (cell.drafts == 0 or wanted[cell.source])
    ]
    # A size that lacks a cell is measured whole: only what ran side by side can be compared.
    partial = {
        cell.rows
        for cell in possible
        if cell.drafts not in known.get(cell.rows, {}).get(cell.source, {})
    }
    missing = [cell for cell in possible if cell.rows in partial]
    first = (cell for cell in possible if cell.rows in partial or cell in _CHECKED)
    chosen = (*first, *missing * (_TIMES - 1))
    return [cell for cell, _ in groupby(chosen)]  # Plain steps follow plain ones.


class Calibrator:
    """Loads costs at the start, measures while nobody asks, and saves in `folder`, if any."""

    def __init__(
        self,
        costs: StepCosts,
        chunks: ChunkCalibration,
        config: EngineConfig,
        folder: Path | None,
        fingerprint: str,
        sources: Many[str] = (HEAD, COPY),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.file = CostFile(folder, fingerprint)
        self._costs, self._chunks = costs, chunks
        self._clock = clock
        self._saved_at = clock()
        left = config.calibration_seconds - chunks.seconds_left
        config = replace(config, calibration_seconds=left)
        known = self.file.load()
        if any(known):
            costs.load(known.steps)
            chunks.costs.load(known.chunks, known.per_context)
            logger.debug("Costs of an earlier run: %s", known)
        cells = cells_to_measure(known.steps, config.max_num_seqs, sources)
        self._calibration = Calibration(costs, config, cells)

    @property
    def busy(self) -> bool:
        """There is something to measure while nobody asks."""
        return not (self._chunks.over and self._calibration.over)

    def begin(self) -> None:
        """Reset when the engine starts, and after each restart."""
        self._calibration.forget()

    def step(self, runner: ModelRunner) -> None:
        """Measure for one step."""
        (self._calibration if self._chunks.over else self._chunks).step(runner)
        if not self.busy:
            logger.info("Step costs are measured.")
            logger.debug("Step costs: %s", self._costs.table())
            self.save()

    def leave(self) -> None:
        """A request has come."""
        self._calibration.leave()

    def save_periodically(self) -> None:
        if self._clock() - self._saved_at > _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        self._saved_at = self._clock()
        self.file.save(Measured(self._costs.table(), *self._chunks.costs.table()))
