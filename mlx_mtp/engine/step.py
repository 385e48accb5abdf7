"""A step: its plan, its prefill chunk as arrays, and a launched window until it has been read."""

from collections.abc import Generator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_mtp.cache.batch import BatchCache
from mlx_mtp.engine.logprobs import PromptScores, token_logprobs
from mlx_mtp.engine.request import TokenLogprobs
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.errors import MlxMtpError
from mlx_mtp.prefix.cache import Save
from mlx_mtp.speculative.costs import MTP
from mlx_mtp.speculative.draft_policy import DraftRow
from mlx_mtp.speculative.verify import AcceptResult


@dataclass(slots=True, eq=False)
class StepRow:
    """One row of a step: planned by the scheduler, launched by the runner, then read.

    Its positions are tokens of its prompt, from `start` on, or a verify window: the last token that
    it emitted, and drafts.
    """

    sequence: Sequence
    # The plan:
    start: int = 0  # of a prompt's tokens
    length: int = 0  # number of positions; of a verify window the runner knows it
    num_proposed: int = 0  # drafts of the head for its next window
    # Tokens to verify in place of the head's drafts: what should follow the last token that was
    # read, of which the window in flight brings the first `ahead` at most.
    run: Many[int] = ()
    ahead: int = 0
    source: str = MTP  # of the drafts of its window
    of_others: bool = False  # the run is from an earlier answer, which may be another client's
    # The result:
    # Drafts of the window that count. Of a run `of_others` only those that are accepted do: neither
    # its tokens nor their number may tell the rest of another client's answer.
    num_drafts: int = 0
    error: MlxMtpError | None = None
    num_cached: int = 0  # positions that stay in the caches
    token_ids: tuple[int, ...] = ()  # that it emits
    num_accepted: int = 0  # how many of them were drafts
    optimistic: tuple[int, ...] = ()  # places in `token_ids` of drafts that were not sampled
    drafts: tuple[int, ...] = ()  # the ones that count, if any row wants a trace
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finished: bool = False  # the device ended it

    def draft_on_host(self, count: int) -> None:
        """Plan to verify at most `count` tokens of the run that its drafter on the host offers.

        Its limit of tokens and its grammar may allow fewer, or none.
        """
        sequence, ahead = self.sequence, self.drafting.ahead
        drafter = self.drafting.host[self.drafting.source]
        most = sequence.max_new_tokens - len(sequence.output) - 1
        run = drafter.run[: min(ahead + count, most)]
        if sequence.constraint is not None:
            run = run[: sequence.constraint.num_allowed(run)]
        if len(run) > ahead:
            self.source = self.drafting.source
            self.run, self.ahead, self.of_others = run, ahead, drafter.of_others

    @property
    def num_host_drafts(self) -> int:
        return len(self.run) - self.ahead

    @property
    def is_last(self) -> bool:
        """True if a chunk ends with its prompt."""
        return self.start + self.length == self.sequence.num_prompt

    # What a `DraftPolicy` reads:

    @property
    def drafting(self) -> DraftRow:
        return self.sequence.drafting

    @property
    def num_verified(self) -> int:
        return self.length - 1


class StepPlan(NamedTuple):
    """What to launch: a prefill chunk, a decode step, or both."""

    chunk: tuple[StepRow, ...]  # of the prompts of one group; empty: none
    decode: tuple[StepRow, ...]
    live: frozenset[Sequence]  # every unfinished sequence; other rows may be dropped
    together: bool = False  # chunk and decode step in one forward pass

    @property
    def needs_host(self) -> bool:
        return any(row.sequence.needs_host for row in self.decode)


class ChunkArrays:
    """A prefill chunk's tokens, row after row, after `before` cached tokens of each (0 or 1).

    `prompts` has the rows' prompts on the device, int32 [T + 1], each with a 0 behind it.
    """

    def __init__(self, chunk: Many[StepRow], before: int, prompts: Many[mx.array]) -> None:
        self.before = before  # its hidden state is known
        # int32 [B], how many of a row's tokens the trunk has to run, and how many there are.
        self.num_computed = np.array([row.length for row in chunk], dtype=np.int32)
        self.lengths = self.num_computed + before
        self.ends = np.cumsum(self.lengths) - 1  # each row's last one among all
        self.is_last = np.array([row.is_last for row in chunk])
        spans = [(p, row.start, row.start + row.length) for p, row in zip(prompts, chunk)]
        # int32 [N]: what the trunk has to run; all tokens; the one after each, 0 at a prompt's end.
        self.computed = _joined([p[start:end] for p, start, end in spans])
        self.tokens = _joined([p[start - before : end] for p, start, end in spans])
        self.following = _joined([p[start - before + 1 : end + 1] for p, start, end in spans])


class Drawn(NamedTuple):
    """The tokens of a window, on the device."""

    tokens: mx.array  # int32 [B, T], after each position; in a prefill [B, 1], after the last
    accepted: AcceptResult  # how many of them each row emits
    logprobs: tuple[mx.array, mx.array, mx.array] | None  # see `Sampler.logprobs`
    window: mx.array  # int32 [B, T], the last token before each row's window, and its drafts
    replaced: mx.array | None  # bool [B, T-1], tokens that are drafts in place of what was drawn


@dataclass(slots=True)
class InFlightStep:
    """A launched window of each row; its results are in the rows once it has been read."""

    rows: Many[StepRow]
    is_prefill: bool = False  # a chunk of prompts, of which all positions are kept
    drawn: Drawn | None = None  # None if no row draws a token
    prompt: PromptScores | None = None  # None if no row asked for them
    error: MlxMtpError | None = None  # the whole step failed: that of each row
    saves: list[Save] = field(default_factory=list)  # prefixes that were copied after it
    did_more: bool = False  # than computing tokens: restored or saved a prefix, or made logprobs
    done: mx.array | None = None  # of a chunk: evaluating it waits for the whole chunk
    launched_at: float = 0.0  # by the core's clock
    launching: float = 0.0  # seconds of the host's to launch its plan
    seconds: float | None = None  # what it takes, if that is known (see `StepClock`)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return tuple(row.sequence for row in self.rows)

    def note(self, errors: Mapping[int, MlxMtpError]) -> None:
        """Keep what went wrong in single rows, by index."""
        for index, error in errors.items():
            self.rows[index].error = error

    def fail(self, error: MlxMtpError) -> None:
        self.error = error
        for row in self.rows:
            row.error, row.num_cached = error, 0

    def read(self) -> None:
        """Wait for the device; raises what it raises, and then nothing has been read."""
        if self.done is not None:
            mx.eval(self.done)
            self.done = None
        if self.prompt is not None:
            for row, scores in zip(self.rows, self.prompt.read()):
                row.prompt_logprobs = scores
            self.prompt = None
        if self.drawn is None:
            return
        tokens, accepted, logprobs, window, replaced = self.drawn
        counts = (np.array(each).tolist() for each in accepted[:3])
        tables = None if logprobs is None else [np.array(each) for each in logprobs]
        swapped = None if replaced is None else np.array(replaced)
        traced = any(s.request.trace for s in self.sequences)
        drafts = np.array(window)[:, 1:].tolist() if traced else None
        drawn = zip(self.rows, np.array(tokens).tolist(), *counts)
        for index, (row, own, num_kept, num_accepted, finished) in enumerate(drawn):
            row.token_ids, row.finished = tuple(own[:num_kept]), finished
            if not self.is_prefill:
                row.num_cached, row.num_accepted = num_kept, num_accepted
                if row.of_others:
                    row.num_drafts = num_accepted
                # A row that had ended before verifies nothing.
                row.num_drafts = row.num_drafts if num_kept else 0
            if swapped is not None:
                row.optimistic = tuple(np.flatnonzero(swapped[index, :num_accepted]).tolist())
            if drafts is not None:
                row.drafts = tuple(drafts[index][: row.num_drafts])
            if tables is not None:
                top = row.sequence.request.sampling.top_logprobs
                row.logprobs = token_logprobs([t[index, :num_kept] for t in tables], top)
        self.drawn = None


def _joined(parts: Many[mx.array]) -> mx.array:
    # An operation on an empty array may end the process, on CUDA.
    filled = [part for part in parts if part.size] or parts[:1]
    return filled[0] if len(filled) == 1 else mx.concatenate([*filled])


# Tokens [N] for the trunk, and the cache that has begun with them.
ForwardPass = tuple[mx.array, BatchCache]
# Yields its forward pass, if it needs one, is sent the hidden states, and returns its step.
Launch = Generator[ForwardPass, mx.array, InFlightStep]
