"""How an answer is made, whichever API it was asked through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Options:
    """The numbers of a request. None leaves a value to the model's defaults.

    Args:
        max_tokens: most tokens of each choice; None: as many as there is room for.
        max_tokens_field: what the API calls it.
        cut_to_context: where there is no room for `max_tokens`, fewer will do.
        num_prompts: that are answered.
        n: choices for each prompt.
        stop: strings that end a choice.
        stop_token_ids: token ids that do.
        ignore_eos: the model's own end of sequence does not.
        seed: for the noise; None: the server chooses one.
        logit_bias: value by token id, the id as a text.
        top_logprobs: alternatives to report for each token; None: no logprobs.
        num_draft_tokens: drafts per step; None leaves them to the engine.
        user: whom the client says that it asks for.
        cache_salt: only requests with the same one share prefixes in the cache.
    """

    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    cut_to_context: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    num_prompts: int = 1
    n: int = 1
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    top_logprobs: int | None = None
    num_draft_tokens: int | None = None
    user: str | None = None
    cache_salt: str | None = None
