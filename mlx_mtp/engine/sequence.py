"""One row of a batch, as the host knows it."""

from __future__ import annotations

import enum

from mlx_mtp.cache.prefix_keys import root_key
from mlx_mtp.cache.prefix_node import Node
from mlx_mtp.engine.request import Request
from mlx_mtp.sampling.grammar_masks import Constraint
from mlx_mtp.speculative.depth import Row


class Status(enum.Enum):
    """Where a sequence stands. It moves down this list only."""

    WAITING = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """A request on its way through the engine.

    Steps are launched before their predecessors are read, so the host knows the exact length only
    of what it has read; `max_cached` bounds the rest.

    Args:
        request: what was asked.
        stop_ids: every id that ends it.
        max_new_tokens: tokens it may emit, context limit included.

    Attributes:
        drafting: what the choice of the depth knows of it.
        num_computed: prompt tokens that a prefill chunk has been launched for, or that came from
            the prefix cache.
        begun: its first chunk has been planned.
        output: the tokens that it has emitted.
        ended: the device ended it, so that its caches stand where its answer ends.
        prefix: where in the prefix cache its prompt goes on from, until that has been used.
        num_reused: tokens that it took from there.
        save_points: lengths of the prefixes of its prompt that will be saved, ascending; those that
            have been, or can't be, are taken out.
        first_turn: where the first message of its prompt ends, which is mostly the system's.
        num_copied: length of the prefix that was copied to be saved and is not in the cache yet; 0
            if there is none.
        salt: whose prefixes it may use: the `root_key` of its salt.
        number: its place in the queue, once it has been considered.
        awaited: a prompt ahead of it, and the save point of that which it waits for.
        reads: it waits for its prefix to be read from the disk, or for its turn there.
        skips_disk: that took too long, or memory had no room for it; what is there must do.
    """

    def __init__(self, request: Request, stop_ids: tuple[int, ...], max_new_tokens: int) -> None:
        self.request = request
        self.stop_ids = stop_ids
        self.max_new_tokens = max_new_tokens
        self.constraint = Constraint(request.grammar) if request.grammar is not None else None
        self.drafting = Row(request.num_draft_tokens)
        self.status = Status.WAITING
        self.num_computed = 0
        self.begun = False
        self.output: list[int] = []
        self.ended = False
        self.prefix: Node | None = None
        self.num_reused = 0
        self.save_points: list[int] = []
        self.first_turn: int | None = None
        self.num_copied = 0
        self.salt = root_key(request.cache_salt or None)
        self.number: int | None = None
        self.awaited: tuple[Sequence, int] | None = None
        self.reads = False
        self.skips_disk = False
        self.num_cached = 0
        self.steps_in_flight = 0
        self.positions_in_flight = 0

    @property
    def request_id(self) -> str:
        """The request's."""
        return self.request.request_id

    @property
    def client(self) -> tuple[str, ...]:
        """Whose request it is."""
        return self.request.client

    @property
    def prompt(self) -> tuple[int, ...]:
        """Prompt token ids."""
        return self.request.prompt_token_ids

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        """Tokens that it has emitted."""
        return len(self.output)

    @property
    def num_uncomputed(self) -> int:
        """Prompt tokens that no prefill chunk has been launched for."""
        return self.num_prompt - self.num_computed

    @property
    def finished(self) -> bool:
        """It gets no further output."""
        return self.status is Status.FINISHED

    @property
    def surely_finished(self) -> bool:
        """Every step emits a token, so what is in flight will reach the limit at the latest."""
        return self.num_output + self.steps_in_flight >= self.max_new_tokens

    @property
    def needs_host(self) -> bool:
        """Its next token can be drawn only once the one before it has been read."""
        return self.constraint is not None and self.constraint.active

    @property
    def max_cached(self) -> int:
        """Most tokens its caches can hold once all that is in flight has run."""
        return self.num_cached + self.positions_in_flight

    @property
    def most_cached(self) -> int:
        """Most tokens its caches can ever come to hold."""
        return self.num_prompt + self.max_new_tokens

    def begin(self, prefix: Node | None, save_points: list[int], first_turn: int | None) -> None:
        """Start after a prefix that is in the cache; None: from the beginning."""
        self.first_turn = first_turn
        self.prefix = prefix
        self.num_reused = self.num_computed = self.num_cached = 0 if prefix is None else prefix.end
        self.save_points = save_points

    def restart(self) -> None:
        """Its prefix could not be used: compute the prompt from the beginning."""
        self.num_reused = self.num_computed = self.num_cached = 0

    def saved(self, length: int) -> None:
        """The prefix of this length is in the cache, or won't ever be."""
        if length in self.save_points:
            self.save_points.remove(length)
        if self.num_copied == length:
            self.num_copied = 0

    def next_cut(self, step: int) -> int:
        """Where the prefill chunk from `num_computed` on ends at the latest."""
        multiple = self.num_computed - self.num_computed % step + step
        saves = (p for p in self.save_points if p > self.num_computed)
        return min(next(saves, multiple), multiple, self.num_prompt)

    def launched(self, num_positions: int) -> None:
        """A window of this many positions is on its way."""
        self.steps_in_flight += 1
        self.positions_in_flight += num_positions

    def read(self, num_positions: int, num_kept: int) -> None:
        """A window has come back, and its first `num_kept` positions stay in the caches."""
        self.steps_in_flight -= 1
        self.positions_in_flight -= num_positions
        self.num_cached += num_kept
        assert 0 <= num_kept <= num_positions
        assert self.steps_in_flight >= 0
        assert self.positions_in_flight >= 0
