"""One row of a batch, as the host knows it."""

import enum

from mlx_mtp.engine.request import Progress, Request, TokenLogprobs
from mlx_mtp.prefix.policy import PrefixState
from mlx_mtp.prefix.radix_tree import root_key
from mlx_mtp.sampling.grammar_masks import Constraint
from mlx_mtp.speculative.draft_policy import DraftRow


class Status(enum.Enum):
    """State of a sequence; it only ever moves down this list."""

    WAITING = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """A request in the engine; `stop_ids` end it, and it may emit `max_new_tokens`."""

    def __init__(self, request: Request, stop_ids: tuple[int, ...], max_new_tokens: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.client = request.client
        self.prompt = request.prompt_token_ids
        self.num_prompt = len(request.prompt_token_ids)
        self.stop_ids = stop_ids
        self.max_new_tokens = max_new_tokens
        self.constraint: Constraint | None = None
        if request.grammar is not None or request.bad_words is not None:
            allowed = request.sampling.allowed_token_ids
            self.constraint = Constraint(request.grammar, request.bad_words, allowed)
        self.drafting = DraftRow(request.num_draft_tokens)
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
        # Optimistic requests share what they compute with each other alone.
        salt = root_key(request.cache_salt or None, optimistic=request.sampling.optimistic > 0)
        # No prompt's logprobs from a cached prefix: its hidden states are not kept.
        looks_up = request.sampling.prompt_logprobs is None
        self.prefix = PrefixState(self.prompt, salt, looks_up)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def surely_finished(self) -> bool:
        """Every step emits a token, so the steps in flight reach its limit at the latest."""
        return len(self.output) + self._steps_in_flight >= self.max_new_tokens

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
        return Progress(self.num_prompt, self.prefix.num_reused, self.num_cached, self.admitted_at)

    def begin(self, num_reused: int) -> None:
        """Start its prompt after a prefix of this length, which is in its caches or will be."""
        self.prefix.num_reused = self.num_computed = self.num_cached = num_reused

    def set_cached(self, num_cached: int) -> None:
        """Set what is in its caches when a step begins, where another rank keeps count."""
        self.num_cached = self.prefix.num_reused = num_cached
        self._steps_in_flight = self._positions_in_flight = 0

    def launched(self, num_positions: int) -> None:
        self._steps_in_flight += 1
        self._positions_in_flight += num_positions

    def read(self, num_positions: int, num_kept: int) -> None:
        """A window has been read; its first `num_kept` positions stay in the caches."""
        assert 0 <= num_kept <= num_positions <= self._positions_in_flight
        self._steps_in_flight -= 1
        self._positions_in_flight -= num_positions
        self.num_cached += num_kept
