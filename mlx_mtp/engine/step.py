"""A step of the engine: its rows, its plan, and its launched arrays until they are read."""

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
from mlx_mtp.speculative.draft_policy import RowDrafting
from mlx_mtp.speculative.verify import AcceptResult


@dataclass(slots=True, eq=False)
class StepRow:
    """One sequence's part of a step: planned by the scheduler, launched by the runner, then read.

    Its positions are either `length` tokens of the prompt from `start` on, or a verify window: the
    last token that the sequence emitted, and drafts.
    """

    sequence: Sequence
    # The plan:
    start: int = 0  # first position of a prompt's chunk
    length: int = 0  # number of positions; the runner sets the length of a verify window
    num_proposed: int = 0  # number of drafts that the MTP head makes for the next window
    # The host's guess of the tokens that follow the last token it has read. If the guess is right,
    # the window in flight emits the first tokens of the run, at most `ahead`. This step verifies
    # the next `len(run) - ahead` tokens, in place of the head's drafts (see
    # `Batch.upload_host_drafts`).
    run: Many[int] = ()
    ahead: int = 0
    source: str = MTP  # source of the window's drafts
    of_others: bool = False  # the run is from an earlier answer, which may be another client's
    # The result:
    # Number of the window's drafts, for outputs and statistics. Of a run `of_others` only accepted
    # drafts count: the rejected ones, or their number, could reveal another client's answer.
    num_drafts: int = 0
    error: MlxMtpError | None = None
    num_cached: int = 0  # positions of this step that stay in the caches
    token_ids: tuple[int, ...] = ()  # emitted tokens
    num_accepted: int = 0  # emitted tokens that were drafts
    optimistic: tuple[int, ...] = ()  # indices in `token_ids` of drafts that were not sampled
    drafts: tuple[int, ...] = ()  # the first `num_drafts` drafts, if any row asked for a trace
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finished: bool = False  # True if the device ended the sequence

    def verify_host_run(self, count: int) -> None:
        """Plan to verify at most `count` tokens of the run that the host's drafter offers.

        The sequence's `max_new_tokens` and grammar can allow fewer tokens, or none.
        """
        sequence, ahead = self.sequence, self.drafting.ahead
        drafter = self.drafting.host[self.drafting.source]
        most = sequence.max_new_tokens - len(sequence.output) - 1
        run = drafter.next_run[: min(ahead + count, most)]
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
        """True if this is the prompt's last chunk."""
        return self.start + self.length == self.sequence.num_prompt

    @property
    def drafting(self) -> RowDrafting:
        return self.sequence.drafting

    @property
    def num_verified(self) -> int:
        return self.length - 1


class StepPlan(NamedTuple):
    """What to launch: a prefill chunk, a decode step, or both."""

    chunk: tuple[StepRow, ...]  # prompts of one group; empty: no chunk
    decode: tuple[StepRow, ...]
    live: frozenset[Sequence]  # all unfinished sequences; other rows can be dropped
    together: bool = False  # True: chunk and decode step share one forward pass
    sync: bool = False  # True if the draft policy chose to read it before it plans the next step

    @property
    def needs_host(self) -> bool:
        return self.sync or any(row.sequence.needs_host for row in self.decode)


class ChunkArrays:
    """A prefill chunk's tokens, row after row.

    In the first chunk after a cached prefix, `num_repeated` is 1, else 0: each row's `tokens` and
    `following` begin with the prefix's last token. The target model skips that token, as its hidden
    state is cached. The head runs it, as the head's KV entry of a token also needs the next token.
    `prompts` are on the device, int32 [T + 1], each followed by a 0.
    """

    def __init__(self, chunk: Many[StepRow], num_repeated: int, prompts: Many[mx.array]) -> None:
        self.num_repeated = num_repeated
        # int32 [B]: each row's number of tokens for the target model, and of all its tokens.
        self.num_to_compute = np.array([row.length for row in chunk], dtype=np.int32)
        self.lengths = self.num_to_compute + num_repeated
        self.ends = np.cumsum(self.lengths) - 1  # index of each row's last token
        self.is_last = np.array([row.is_last for row in chunk])
        spans = [(p, row.start, row.start + row.length) for p, row in zip(prompts, chunk)]
        # int32 [N]: tokens for the target model; all tokens; and the token after each of all
        # tokens, 0 after a prompt's last.
        self.to_compute = _joined([p[start:end] for p, start, end in spans])
        self.tokens = _joined([p[start - num_repeated : end] for p, start, end in spans])
        self.following = _joined([p[start - num_repeated + 1 : end + 1] for p, start, end in spans])


class SampledWindow(NamedTuple):
    """The sampled tokens of all rows of a step, on the device."""

    tokens: mx.array  # int32 [B, T], after each position; of a chunk [B, 1], after the last one
    accepted: AcceptResult  # which of the tokens each row emits
    logprobs: tuple[mx.array, mx.array, mx.array] | None  # see `Sampler.logprobs`
    window: mx.array  # int32 [B, T], each row's last emitted token and its drafts
    replaced: mx.array | None  # bool [B, T-1], drafts emitted in place of the sampled token


@dataclass(slots=True)
class InFlightStep:
    """A launched chunk or decode step. Once it has been read the results are in its rows."""

    rows: Many[StepRow]
    is_prefill: bool = False  # True for a chunk of prompts, which keeps all positions
    sampled: SampledWindow | None = None  # None if no token is sampled
    prompt_scores: PromptScores | None = None  # None if no row asked for prompt logprobs
    error: MlxMtpError | None = None  # set if the whole step failed
    saves: list[Save] = field(default_factory=list)  # prefixes copied from the step's rows
    # False if the step did more than usual: restored or saved prefixes, images, prompt logprobs.
    timing_valid: bool = True
    done: mx.array | None = None  # of a chunk: evaluating this array waits for the whole chunk
    launched_at: float = 0.0  # time of the core's clock
    launch_seconds: float = 0.0  # seconds that the host took to launch the step's plan
    seconds: float | None = None  # how long the step took (see `StepClock`); None: unknown
    sync: bool = False  # True if `seconds` is that of a step without look-ahead

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return tuple(row.sequence for row in self.rows)

    def set_errors(self, errors: Mapping[int, MlxMtpError]) -> None:
        """Set the errors of single rows, by index."""
        for index, error in errors.items():
            self.rows[index].error = error

    def fail(self, error: MlxMtpError) -> None:
        self.error = error
        for row in self.rows:
            row.error, row.num_cached = error, 0

    def read(self) -> None:
        """Wait for the device and read all results; raises what the device raises."""
        if self.done is not None:
            mx.eval(self.done)
            self.done = None
        if self.prompt_scores is not None:
            for row, scores in zip(self.rows, self.prompt_scores.read()):
                row.prompt_logprobs = scores
            self.prompt_scores = None
        if self.sampled is None:
            return
        tokens, accepted, logprobs, window, replaced = self.sampled
        counts = (np.array(each).tolist() for each in accepted[:3])
        tables = None if logprobs is None else [np.array(each) for each in logprobs]
        replacing = None if replaced is None else np.array(replaced)
        traced = any(s.request.options.trace for s in self.sequences)
        drafts = np.array(window)[:, 1:].tolist() if traced else None
        results = zip(self.rows, np.array(tokens).tolist(), *counts)
        for index, (row, ids, num_kept, num_accepted, finished) in enumerate(results):
            row.token_ids, row.finished = tuple(ids[:num_kept]), finished
            if not self.is_prefill:
                row.num_cached, row.num_accepted = num_kept, num_accepted
                if row.of_others:
                    row.num_drafts = num_accepted
                # A row that had ended before has verified nothing.
                row.num_drafts = row.num_drafts if num_kept else 0
            if replacing is not None:
                places = np.flatnonzero(replacing[index, :num_accepted])
                row.optimistic = tuple(places.tolist())
            if drafts is not None:
                row.drafts = tuple(drafts[index][: row.num_drafts])
            if tables is not None:
                top = row.sequence.request.sampling.top_logprobs
                row.logprobs = token_logprobs([t[index, :num_kept] for t in tables], top)
        self.sampled = None


def _joined(parts: Many[mx.array]) -> mx.array:
    # On CUDA an operation on an empty array can abort the process.
    filled = [part for part in parts if part.size] or parts[:1]
    return filled[0] if len(filled) == 1 else mx.concatenate([*filled])


# Token ids [N] for the target model, and the cache that is prepared for them.
ForwardPass = tuple[mx.array, BatchCache]
# A generator that yields its forward pass, if it needs one, is sent the hidden states [N, H], and
# returns the launched step. So several launches can share one pass.
StepLaunch = Generator[ForwardPass, mx.array, InFlightStep]
