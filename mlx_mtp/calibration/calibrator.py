"""Measures what steps and chunks cost while no request runs, and keeps it between runs."""

import logging
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from mlx_mtp.calibration.cost_file import CostFile
from mlx_mtp.config import MAX_HOST_DRAFTS, MAX_RUN, EngineConfig
from mlx_mtp.engine.chunk_costs import CHUNK, PrefillCosts
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.prefill import WholeChunks
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.costs import (
    HOST,
    MTP,
    RAGGED,
    CostKey,
    StepCosts,
    StepShape,
    Table,
)
from mlx_mtp.speculative.draft_policy import Choice, FixedDrafts, RowDrafting, VerifiedRow

logger = logging.getLogger(__name__)


def _beside_plain(kind: str, rows: int, *drafts: int) -> Iterator[CostKey]:
    """Plain steps before and after each: one reading alone may come from a busy moment."""
    yield CostKey(MTP, rows, 0)
    for number in drafts:
        yield from (CostKey(kind, rows, number), CostKey(MTP, rows, 0))


# The most useful ones first: time may run out. Others are inferred from these.
_STEPS = (
    *_beside_plain(MTP, 1, 1, 2, 3),
    *_beside_plain(MTP, 4, 1, 3),
    *_beside_plain(HOST, 1, 4, 16),
    *_beside_plain(RAGGED, 4, 16),
    *_beside_plain(MTP, 2, 1, 3),
    *_beside_plain(MTP, 1, 4, 6, 8),
    *_beside_plain(MTP, 16, 1, 2, 3),
    *_beside_plain(RAGGED, 16, 16),
    *_beside_plain(HOST, 4, 4, 16),
    *_beside_plain(MTP, 4, 2, 5, 8),
    *_beside_plain(MTP, 32, 1),
    *_beside_plain(MTP, 16, 5),
)
# Measured at every start: the machine may have been busy at an earlier one.
_CHECKED = frozenset(_beside_plain(MTP, 1, 1, 2, 3))
_TIMES = 3  # that a cell of steps is measured: readings of a busy moment are outvoted
_PROMPT_TOKENS = 8
_TIMED_STEPS = 7  # of a cell; the first compiles kernels, the second may have a part of it
_MOST_STEPS = 40  # of a cell, timed or not
_CHUNK_SHARE = 0.25  # of the time for calibration; the rest is for decode steps
_SAVE_SECONDS = 300.0


def steps_to_measure(known: Table, most_rows: int, kinds: Collection[str]) -> list[CostKey]:
    """Cells of decode steps that an earlier run has not measured, or that are checked again."""
    kinds = {*kinds, RAGGED} if HOST in kinds else kinds
    possible = [c for c in _STEPS if c.rows <= most_rows and (c.size == 0 or c.kind in kinds)]
    # If a number of rows lacks one, all are measured: only what ran side by side can be compared.
    partial = {cell.rows for cell in possible if cell not in known}
    missing = [cell for cell in possible if cell.rows in partial]
    first = (cell for cell in possible if cell.rows in partial or cell in _CHECKED)
    cells = (*first, *missing * (_TIMES - 1))
    return [cell for cell, _ in groupby(cells)]  # Plain steps follow plain ones.


class _CellDrafts(FixedDrafts):
    """The drafts of a cell; the acceptance of random tokens says nothing about real ones."""

    def __init__(self, cell: CostKey) -> None:
        super().__init__(0)
        self._cell = cell
        self.seconds: list[float] = []  # of the cell's steps

    def choose(self, rows: Many[RowDrafting], *, steady: bool) -> Choice:
        first, none = int(self._cell.size), (0,) * len(rows)
        others = 0 if self._cell.kind == RAGGED else first
        counts = (first, *(others,) * (len(rows) - 1))
        return Choice(counts, none) if self._cell.kind == MTP else Choice(none, counts)

    def observe(self, rows: Many[VerifiedRow], shape: StepShape, seconds: float | None) -> None:
        if seconds is not None and shape == self._cell.shape:
            self.seconds.append(seconds)


class _Run(NamedTuple):
    """A `HostDrafter` of random tokens."""

    next_run: Many[int]
    of_others: bool = False

    def extend(self, tokens: Many[int]) -> None:
        pass

    def cumulative_acceptance(self, ahead: int) -> list[float]:
        return []


class Calibrator:
    """Loads costs at the start, measures while no request runs, and saves them in `folder`, if any.

    It measures a list of cells, a step at a time. A cell is the first chunk of a prompt, of some
    length, or decode steps of some number of rows and drafts. If a request comes, the cell is
    paused after the step that runs, and begun anew later. Chunks come first, the shorter before the
    longer: behind the first two lengths none is measured that is expected to take longer than
    `--max-decode-pause`, as a request waits for it; without that limit their costs are not used.

    Cells run through a scheduler and a core of their own, so that the server's counters and
    acceptance rates are not touched.
    """

    def __init__(
        self,
        steps: StepCosts,
        chunks: PrefillCosts,
        config: EngineConfig,
        folder: Path | None,
        fingerprint: str,
        kinds: Collection[str] = (MTP, HOST),  # of drafts
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.file = CostFile(folder, fingerprint)
        self._steps, self._chunks, self._config, self._clock = steps, chunks, config, clock
        self._saved_at = clock()
        self._seconds_left = config.calibration_seconds
        self._work: Iterator[None] = iter(())
        self._core: EngineCore | None = None  # that runs the first cell
        known = self.file.load()
        if known:
            steps.load_table(known)
            chunks.load_table(known)
            logger.debug("Costs of an earlier run: %s", known)
        lengths = chunks.to_measure(math.inf) if config.decode_pause else []
        self._cells = [CostKey(CHUNK, 1, length) for length in lengths]
        self._cells += steps_to_measure(known, config.max_num_seqs, kinds)

    @property
    def busy(self) -> bool:
        """True while there is something to measure when no request runs."""
        return bool(self._cells) and self._seconds_left > 0

    def step(self, runner: ModelRunner) -> None:
        """Run one step, and what ends a cell."""
        began = self._clock()
        if self._core is None:
            self._work = self._measure(runner, self._cells[0])
        if next(self._work, self) is self:  # The cell has ended.
            del self._cells[0]
            self.pause()
        self._seconds_left -= self._clock() - began
        if not self.busy:
            self.pause()
            logger.info("Step costs are measured.")
            logger.debug("Step costs: %s", self._steps.table())
            self.save()

    def pause(self) -> None:
        """Leave the current cell, for a request or because it has ended; waits for its step."""
        if self._core is not None:
            self._core.scheduler.cancel()
            while not self._core.idle:
                self._core.step()
            self._core.release()
            self._core = None

    def reset(self) -> None:
        """Call when the engine's thread (re)starts: measures no more if it died in a cell."""
        if self._core is not None:
            self._cells.clear()
            self._core = None

    def save_periodically(self) -> None:
        if self._clock() - self._saved_at > _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        self._saved_at = self._clock()
        self.file.save({**self._steps.table(), **self._chunks.table()})

    def _has_time_for(self, chunk: CostKey) -> bool:
        seconds_left = self._seconds_left - (1 - _CHUNK_SHARE) * self._config.calibration_seconds
        return seconds_left > 0 and chunk.size in self._chunks.to_measure(self._config.decode_pause)

    def _measure(self, runner: ModelRunner, cell: CostKey) -> Iterator[None]:
        drafts, config, prefills = _CellDrafts(cell), self._config, None
        is_chunk = cell.kind == CHUNK
        if is_chunk:
            length = int(cell.size)
            config = replace(config, prefill_step_size=length, max_decode_pause=0.0, overlap=False)
            prefills = WholeChunks(config, self._chunks)
        scheduler = Scheduler(config, drafts, prefills=prefills)
        core = EngineCore(scheduler, runner, overlap=config.overlap, clock=self._clock)
        self._core = core
        for number in range(_MOST_STEPS):
            # A chunk is measured with another prompt at each step.
            if self._has_time_for(cell) if is_chunk else number == 0:
                scheduler.cancel()
                for sequence in _requests(cell, runner.vocab_size):
                    scheduler.add(sequence)
            if len(drafts.seconds) == _TIMED_STEPS or core.idle:
                if times := drafts.seconds[2:]:
                    # A step may be late but never early.
                    self._steps.learn(cell, statistics.median_low(times))
                return
            if any(output.error is not None for output in core.step()):
                logger.warning("A step failed while costs were measured: %s", cell)
                self._cells[1:] = [c for c in self._cells[1:] if (c.kind == CHUNK) != is_chunk]
                return
            yield


def _requests(cell: CostKey, vocab_size: int) -> Iterator[Sequence]:
    """The rows of a cell. After a chunk's tokens the prompt has one more: none is sampled."""
    length, most = _PROMPT_TOKENS, _MOST_STEPS * (MAX_HOST_DRAFTS + 1)
    if cell.kind == CHUNK:
        length, most = int(cell.size) + 1, 1
    # Tokens from everywhere in the vocabulary: equal ones would share their experts.
    count = cell.rows * (length + MAX_RUN)
    text = tuple(n * vocab_size // count for n in range(count))
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    for row in range(cell.rows):
        tokens = text[row :: cell.rows]
        request = Request(f"calibration-{row}", tokens[:length], sampling)
        sequence = Sequence(request, (), most)
        if cell.kind in (HOST, RAGGED):
            sequence.drafting.host = {HOST: _Run(tokens[length:])}
            sequence.drafting.source = HOST
        yield sequence
