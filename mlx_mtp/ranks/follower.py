"""The ranks other than rank 0: each runs the steps that rank 0 sends, and decides nothing."""

import mlx.core as mx

from mlx_mtp.engine.batch import hidden_states
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import InFlightStep, StepPlan, StepRow
from mlx_mtp.errors import RankError
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.prefix.cache import copy_entry
from mlx_mtp.prefix.disk import PrefixStore
from mlx_mtp.ranks.links import Link
from mlx_mtp.ranks.messages import Begin, Compare, Poll, Step
from mlx_mtp.ranks.segments import FollowerPrefixes, FollowerSegments
from mlx_mtp.speculative.drafter import MTPDrafter


def follow(model: LoadedModel, link: Link, store: PrefixStore | None = None) -> None:
    """Run steps until rank 0 ends; raises RankError if rank 0 is lost or a step fails here."""
    follower: _Follower | None = None
    while (message := link.receive()) is not None:
        if isinstance(message, Begin):
            drafter = MTPDrafter(model, message.draft_ids) if message.drafts else None
            runner = ModelRunner(model, drafter, message.vocab_size, FollowerPrefixes())
            follower = _Follower(runner, FollowerSegments(link, store))
            continue
        assert follower is not None, "rank 0 begins"
        match message:
            case Step():
                follower.launch_step(message)
                link.num_done += 1
            case Compare():
                mx.eval(hidden_states(follower.runner.batches))
            case Poll():
                follower.segments.poll()
    link.close()


class _Follower:
    """A runner, with the sequences and segments that rank 0 refers to by id."""

    def __init__(self, runner: ModelRunner, segments: FollowerSegments) -> None:
        self.runner, self.segments = runner, segments
        self._sequences: dict[int, Sequence] = {}
        self._in_flight: list[InFlightStep] = []

    def launch_step(self, step: Step) -> None:
        """Launch a step, then wait for the step before it."""
        for op in step.ops:
            if op[0] == "copy":
                self._copy(*op[1:])
            else:
                self.segments.run_op(op)
        new = {key: sequence.sequence() for key, sequence in step.new.items()}
        sequences = self._sequences = {
            key: new[key] if key in new else self._sequences[key] for key in step.live
        }
        for key, ids in step.prefixes.items():
            sequences[key].prefix.node = self.segments.build_path(ids)
        for key, max_cached, _ in (*step.chunk, *step.decode):
            sequences[key].begin_prompt(max_cached)
        chunk, decode = (
            tuple(StepRow(sequences[key], *plan) for key, _, plan in rows)
            for rows in (step.chunk, step.decode)
        )
        live = frozenset(sequences.values())
        launched = self.runner.run(StepPlan(chunk, decode, live, step.together))
        for key in step.prefixes:
            sequences[key].prefix.node = None
        for each in launched:
            if each.error is not None:
                raise RankError(f"a step failed: {each.error}")
        # Waiting keeps a rank at most one step ahead of the others, and shows device failures.
        ready, self._in_flight = self._in_flight, launched
        for each in ready:
            mx.eval([a for a in (each.done, each.sampled and each.sampled.tokens) if a is not None])

    def _copy(self, key: int, start: int, end: int, bits: int | None, ids: tuple[int, ...]) -> None:
        sequence = self._sequences[key]
        batch = next(b for b in self.runner.batches.all if sequence in b.sequences)
        row = batch.sequences.index(sequence)
        self.segments.add(ids, copy_entry(batch, row, start, end, bits))
