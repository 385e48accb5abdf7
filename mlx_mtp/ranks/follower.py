"""Any rank but 0: it runs the steps that rank 0 tells it, and decides nothing."""

from collections.abc import Sequence as Many

import mlx.core as mx

from mlx_mtp.engine.batch import hidden_states
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import InFlightStep, StepPlan
from mlx_mtp.errors import RankError
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.prefix.cache import take
from mlx_mtp.prefix.disk import PrefixStore
from mlx_mtp.ranks.links import Link
from mlx_mtp.ranks.messages import Begin, Compare, Note, Poll, Release, Step, Take
from mlx_mtp.ranks.segments import Parts
from mlx_mtp.speculative.drafter import make_drafter


def follow(model: LoadedModel, link: Link, store: PrefixStore | None = None) -> None:
    """Run steps until rank 0 ends; RankError if it is lost, or one of them fails here."""
    follower: _Follower | None = None
    while (message := link.receive()) is not None:
        if isinstance(message, Begin):
            ids = message.draft_ids
            drafter = make_drafter(model, ids) if message.drafts else None
            runner = ModelRunner(model, drafter, message.vocab_size)
            follower = _Follower(runner, Parts(link, store))
            continue
        assert follower is not None, "rank 0 begins"
        if isinstance(message, Release):
            follower.release(message)
        elif isinstance(message, Compare):
            mx.eval(hidden_states(follower.runner.batches))
        elif isinstance(message, Poll):
            follower.parts.poll()
        else:
            follower.run(message)
            link.own_done += 1
    link.close()


class _Follower:
    """A runner, and what rank 0 has named: rows and segments."""

    def __init__(self, runner: ModelRunner, parts: Parts) -> None:
        self.runner, self.parts = runner, parts
        self._rows: dict[int, Sequence] = {}
        self._in_flight: list[InFlightStep] = []

    def run(self, step: Step) -> None:
        """Launch a step, and wait for the one before it."""
        self._follow(step.notes)
        rows = self._rows | {number: row.sequence() for number, row in step.new.items()}
        for number, names in step.prefixes.items():
            rows[number].prefix.node = self.parts.prefix(names)
        chunk, decode = (
            tuple(planned.row(rows[planned.number]) for planned in part)
            for part in (step.chunk, step.decode)
        )
        live = frozenset(rows[number] for number in step.live)
        launched = self.runner.run(StepPlan(chunk, decode, live, step.together))
        for number in step.prefixes:
            rows[number].prefix.node = None
        known = {planned.number for planned in (*step.chunk, *step.decode)} | step.live
        self._rows = {number: rows[number] for number in known}
        for each in launched:
            if each.error is not None or not each.sequences:
                raise RankError(f"a step failed: {each.error or 'a prefix is not here'}")
        # No rank gets ahead of the others by more than a step, and failures come to light.
        ready, self._in_flight = self._in_flight, launched
        for each in ready:
            mx.eval([a for a in (each.done, each.sampled and each.sampled.tokens) if a is not None])

    def release(self, message: Release) -> None:
        self._follow(message.notes)
        self._rows, self._in_flight = {}, []
        self.runner.release()

    def _follow(self, notes: Many[Note]) -> None:
        for note in notes:
            if isinstance(note, Take):
                sequence = self._rows[note.row]
                batch = next(b for b in self.runner.batches.all if sequence in b.sequences)
                row = batch.sequences.index(sequence)
                entry = take(batch, row, note.start, note.end, note.bits)
                self.parts.add(note.names, entry)
            else:
                self.parts.follow(note)
