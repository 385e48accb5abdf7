"""A step: its plan, its prefill chunk as arrays, and a launched window until it has been read."""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_mtp.engine.prefix import Save
from mlx_mtp.engine.request import TokenLogprobs
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.errors import MlxMtpError
from mlx_mtp.speculative.acceptance import AcceptResult

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
    copies: Mapping[Sequence, Many[int]] = MappingProxyType({})
    copying: bool = False  # some may follow in the next step, once this one has been read

    @property
    def needs_host(self) -> bool:
        return self.copying or any(s.needs_host for s in self.decode)


class ChunkArrays:
    """A prefill chunk on the host, row after row, after `before` cached tokens of each (0 or 1)."""

    def __init__(self, chunk: PrefillChunk, before: int) -> None:
        self.before = before  # its hidden state is known
        # int32 [B], how many of a row's tokens the trunk has to run, and how many there are.
        self.num_computed = np.array([length for _, _, length in chunk], dtype=np.int32)
        self.lengths = self.num_computed + before
        self.ends = np.cumsum(self.lengths) - 1  # each row's last one among all
        ends = [(s.num_prompt, start + length) for s, start, length in chunk]  # in this chunk
        self.is_last = np.array([num_prompt == end for num_prompt, end in ends])
        spans = [(s.prompt, start - before, start + length) for s, start, length in chunk]
        # int32 [N]: the tokens, and the one after each, 0 where the prompt ends.
        tokens = [prompt[low:high] for prompt, low, high in spans]
        following = [(*prompt[low + 1 : high + 1], 0)[: high - low] for prompt, low, high in spans]
        self.tokens, self.following = (
            np.concatenate(parts).astype(np.int32) for parts in (tokens, following)
        )


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
class InFlightStep:
    """A window of B rows that was launched, and what each row got once it has been read."""

    sequences: tuple[Sequence, ...]
    num_positions: tuple[int, ...]  # length of each row's window
    is_prefill: bool = False  # a chunk of prompts, of which all positions are kept
    num_drafts: list[int] = field(default_factory=list)  # that count for each row
    copied: list[bool] = field(default_factory=list)  # whether these were copied
    num_proposed: list[int] = field(default_factory=list)  # drafts for the next window
    drawn: Drawn | None = None  # None if no row draws a token
    prompt: PromptScores | None = None  # None if no row asked for them
    error: MlxMtpError | None = None  # the whole step failed
    row_errors: Mapping[int, MlxMtpError] = field(default_factory=dict)  # by index
    saves: list[Save] = field(default_factory=list)  # prefixes that were copied after it
    did_more: bool = False  # than computing tokens: restored or saved a prefix, or made logprobs
    done: mx.array | None = None  # of a chunk: is there when all of it has been computed
    launched_at: float = 0.0  # by the core's clock
    # Valid once it has been read:
    num_cached: list[int] = field(default_factory=list)  # positions that stay in the caches
    token_ids: list[tuple[int, ...]] = field(default_factory=list)  # that each row emits
    num_accepted: list[int] = field(default_factory=list)  # how many of them were drafts
    optimistic: list[tuple[int, ...]] = field(default_factory=list)  # which were not drawn
    drafts: list[tuple[int, ...]] = field(default_factory=list)  # if any row wants a trace
    logprobs: list[tuple[TokenLogprobs, ...]] = field(default_factory=list)
    prompt_logprobs: list[tuple[TokenLogprobs, ...]] = field(default_factory=list)
    finished: list[bool] = field(default_factory=list)  # the device ended the row
    seconds: float | None = None  # from the end of what was before it on the device to its own

    def __post_init__(self) -> None:
        count = len(self.sequences)
        kept = self.num_positions if self.is_prefill and self.error is None else [0] * count
        self.num_drafts = self.num_drafts or [0] * count
        self.copied = self.copied or [False] * count
        self.num_cached = self.num_cached or list(kept)
        self.token_ids = self.token_ids or [()] * count
        self.num_accepted = self.num_accepted or [0] * count
        self.optimistic = self.optimistic or [()] * count
        self.drafts = self.drafts or [()] * count
        self.logprobs = self.logprobs or [()] * count
        self.prompt_logprobs = self.prompt_logprobs or [()] * count
        self.finished = self.finished or [False] * count

    def read(self) -> None:
        """Wait for the device; raises what it raises, and then nothing has been read."""
        if self.done is not None:
            mx.eval(self.done)
            self.done = None
        if self.prompt is not None:
            self.prompt_logprobs = self.prompt.read(self.sequences)
            self.prompt = None
        if self.drawn is None:
            return
        tokens, accepted, logprobs, window, replaced = self.drawn
        drawn = np.array(tokens).tolist()
        num_kept, num_accepted, finished = (np.array(a).tolist() for a in accepted[:3])
        if logprobs is not None:
            tables = [np.array(a) for a in logprobs]
            self.logprobs = [
                _token_logprobs(
                    [table[row, :kept] for table in tables], s.request.sampling.top_logprobs
                )
                for row, (s, kept) in enumerate(zip(self.sequences, num_kept))
            ]
        self.token_ids = [tuple(row[:kept]) for row, kept in zip(drawn, num_kept)]
        self.finished = finished
        if not self.is_prefill:
            self.num_cached, self.num_accepted = num_kept, num_accepted
            # A row that had ended before verifies nothing.
            self.num_drafts = [n if kept else 0 for n, kept in zip(self.num_drafts, num_kept)]
        if replaced is not None:
            rows = zip(np.array(replaced), num_accepted)
            self.optimistic = [tuple(np.flatnonzero(row[:n]).tolist()) for row, n in rows]
        if any(s.request.trace for s in self.sequences):
            rows = np.array(window)[:, 1:].tolist()
            self.drafts = [tuple(row[:n]) for row, n in zip(rows, self.num_drafts)]
        self.drawn = None

    def error_of(self, row: int) -> MlxMtpError | None:
        return self.error or self.row_errors.get(row)


def _token_logprobs(tables: list[np.ndarray], top: int | None) -> tuple[TokenLogprobs, ...]:
    if top is None:
        return ()
    return tuple(
        TokenLogprobs(chosen, tuple(zip(ids[:top], values[:top])), *rank)
        for chosen, ids, values, *rank in zip(*(table.tolist() for table in tables))
    )
