"""One row of a batch, as the host knows it."""

from __future__ import annotations

import enum

from mlx_mtp.engine.request import Request
from mlx_mtp.sampling.constraint import Constraint
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
    """

    def __init__(self, request: Request, stop_ids: tuple[int, ...], max_new_tokens: int) -> None:
        self.request = request
        self.stop_ids = stop_ids
        self.max_new_tokens = max_new_tokens
        self.constraint = Constraint(request.grammar) if request.grammar is not None else None
        self.drafting = Row(request.num_draft_tokens)
        self.status = Status.WAITING
        self.num_computed = 0
        self.num_output = 0
        self.num_cached = 0
        self.steps_in_flight = 0
        self.positions_in_flight = 0

    @property
    def request_id(self) -> str:
        """The request's."""
        return self.request.request_id

    @property
    def prompt(self) -> tuple[int, ...]:
        """Prompt token ids."""
        return self.request.prompt_token_ids

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt_token_ids)

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
