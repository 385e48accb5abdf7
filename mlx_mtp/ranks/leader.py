"""Rank 0 of several: its runner sends each step to the other ranks before it launches the step.

All ranks build the same graph, so that their collectives run in the same order. For that the other
ranks need only the contents of a `Step`: sequences, windows, and which prefixes are restored. They
have no sampling parameters and no grammars, as they take over the tokens that rank 0 samples
(`distributed.broadcast`). They have no tree of prefixes, but copy, cut and free segments as rank 0
does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from mlx_mtp.engine.batch import hidden_states
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import InFlightStep, StepPlan, StepRow
from mlx_mtp.errors import ModelError
from mlx_mtp.prefix.cache import PrefixCache, Rows, Save
from mlx_mtp.prefix.policy import PrefixState
from mlx_mtp.prefix.radix_tree import Node
from mlx_mtp.ranks.links import Links
from mlx_mtp.ranks.messages import Compare, NewSequence, PlannedRow, Step
from mlx_mtp.ranks.segments import LeaderSegment, ids_of

logger = logging.getLogger(__name__)

_NOTICE_SECONDS = 0.5
_TOLERANCE = 0.05  # share of the largest hidden state by which ranks may differ


class LeaderPrefixes(PrefixCache):
    """A prefix cache that records operations for the other ranks' parts."""

    def __init__(self, links: Links, *args: Any) -> None:
        super().__init__(*args)
        self.links = links

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
            entry = [LeaderSegment.of(segment, self.links) for segment in save.entry]
            place = entry[0].start, len(tokens), self._bits
            self.links.record("copy", id(state), *place, ids_of(entry))
            saves.append(save._replace(entry=[*entry]))
        return saves


class LeaderRunner(ModelRunner):
    """A runner whose steps the other ranks run too. No step may fail, as they would not know.

    The other ranks know the sequences in `_live`, by the `id` of a sequence's `PrefixState`.
    """

    prefixes: LeaderPrefixes
    _live: frozenset[Sequence] = frozenset()

    def run(self, plan: StepPlan) -> list[InFlightStep]:
        self._send(plan)
        return self._checked(super().run(plan))

    def read(self, step: InFlightStep) -> list[InFlightStep]:
        return self._checked(super().read(step))

    def check_ranks_agree(self) -> None:
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
        self._send(StepPlan((), (), frozenset()))
        super().release()

    def _send(self, plan: StepPlan) -> None:
        starts = {row.sequence: row.sequence.prefix.node for row in plan.chunk}
        step = Step(
            self.prefixes.links.take_ops(),
            {_sequence_key(s): NewSequence.of(s) for s in plan.live - self._live},
            {
                _sequence_key(s): ids_of(node.entry())
                for s, node in starts.items()
                if node is not None
            },
            frozenset(map(_sequence_key, plan.live)),
            [*map(_planned, plan.chunk)],
            [*map(_planned, plan.decode)],
            plan.together,
        )
        self.prefixes.links.send(step)
        self._live = plan.live

    def _checked(self, steps: list[InFlightStep]) -> list[InFlightStep]:
        for step in steps:
            if step.error is not None:
                # If a rank has gone, its link reports a better reason meanwhile.
                time.sleep(_NOTICE_SECONDS)
                self.prefixes.links.fail(f"a step failed on rank 0: {step.error}")
        return steps


def _sequence_key(sequence: Sequence) -> int:
    return id(sequence.prefix)


def _planned(row: StepRow) -> PlannedRow:
    plan = row.start, row.length, row.num_proposed, tuple(row.run), row.ahead
    return _sequence_key(row.sequence), row.sequence.max_cached, plan
