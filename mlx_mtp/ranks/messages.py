"""What rank 0 tells the others: steps, and what happens to prefixes, by numbers that it gives."""

from __future__ import annotations

from typing import NamedTuple

from mlx_mtp.engine.request import Request
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import StepRow
from mlx_mtp.sampling.params import SamplingParams


class Begin(NamedTuple):
    """A runner begins, with nothing in its batches and its prefix cache."""

    vocab_size: int
    drafts: bool
    draft_ids: tuple[int, ...] | None  # the only tokens to draft


class Row(NamedTuple):
    """A sequence that is new to the others."""

    request_id: str
    prompt: tuple[int, ...]
    stop_ids: tuple[int, ...]
    max_new_tokens: int
    prompt_logprobs: int | None

    @classmethod
    def of(cls, sequence: Sequence) -> Row:
        return cls(
            sequence.request_id,
            sequence.prompt,
            sequence.stop_ids,
            sequence.max_new_tokens,
            sequence.request.sampling.prompt_logprobs,
        )

    def sequence(self) -> Sequence:
        """What stands for it on another rank, which draws nothing of its own."""
        sampling = SamplingParams(
            self.max_new_tokens, temperature=0.0, prompt_logprobs=self.prompt_logprobs
        )
        request = Request(self.request_id, self.prompt, sampling)
        return Sequence(request, self.stop_ids, self.max_new_tokens)


class Take(NamedTuple):
    """Copy a row's prefix: KV from `start` to `end`, and the snapshot there."""

    row: int
    start: int
    end: int
    bits: int | None
    names: tuple[int, ...]  # of the segment, if there is any, and of the snapshot


class Cut(NamedTuple):
    """Copy a part of a segment."""

    segment: int
    start: int
    end: int
    name: int


class Drop(NamedTuple):
    """A segment is not needed any more."""

    segment: int


class Keep(NamedTuple):
    """Write a prefix to the disk."""

    salt: str
    tokens: tuple[int, ...]
    names: tuple[int, ...]  # of its segments, and of the snapshot


class Stored(NamedTuple):
    """A prefix on the disk was used, or its snapshot dropped."""

    salt: str
    tokens: tuple[int, ...]
    dropped: bool


class Read(NamedTuple):
    """Read a prefix from the disk, from the token `start` on, and answer."""

    number: int
    salt: str
    tokens: tuple[int, ...]
    start: int


class Load(NamedTuple):
    """Name what was read: the segment, if there is any, and the snapshot."""

    names: tuple[int, ...]


class Forget(NamedTuple):
    """What was to be read is not wanted any more."""


Note = Take | Cut | Drop | Keep | Stored | Read | Load | Forget
"""What happened to a prefix on rank 0."""


class Answer(NamedTuple):
    """To rank 0: how the read of this number went, a `Fetch` by name."""

    number: int
    state: str


class Failed(NamedTuple):
    """To rank 0: why this rank ends."""

    reason: str


class Poll(NamedTuple):
    """A rank's to itself: its disk has answered."""


class Release(NamedTuple):
    """No row is left."""

    notes: list[Note]


class Compare(NamedTuple):
    """Tell all ranks the last hidden states."""


class PlannedRow(NamedTuple):
    """A row of a plan: the plan's part of an `engine.step.StepRow`."""

    number: int  # of its sequence
    max_cached: int
    start: int
    length: int
    num_proposed: int
    run: tuple[int, ...]
    ahead: int

    @classmethod
    def of(cls, number: int, row: StepRow) -> PlannedRow:
        plan = row.start, row.length, row.num_proposed, tuple(row.run), row.ahead
        return cls(number, row.sequence.max_cached, *plan)

    def row(self, sequence: Sequence) -> StepRow:
        sequence.begin(self.max_cached)  # as rank 0 has counted
        return StepRow(sequence, self.start, self.length, self.num_proposed, self.run, self.ahead)


class Step(NamedTuple):
    """A plan; rows and segments by number."""

    notes: list[Note]  # since the last message
    new: dict[int, Row]
    prefixes: dict[int, tuple[int, ...]]  # that rows begin with: segments and a snapshot
    live: frozenset[int]
    chunk: tuple[PlannedRow, ...]
    decode: tuple[PlannedRow, ...]
    together: bool
