"""A step: its plan, its prefill chunk as arrays, and a launched window until it has been read."""

from collections.abc import Generator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_mtp.cache.batch import BatchCache
from mlx_mtp.engine.request import TokenLogprobs
from mlx_mtp.engine.sequence import Copy, Sequence
from mlx_mtp.errors import MlxMtpError
from mlx_mtp.prefix.cache import Save
from mlx_mtp.speculative.verify import AcceptResult

# Of the prompts of one group, each with its first position and its number of tokens.
PrefillChunk = tuple[tuple[Sequence, int, int], ...]


class StepPlan(NamedTuple):
    """What to launch: a prefill chunk, a decode step, or both."""

    chunk: PrefillChunk  # empty: none
    decode: tuple[Sequence, ...]
    live: frozenset[Sequence]  # every unfinished sequence; other rows may be dropped
    # Drafts of the head for the next window, of rows that decode or will then.
    drafts: Mapping[Sequence, int] = MappingProxyType({})
    # Tokens that this step verifies in place of the head's drafts.
    copies: Mapping[Sequence, Copy] = MappingProxyType({})
    together: bool = False  # chunk and decode step in one forward pass

    @property
    def needs_host(self) -> bool:
        return any(s.needs_host for s in self.decode)


class ChunkArrays:
    """A prefill chunk's tokens, row after row, after `before` cached tokens of each (0 or 1).

    `prompts` has the rows' prompts on the device, int32 [T + 1], each with a 0 behind it.
    """

    def __init__(self, chunk: PrefillChunk, before: int, prompts: Many[mx.array]) -> None:
        self.before = before  # its hidden state is known
        # int32 [B], how many of a row's tokens the trunk has to run, and how many there are.
        self.num_computed = np.array([length for _, _, length in chunk], dtype=np.int32)
        self.lengths = self.num_computed + before
        self.ends = np.cumsum(self.lengths) - 1  # each row's last one among all
        self.is_last = np.array([s.num_prompt == start + length for s, start, length in chunk])
        spans = [(p, start, start + length) for p, (_, start, length) in zip(prompts, chunk)]
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


class PromptScores(NamedTuple):
    """Log-probabilities of a chunk's tokens, on the device: row after row, without padding."""

    counts: list[int]  # positions of each row
    tables: tuple[mx.array, ...]  # see `sampler.logprobs`

    def read(self, sequences: tuple[Sequence, ...]) -> list[tuple[TokenLogprobs, ...]]:
        ends = np.cumsum(self.counts)[:-1]
        rows = zip(*(np.split(np.array(table), ends) for table in self.tables))
        tops = [s.request.sampling.prompt_logprobs for s in sequences]
        return [_token_logprobs(list(row), top) for row, top in zip(rows, tops)]


@dataclass(slots=True)
class StepRow:
    """One row's window in a step: what was launched, and what came of it once that is read."""

    sequence: Sequence
    num_positions: int  # of its window
    # Of them, the drafts that count. What was copied of others counts only if it is accepted:
    # neither its tokens nor their number may tell the rest of another client's answer.
    num_drafts: int = 0
    copy: Copy | None = None  # what these were copied from
    num_proposed: int = 0  # drafts for its next window
    error: MlxMtpError | None = None
    num_cached: int = 0  # positions that stay in the caches
    token_ids: tuple[int, ...] = ()  # that it emits
    num_accepted: int = 0  # how many of them were drafts
    optimistic: tuple[int, ...] = ()  # places in `token_ids` of drafts that were not drawn
    drafts: tuple[int, ...] = ()  # if any row wants a trace
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finished: bool = False  # the device ended it


@dataclass(slots=True)
class InFlightStep:
    """A launched window of each row; its results are in the rows once it has been read."""

    rows: list[StepRow]
    is_prefill: bool = False  # a chunk of prompts, of which all positions are kept
    drawn: Drawn | None = None  # None if no row draws a token
    prompt: PromptScores | None = None  # None if no row asked for them
    error: MlxMtpError | None = None  # the whole step failed: that of each row
    saves: list[Save] = field(default_factory=list)  # prefixes that were copied after it
    did_more: bool = False  # than computing tokens: restored or saved a prefix, or made logprobs
    done: mx.array | None = None  # of a chunk: evaluating it waits for the whole chunk
    launched_at: float = 0.0  # by the core's clock
    launching: float = 0.0  # seconds of the host's to launch its plan
    seconds: float | None = None  # from the end of what was before it on the device to its own
    cost: float | None = None  # of a decode step, in seconds, where that is known (see `StepTimer`)

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
            for row, scores in zip(self.rows, self.prompt.read(self.sequences)):
                row.prompt_logprobs = scores
            self.prompt = None
        if self.drawn is None:
            return
        tokens, accepted, logprobs, window, replaced = self.drawn
        counts = (np.array(each).tolist() for each in accepted[:3])
        tables = None if logprobs is None else [np.array(each) for each in logprobs]
        swapped = None if replaced is None else np.array(replaced)
        traced = any(s.request.options.trace for s in self.sequences)
        drafts = np.array(window)[:, 1:].tolist() if traced else None
        drawn = zip(self.rows, np.array(tokens).tolist(), *counts)
        for index, (row, own, num_kept, num_accepted, finished) in enumerate(drawn):
            row.token_ids, row.finished = tuple(own[:num_kept]), finished
            if not self.is_prefill:
                row.num_cached, row.num_accepted = num_kept, num_accepted
                if row.copy is not None and row.copy.of_others:
                    row.num_drafts = num_accepted
                # A row that had ended before verifies nothing.
                row.num_drafts = row.num_drafts if num_kept else 0
            if swapped is not None:
                row.optimistic = tuple(np.flatnonzero(swapped[index, :num_accepted]).tolist())
            if drafts is not None:
                row.drafts = tuple(drafts[index][: row.num_drafts])
            if tables is not None:
                top = row.sequence.request.sampling.top_logprobs
                row.logprobs = _token_logprobs([t[index, :num_kept] for t in tables], top)
        self.drawn = None


def _token_logprobs(tables: list[np.ndarray], top: int | None) -> tuple[TokenLogprobs, ...]:
    if top is None:
        return ()
    return tuple(
        TokenLogprobs(chosen, tuple(zip(ids[:top], values[:top])), *rank)
        for chosen, ids, values, *rank in zip(*(table.tolist() for table in tables))
    )


def _joined(parts: Many[mx.array]) -> mx.array:
    # An operation on an empty array may end the process, on CUDA.
    filled = [part for part in parts if part.size] or parts[:1]
    return filled[0] if len(filled) == 1 else mx.concatenate([*filled])


# Tokens [N] for the trunk, and the cache that has begun with them.
ForwardPass = tuple[mx.array, BatchCache]
# Yields its forward pass, if it needs one, is sent the hidden states, and returns its step.
Launch = Generator[ForwardPass, mx.array, InFlightStep]
