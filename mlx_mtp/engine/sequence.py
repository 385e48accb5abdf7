"""A request in the engine, as the host knows it."""

from mlx_mtp.engine.request import PrefillProgress, Request, TokenLogprobs
from mlx_mtp.prefix.policy import PrefixState
from mlx_mtp.prefix.radix_tree import root_key
from mlx_mtp.sampling.grammar_masks import Constraint
from mlx_mtp.speculative.draft_policy import RowDrafting
from mlx_mtp.vision.placed import NO_TOKEN


class Sequence:
    """A request being answered; any of `stop_ids` ends it, as do `max_new_tokens` tokens."""

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
        self.drafting = RowDrafting(request.options.num_draft_tokens)
        self.finished = False  # True also if it was cancelled or failed (see `PrefixState.dropped`)
        self.num_planned = 0  # prompt tokens that are reused, or planned in chunks so far
        self.begun = False  # True if its first chunk has been planned
        self.admitted_at = 0.0  # `perf_counter` when it left the queue
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the chunks that have been read
        self.output: list[int] = []  # emitted tokens
        self.num_cached = 0  # positions in the caches after the steps that have been read
        self.max_cached = 0  # upper bound of the positions in the caches after steps in flight
        self._steps_in_flight = 0
        # An optimistic request shares cached prefixes only with other optimistic ones.
        salt = root_key(
            request.options.cache_salt or None, optimistic=request.sampling.optimistic > 0
        )
        # Prompt logprobs need hidden states of all positions, which the prefix cache doesn't keep.
        looks_up = request.sampling.prompt_logprobs is None
        self.images = images = request.images
        keys = self.prompt if images is None else images.keys(self.prompt)
        self.prefix = PrefixState(keys, salt, looks_up)
        # The prompt that drafts are copied from: without the tokens of images.
        self.copied = self.prompt
        if images is not None:
            self.copied = tuple(images.with_ids(self.prompt, NO_TOKEN).tolist())

    @property
    def surely_finished(self) -> bool:
        """True if the steps in flight reach `max_new_tokens`: each emits at least one token."""
        return len(self.output) + self._steps_in_flight >= self.max_new_tokens

    @property
    def needs_host(self) -> bool:
        """True if its next token can be sampled only after the last one has been read."""
        return self.constraint is not None and self.constraint.active

    @property
    def progress(self) -> PrefillProgress:
        return PrefillProgress(
            self.num_prompt, self.prefix.num_reused, self.num_cached, self.admitted_at
        )

    def begin_prompt(self, num_reused: int) -> None:
        """Start the prompt after a cached prefix of `num_reused` tokens."""
        self.prefix.num_reused = self.num_planned = num_reused
        self.num_cached = self.max_cached = num_reused

    def note_launched(self, num_positions: int) -> None:
        self._steps_in_flight += 1
        self.max_cached += num_positions

    def note_read(self, num_positions: int, num_kept: int) -> None:
        """Note that a step has been read; its first `num_kept` positions stay in the caches."""
        self._steps_in_flight -= 1
        self.max_cached -= num_positions - num_kept
        self.num_cached += num_kept
        assert 0 <= num_kept <= num_positions and self.num_cached <= self.max_cached
