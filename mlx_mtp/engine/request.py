"""Requests and outputs of the engine: token ids, no HTTP and no text."""

from dataclasses import KW_ONLY, dataclass
from typing import Literal, NamedTuple

from mlx_mtp.config import MAX_DRAFT_TOKENS
from mlx_mtp.errors import InvalidRequestError, MlxMtpError
from mlx_mtp.sampling.bad_words import BadWords
from mlx_mtp.sampling.grammar import Grammar
from mlx_mtp.sampling.params import SamplingParams

FinishReason = Literal["stop", "length", "error", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How the engine computes a sequence, beside its sampling."""

    num_draft_tokens: int | None = None  # drafts per step, 0 to 8; None leaves them to the engine
    client: tuple[str, ...] = ()  # a path of names, the most trusted first (see `FairQueue`)
    cache_salt: str = ""  # requests share cached prefixes only with those of the same salt
    trace: bool = False  # outputs have the drafts of each step
    progress: bool = False  # outputs before the first token say how much of the prompt is computed


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate."""

    request_id: str  # unique among the requests in the engine
    prompt_token_ids: tuple[int, ...]  # at least one, each below the tokenizer's vocabulary
    sampling: SamplingParams  # validated by `Engine.submit`
    _: KW_ONLY
    options: RequestOptions = RequestOptions()
    grammar: Grammar | None = None  # `sampling.grammar`, compiled
    bad_words: BadWords | None = None  # which the answer's text must not contain


def check_num_draft_tokens(wanted: int | None, *, mtp_enabled: bool) -> None:
    """Raise InvalidRequestError if a request's number of drafts is impossible."""
    field = "mtp.num_draft_tokens"
    why = None
    if wanted is not None and not 0 <= wanted <= MAX_DRAFT_TOKENS:
        why = f"; it must be 0 to {MAX_DRAFT_TOKENS}."
    elif wanted and not mtp_enabled:
        why = ", but this server runs without MTP: only 0 is possible."
    if why is not None:
        raise InvalidRequestError(f"{field} is {wanted}{why}", param=field)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log) at one position, of the model's unprocessed distribution."""

    logprob: float  # of the token that was drawn, or that the prompt has there
    top: tuple[tuple[int, float], ...]  # (token id, logprob) of the most probable, best first
    rank: int | None = None  # of a prompt's token: 1 if none is more probable


class Progress(NamedTuple):
    """How much of a prompt is computed, in tokens."""

    total: int
    reused: int  # from the prefix cache
    done: int  # those included
    began: float  # `perf_counter`


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one request gets of one step; its last output has a finish reason."""

    request_id: str
    token_ids: tuple[int, ...] = ()  # new tokens, in order
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token if the request asked for them
    # "stop" for an end-of-sequence or stop id, which is then the last of `token_ids`; "length" if
    # max_tokens or the context is used up; "error" with `error`.
    finish_reason: FinishReason | None = None
    error: MlxMtpError | None = None
    num_draft_tokens: int = 0  # drafts that count in this step (see `StepRow.num_drafts`)
    num_accepted_tokens: int = 0  # how many of them were accepted
    # Which of its tokens are drafts that the model did not draw (`SamplingParams.optimistic`).
    optimistic: tuple[int, ...] = ()
    draft_source: str = ""  # where drafts are from: a name in `speculative/draft_sources.py`
    num_reused_tokens: int = 0  # prompt tokens from the prefix cache, with the first output
    admitted_at: float = 0.0  # `perf_counter` when its prefill began, with the first output
    # With the first output, if they were asked for: of all tokens of the prompt but its first.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    drafts: tuple[int, ...] | None = None  # that count in this step; None: no trace was asked for
    progress: Progress | None = None  # up to the first output with tokens, if it was asked for
