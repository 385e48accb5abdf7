"""Messages between rank 0 and the other ranks: steps to run, and operations on cached prefixes."""

from __future__ import annotations

from typing import Any, NamedTuple

from mlx_mtp.engine.request import Request
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.vision.images import Pixels
from mlx_mtp.vision.placed import PlacedImage, PromptImages

PrefixOp = tuple[Any, ...]
"""An operation on a rank's part of the prefix cache: its name and arguments.

Ids of sequences and segments are rank 0's. The last of several segments is a snapshot. The store
is the rank's prefix directory; `prefix` stands for a salt and tokens.

    "copy", sequence, start, end, bits, ids     copy KV (if start < end) and snapshot from caches
    "cut", segment, start, end, id              copy a part of a segment
    "free", segment
    "keep", prefix, ids                         write to the store
    "touch", prefix                             mark as used in the store
    "drop_snapshot", prefix                     remove from the store
    "fetch", number, prefix, start              read from the store, and answer with `Fetched`
    "name_fetched", ids                         give the fetched segments these ids
    "forget"                                    drop the segments that are being fetched, or were
"""

PlannedRow = tuple[int, int, tuple[int, int, int, tuple[int, ...], int]]
"""The id of a sequence, its `max_cached`, and a `StepRow`'s fields from `start` to `ahead`."""


class Begin(NamedTuple):
    """Make a runner with empty batches and no cached prefixes."""

    vocab_size: int
    drafts: bool
    draft_ids: tuple[int, ...] | None  # the only tokens to draft; None: all


class NewSequence(NamedTuple):
    """What another rank must know of a sequence."""

    prompt: tuple[int, ...]
    stop_ids: tuple[int, ...]
    max_new_tokens: int
    prompt_logprobs: int | None
    images: list[tuple[int, int, int, tuple[Any, ...]]]  # place, rows, columns, `Pixels`

    @classmethod
    def of(cls, sequence: Sequence) -> NewSequence:
        top = sequence.request.sampling.prompt_logprobs
        placed = () if sequence.images is None else sequence.images.images
        images = [(each.start, each.rows, each.columns, tuple(each.pixels)) for each in placed]
        return cls(sequence.prompt, sequence.stop_ids, sequence.max_new_tokens, top, images)

    def sequence(self) -> Sequence:
        """Returns the sequence for another rank, which takes over tokens that rank 0 samples."""
        most = self.max_new_tokens
        sampling = SamplingParams(most, temperature=0.0, prompt_logprobs=self.prompt_logprobs)
        placed = [PlacedImage(*each[:3], Pixels(*each[3])) for each in self.images]
        images = PromptImages(placed, len(self.prompt)) if placed else None
        request = Request("", self.prompt, sampling, images=images)
        return Sequence(request, self.stop_ids, most)


class Step(NamedTuple):
    """Run operations on prefixes, and then launch an `engine.step.StepPlan`."""

    ops: list[PrefixOp]
    new: dict[int, NewSequence]
    prefixes: dict[int, tuple[int, ...]]  # by sequence, segments and a snapshot that it begins with
    live: frozenset[int]  # all other sequences are dropped
    chunk: list[PlannedRow]
    decode: list[PlannedRow]
    together: bool


class Compare(NamedTuple):
    """Gather the last hidden states of all ranks."""


class Poll(NamedTuple):
    """From a rank to itself: the rank's store has read a prefix."""


class Fetched(NamedTuple):
    """To rank 0: how fetch `number` ended; `state` is the name of a `radix_tree.Fetch`."""

    number: int
    state: str


class Failed(NamedTuple):
    """To a peer: why this rank ends."""

    reason: str
