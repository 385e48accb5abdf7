"""Rank 0 of several: its runner tells the others each step before it launches it itself.

The others build the same graph, so that collectives meet in the same order. What they need for
that is in a `Step`: which rows, which windows, what is restored. They know neither sampling
parameters nor grammars, as they take over the tokens that rank 0 draws (`distributed.broadcast`),
and no tree of prefixes: they copy, cut and drop as its segments are.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence as Many

import numpy as np

from mlx_mtp.engine.batch import hidden_states
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.step import InFlightStep, StepPlan
from mlx_mtp.errors import ModelError
from mlx_mtp.prefix.cache import PrefixCache, Rows, Save
from mlx_mtp.prefix.policy import PrefixState
from mlx_mtp.prefix.radix_tree import Node
from mlx_mtp.prefix.segments import Entry
from mlx_mtp.ranks.links import Links
from mlx_mtp.ranks.messages import Compare, PlannedRow, Release, Row, Step, Take
from mlx_mtp.ranks.segments import LeadStore, Notes, names_of

logger = logging.getLogger(__name__)

_NOTICE_SECONDS = 0.5
_TOLERANCE = 0.05  # of the largest hidden state


class LeaderPrefixes(PrefixCache):
    """A prefix cache that notes what the others have to do with their parts of it."""

    def __init__(
        self,
        links: Links,
        limit: int = 0,
        bits: int | None = None,
        store: LeadStore | None = None,
    ) -> None:
        super().__init__(limit, bits, store)
        self.links = links
        self.notes = Notes() if store is None else store.notes
        self.rows: dict[PrefixState, int] = {}  # of the sequences that the others know: numbers
        self.numbers = itertools.count()  # for the next ones

    def restore(self, batch: Rows, nodes: Many[Node]) -> bool:
        restored = super().restore(batch, nodes)
        if not restored:
            self.links.fail("rank 0 could not restore a prefix")
        return restored

    def _copy(
        self, batch: Rows, row: int, state: PrefixState, tokens: tuple[int, ...]
    ) -> list[Save]:
        saves = []
        for save in super()._copy(batch, row, state, tokens):
            named: Entry = [*map(self.notes.named, save.entry)]
            start, names = named[0].start, names_of(named)
            self.notes.add(Take(self.rows[state], start, len(tokens), self._bits, names))
            saves.append(save._replace(entry=named))
        return saves


class LeaderRunner(ModelRunner):
    """A runner whose steps the other ranks run too. No step may fail, as they would not know."""

    prefixes: LeaderPrefixes

    def run(self, plan: StepPlan) -> list[InFlightStep]:
        self.prefixes.links.send(self._step(plan))
        return self._checked(super().run(plan))

    def read(self, step: InFlightStep) -> list[InFlightStep]:
        return self._checked(super().read(step))

    def compare(self) -> None:
        self.prefixes.links.send(Compare())
        ranks = np.array(hidden_states(self.batches))
        for rank, other in enumerate(ranks):
            if np.abs(other - ranks[0]).max() > _TOLERANCE * np.abs(ranks[0]).max():
                raise ModelError(f"rank {rank} computes other numbers than rank 0 for one prompt")
        if (ranks != ranks[0]).any():
            logger.warning(
                "The ranks round differently: are their chips, or versions of macOS, of different "
                "kinds? Where two experts are equally good they may choose differently."
            )

    def release(self) -> None:
        self.prefixes.links.send(Release(self.prefixes.notes.take()))
        super().release()

    def _step(self, plan: StepPlan) -> Step:
        rows, started = self.prefixes.rows, [row.sequence for row in plan.chunk]
        named = [*dict.fromkeys([*started, *(row.sequence for row in plan.decode), *plan.live])]
        new = {s: next(self.prefixes.numbers) for s in named if s.prefix not in rows}
        numbers = {s: new[s] if s in new else rows[s.prefix] for s in named}
        self.prefixes.rows = {s.prefix: number for s, number in numbers.items()}

        chunk, decode = (
            tuple(PlannedRow.of(numbers[row.sequence], row) for row in rows)
            for rows in (plan.chunk, plan.decode)
        )
        return Step(
            self.prefixes.notes.take(),
            {number: Row.of(s) for s, number in new.items()},
            {numbers[s]: names_of(s.prefix.node.entry()) for s in started if s.prefix.node},
            frozenset(numbers[s] for s in plan.live),
            chunk,
            decode,
            plan.together,
        )

    def _checked(self, steps: list[InFlightStep]) -> list[InFlightStep]:
        for step in steps:
            if step.error is not None:
                time.sleep(_NOTICE_SECONDS)  # A rank that has gone is better told by its link.
                self.prefixes.links.fail(f"a step failed on rank 0: {step.error}")
        return steps
