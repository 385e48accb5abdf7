"""Measures the costs of steps and chunks while no request runs, and keeps them between runs."""

import logging
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from mlx_mtp.speculative.costs import HOST, MTP, RAGGED, SYNC, CostKey, StepCosts, StepShape, Table
from mlx_mtp.speculative.draft_policy import Choice, FixedDrafts, HeadWindow, RowDrafting

logger = logging.getLogger(__name__)


def _beside_plain(kind: str, rows: int, *drafts: int) -> Iterator[CostKey]:
    """Yields cells, with plain steps before and after each: a single reading can be disturbed."""
    yield CostKey(MTP, rows, 0)
    for number in drafts:
        yield from (CostKey(kind, rows, number), CostKey(MTP, rows, 0))


# The most useful cells first, as time can run out. Other cells' costs are inferred from these.
_STEPS = (
    *_beside_plain(MTP, 1, 1, 2, 3),
    *_beside_plain(MTP, 4, 1, 3),
    *_beside_plain(HOST, 1, 4, 16),
    *_beside_plain(RAGGED, 4, 16),
    *_beside_plain(SYNC, 1, 0),
    *_beside_plain(MTP, 2, 1, 3),
    *_beside_plain(MTP, 1, 4, 6, 8),
    *_beside_plain(MTP, 16, 1, 2, 3),
    *_beside_plain(RAGGED, 16, 16),
    *_beside_plain(SYNC, 16, 0),
    *_beside_plain(HOST, 4, 4, 16),
    *_beside_plain(MTP, 4, 2, 5, 8),
    *_beside_plain(MTP, 32, 1),
    *_beside_plain(MTP, 16, 5),
    *_beside_plain(HOST, 16, 8),
)
_TIMES = 3  # measurements of each cell of steps, to outvote one from a busy moment
_PROMPT_TOKENS = 8
_TIMED_STEPS = 7  # timed steps per cell; the first two are not used, as they can compile kernels
_MOST_STEPS = 40  # maximum number of steps per cell, timed or not
_CHUNK_SHARE = 0.25  # share of the calibration time for chunks; the rest is for decode steps
_SAVE_SECONDS = 300.0


def steps_to_measure(known: Table, most_rows: int, kinds: Collection[str]) -> list[CostKey]:
    """Returns the cells of decode steps whose costs are not `known`, in order of measuring."""
    kinds = {*kinds, RAGGED} if HOST in kinds else kinds
    possible = [c for c in _STEPS if c.rows <= most_rows and (c.size == 0 or c.kind in kinds)]
    # All cells with the rows of a missing one are measured: only nearby times can be compared.
    partial = {cell.rows for cell in possible if cell not in known}
    missing = [cell for cell in possible if cell.rows in partial]
    return [cell for cell, _ in groupby(missing * _TIMES)]  # Drops repeated plain steps.


def typical_costs(measured: Many[tuple[CostKey, float]]) -> Table:
    """Returns the seconds of cells of decode steps, given their measurements in order of time.

    The machine's speed changes. So each measurement is divided by those of the steps without drafts
    just before and after it, and the median of these ratios counts.
    """
    every, beside = (defaultdict[CostKey, list[float]](list) for _ in range(2))
    for cell, seconds in measured:
        every[cell].append(seconds)
    usual = {cell: statistics.median_low(times) for cell, times in every.items()}
    threes = zip(measured, measured[1:], measured[2:])
    for (before, first), (cell, seconds), (after, last) in threes:
        if cell != before == after == CostKey(MTP, cell.rows, 0):
            beside[cell].append(seconds * usual[after] / ((first + last) / 2))
    return usual | {cell: statistics.median_low(times) for cell, times in beside.items()}


class _CellDrafts(FixedDrafts):
    """A policy with a cell's drafts; learns no acceptance, as its tokens are arbitrary."""

    def __init__(self, cell: CostKey) -> None:
        super().__init__(0)
        self._cell = cell
        self.seconds: list[float] = []  # duration of each of the cell's steps

    def choose(self, rows: Many[RowDrafting], *, steady: bool, waiting: int = 0) -> Choice:
        first, none = int(self._cell.size), (0,) * len(rows)
        others = 0 if self._cell.kind == RAGGED else first
        counts = (first, *(others,) * (len(rows) - 1))
        return Choice(counts, none) if self._cell.kind == MTP else Choice(none, counts)

    def observe(self, head: Many[HeadWindow], shape: StepShape, seconds: float | None) -> None:
        if seconds is not None and shape == self._cell.shape:
            self.seconds.append(seconds)


class Calibrator:
    """Loads costs, measures them while no request runs, and saves them in `folder`, if any.

    It measures a list of cells, one step at a time. A cell is either chunks of one length or decode
    steps with one number of rows and of drafts. If a request arrives, the current step is completed
    and the cell is restarted later. Chunks come first, from short to long. After the first two
    lengths, those expected to take longer than `--max-decode-pause` are skipped, as an arriving
    request would wait for them. Without that limit chunk costs are not used, nor measured.
    """

    def __init__(
        self,
        steps: StepCosts,
        chunks: PrefillCosts,
        config: EngineConfig,
        folder: Path | None,
        fingerprint: str,
        kinds: Collection[str] = (MTP, HOST),  # kinds of drafts in use
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.file = CostFile(folder, fingerprint)
        self._steps, self._chunks, self._config, self._clock = steps, chunks, config, clock
        self._saved_at, self._seconds_left = clock(), config.calibration_seconds
        self._work: Iterator[None] = iter(())
        self._core: EngineCore | None = None  # runs the first cell; None: paused
        known = self.file.load()
        self._measured: list[tuple[CostKey, float]] = []  # cells of steps
        steps.load_table(known)
        chunks.load_table(known)
        lengths = chunks.to_measure(math.inf) if config.decode_pause else []
        self._cells = [CostKey(CHUNK, 1, length) for length in lengths]
        self._cells += steps_to_measure(known, config.max_num_seqs, kinds)

    @property
    def busy(self) -> bool:
        return bool(self._cells) and self._seconds_left > 0

    def step(self, runner: ModelRunner) -> None:
        """Run one step of the first cell; saves the costs when no cell or no time is left."""
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
            self.save()

    def pause(self) -> None:
        """Stop the current cell, which has ended or will be restarted; waits for its steps."""
        if self._core is not None:
            self._core.scheduler.cancel()
            while not self._core.idle:
                self._core.step()
            self._core.release()
            self._core = None

    def reset(self) -> None:
        """Call when the engine's thread (re)starts; ends calibration if it died in a cell."""
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
        if is_chunk := cell.kind == CHUNK:
            length = int(cell.size)
            config = replace(config, prefill_step_size=length, max_decode_pause=0.0)
            prefills = WholeChunks(config, self._chunks)
        scheduler = Scheduler(config, drafts, prefills=prefills)
        overlap = cell.kind not in (CHUNK, SYNC)
        core = self._core = EngineCore(scheduler, runner, overlap=overlap, clock=self._clock)
        for number in range(_MOST_STEPS):
            # Each step of a chunk's cell computes the first chunk of a new request.
            if self._has_time_for(cell) if is_chunk else number == 0:
                scheduler.cancel()
                for sequence in _requests(cell, runner.vocab_size):
                    scheduler.add(sequence)
            if len(drafts.seconds) == _TIMED_STEPS or core.idle:
                # Pairs: two steps can end in one round of the host, and none in the next.
                if pairs := [(a + b) / 2 for a, b in pairwise(drafts.seconds[2:])]:
                    self._measured.append((cell, statistics.median_low(pairs)))
                    self._steps.load_table(typical_costs(self._measured))
                return
            if any(output.error is not None for output in core.step()):
                logger.warning("A step failed while costs were measured: %s", cell)
                self._cells[1:] = [c for c in self._cells[1:] if (c.kind == CHUNK) != is_chunk]
                return
            yield


def _requests(cell: CostKey, vocab_size: int) -> Iterator[Sequence]:
    """Yields a cell's sequences. After a chunk the prompt has one more token: none is sampled."""
    length, most = _PROMPT_TOKENS, _MOST_STEPS * (MAX_HOST_DRAFTS + 1)
    if cell.kind == CHUNK:
        length, most = int(cell.size) + 1, 1
    # The tokens are spread over the vocabulary: equal ones would be routed to the same experts.
    count = cell.rows * (length + MAX_RUN)
    text = tuple(n * vocab_size // count for n in range(count))
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    for row in range(cell.rows):
        ids = text[row :: cell.rows]
        request = Request(f"calibration-{row}", ids[:length], sampling)
        sequence = Sequence(request, (), most)
        if cell.kind in (HOST, RAGGED):  # A `HostDrafter` that offers arbitrary tokens.
            run: Any = SimpleNamespace(next_run=ids[length:], of_others=False)
            sequence.drafting.host, sequence.drafting.source = {HOST: run}, HOST
        yield sequence
