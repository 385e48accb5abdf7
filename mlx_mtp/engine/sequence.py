"""One row of a batch, as the host knows it."""

import enum
from bisect import bisect
from collections.abc import Sequence as Many
from typing import NamedTuple

from mlx_mtp.engine.request import Progress, Request, TokenLogprobs
from mlx_mtp.prefix.radix_tree import Node, root_key
from mlx_mtp.sampling.grammar_masks import Constraint
from mlx_mtp.speculative.draft_policy import DraftRow


class Status(enum.Enum):
    """State of a sequence; it only ever moves down this list."""

    WAITING = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    FINISHED = enum.auto()


class Copy(NamedTuple):
    """Tokens to verify in place of a row's drafts."""

    run: Many[int]  # what should follow the last token that has been read
    ahead: int  # of it, what the window in flight may bring
    of_others: bool = False  # from an earlier answer, which may be another client's

    @property
    def num_drafts(self) -> int:
        return len(self.run) - self.ahead


class Sequence:
    """A request in the engine; `stop_ids` end it, and it may emit `max_new_tokens`."""

    def __init__(self, request: Request, stop_ids: tuple[int, ...], max_new_tokens: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.client = request.options.client
        self.prompt = request.prompt_token_ids
        self.num_prompt = len(request.prompt_token_ids)
        self.stop_ids = stop_ids
        self.max_new_tokens = max_new_tokens
        self.constraint: Constraint | None = None
        if request.grammar is not None or request.bad_words is not None:
            allowed = request.sampling.allowed_token_ids
            self.constraint = Constraint(request.grammar, request.bad_words, allowed)
        self.drafting = DraftRow(request.options.num_draft_tokens)
        self.status = Status.WAITING
        self.num_computed = 0  # prompt tokens from a prefix or of a launched chunk
        self.begun = False  # its first chunk has been planned
        self.admitted_at = 0.0  # `perf_counter` when it left the queue
        self.prompt_logprobs: list[TokenLogprobs] = []  # of what has been read of its prompt
        self.output: list[int] = []  # tokens it has emitted
        self.ended = False  # the device ended it: its caches stand still at its answer's end
        self.num_cached = 0  # positions in its caches, by the steps that have been read
        self._steps_in_flight = 0
        self._positions_in_flight = 0

        # Of the prefix cache (prefix/policy.py, prefix/cache.py):
        self.prefix: Node | None = None  # that its prefill continues, until it has been copied
        self.key = self.prompt  # what the cache knows its prompt by
        self.num_reused = 0  # tokens of that prefix
        self.turns: list[int] = []  # where the messages of its prompt end, ascending lengths
        self.save_points: list[int] = []  # prefixes of its prompt to be saved, ascending lengths
        self.cuts: list[int] | None = None  # where its chunks end if it is computed exactly
        self.num_copied = 0  # length of a prefix that is copied, but not in the cache yet
        # Optimistic requests share what they compute with each other alone.
        self.salt = root_key(
            request.options.cache_salt or None, optimistic=request.sampling.optimistic > 0
        )
        self.number: int | None = None  # its place in the queue, once it has been considered
        self.awaited: tuple[Sequence, int] | None = None  # who computes its prefix, and its length
        self.skips_disk = False  # the disk was too slow, or memory had no room

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def surely_finished(self) -> bool:
        """Every step emits a token, so the steps in flight reach its limit at the latest."""
        return len(self.output) + self._steps_in_flight >= self.max_new_tokens

    @property
    def keeps_end(self) -> bool:
        """Its caches are kept at its end: unless only what was computed as a prompt is reused."""
        return self.ended and self.cuts is None

    @property
    def needs_host(self) -> bool:
        """Its next token can be drawn only once the one before it has been read."""
        return self.constraint is not None and self.constraint.active

    @property
    def max_cached(self) -> int:
        """Most positions in its caches once all steps in flight have run."""
        return self.num_cached + self._positions_in_flight

    @property
    def progress(self) -> Progress:
        return Progress(self.num_prompt, self.num_reused, self.num_cached, self.admitted_at)

    def to_copy(self, count: int) -> Copy | None:
        """At most so many tokens of its run: as many as it may emit and its grammar allows."""
        copier, ahead = self.drafting.copier, self.drafting.ahead
        assert copier is not None
        run = copier.run[: min(ahead + count, self.max_new_tokens - len(self.output) - 1)]
        if self.constraint is not None:
            run = run[: self.constraint.num_allowed(run)]
        return Copy(run, ahead, copier.of_others) if len(run) > ahead else None

    def begin(self, prefix: Node | None, save_points: list[int]) -> None:
        """Start after a prefix that is in the cache; None: from the beginning."""
        self.prefix = prefix
        self.num_reused = self.num_computed = self.num_cached = 0 if prefix is None else prefix.end
        self.save_points = save_points

    def restart(self) -> None:
        self.num_reused = self.num_computed = self.num_cached = 0

    def set_cached(self, num_cached: int) -> None:
        """What is in its caches when a step begins, where another rank keeps count."""
        self.num_cached = self.num_reused = num_cached
        self._steps_in_flight = self._positions_in_flight = 0

    def saved(self, length: int) -> None:
        """The prefix of this length is in the cache, or can't be saved."""
        if length in self.save_points:
            self.save_points.remove(length)
        if self.num_copied == length:
            self.num_copied = 0

    def next_cut(self, step: int) -> int:
        """Where the prefill chunk that starts at `num_computed` ends at the latest."""
        if self.cuts is not None:
            behind = bisect(self.cuts, self.num_computed)
            return self.cuts[behind] if behind < len(self.cuts) else self.num_prompt
        multiple = self.num_computed - self.num_computed % step + step
        saves = (p for p in self.save_points if p > self.num_computed)
        return min(next(saves, multiple), multiple, self.num_prompt)

    def launched(self, num_positions: int) -> None:
        self._steps_in_flight += 1
        self._positions_in_flight += num_positions

    def read(self, num_positions: int, num_kept: int) -> None:
        """A window has been read; its first `num_kept` positions stay in the caches."""
        assert 0 <= num_kept <= num_positions <= self._positions_in_flight
        self._steps_in_flight -= 1
        self._positions_in_flight -= num_positions
        self.num_cached += num_kept
