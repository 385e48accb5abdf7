"""Requests and outputs of the engine: token ids, no HTTP and no text."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from mlx_mtp.config import MAX_DRAFT_TOKENS
from mlx_mtp.errors import InvalidRequestError, MlxMtpError
from mlx_mtp.sampling.grammar import Grammar
from mlx_mtp.sampling.params import SamplingParams

FinishReason = Literal["stop", "length", "error", "cancelled"]


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate.

    Args:
        request_id: unique among the requests in the engine.
        prompt_token_ids: at least one id, each below the tokenizer's vocabulary.
        sampling: how to sample; validated by `Engine.submit`.
        num_draft_tokens: drafts per step for this request, 0 to 8; None leaves them to the engine.
            They change nothing but the speed.
        grammar: `sampling.grammar`, compiled.
        client: the client's path of names, the most trusted first (see `FairQueue`).
        cache_salt: requests share cached prefixes only with those of the same salt.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    _: KW_ONLY
    num_draft_tokens: int | None = None
    grammar: Grammar | None = None
    client: tuple[str, ...] = ()
    cache_salt: str = ""


def check_num_draft_tokens(wanted: int | None, *, mtp_enabled: bool) -> None:
    """Check a request's number of drafts.

    Raises:
        InvalidRequestError: it is out of range, or there is no source of drafts.
    """
    if wanted is None:
        return
    field = "mtp.num_draft_tokens"
    if not 0 <= wanted <= MAX_DRAFT_TOKENS:
        raise InvalidRequestError(
            f"{field} is {wanted}; it must be 0 to {MAX_DRAFT_TOKENS}.", param=field
        )
    if wanted > 0 and not mtp_enabled:
        raise InvalidRequestError(
            f"{field} is {wanted}, but this server runs without MTP: only 0 is possible.",
            param=field,
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log) at one position, of the model's unprocessed distribution.

    Args:
        logprob: of the token that was drawn.
        top: (token id, logprob) of the most probable tokens, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one request gets of one step. The last one has a finish reason.

    Args:
        token_ids: new tokens, in order. The token that stops the sequence, if one did, is the last.
        logprobs: one per token when the request asked for them, else empty.
        finish_reason: None while the sequence goes on. "stop": an end-of-sequence or stop id;
            "length": max_tokens or the context is used up; "error": see `error`.
        error: set when finish_reason is "error".
        num_draft_tokens: drafts verified for this request in this step.
        num_accepted_tokens: how many of them were accepted.
        num_reused_tokens: with the first tokens, how many of the prompt's came from the prefix
            cache.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: MlxMtpError | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_reused_tokens: int = 0
