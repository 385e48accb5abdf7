"""Requests and outputs of the engine: token ids, no HTTP and no text."""

from dataclasses import KW_ONLY, dataclass
from typing import Literal, NamedTuple

from mlx_mtp.config import MAX_DRAFT_TOKENS
from mlx_mtp.errors import ContextLengthError, InvalidRequestError, MlxMtpError
from mlx_mtp.sampling.bad_words import BadWords
from mlx_mtp.sampling.grammar import Grammar
from mlx_mtp.sampling.params import SamplingParams, check_token_ids
from mlx_mtp.vision.placed import PromptImages

FinishReason = Literal["stop", "length", "error", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How the engine computes a request, apart from its sampling parameters."""

    num_draft_tokens: int | None = None  # drafts per step, 0 to 8; None: the engine chooses
    client: tuple[str, ...] = ()  # a path of names, the most trusted first (see `FairQueue`)
    cache_salt: str = ""  # only requests with the same salt share cached prefixes
    trace: bool = False  # outputs contain the drafts of each step
    progress: bool = False  # outputs up to the first token report how much of the prompt is done


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate."""

    request_id: str  # unique among the requests in the engine
    prompt_token_ids: tuple[int, ...]  # at least one, each below the tokenizer's vocabulary size
    sampling: SamplingParams
    _: KW_ONLY
    options: RequestOptions = RequestOptions()
    grammar: Grammar | None = None  # `sampling.grammar`, compiled
    bad_words: BadWords | None = None  # texts that the answer must not contain
    images: PromptImages | None = None  # in the prompt; the model must have a vision tower

    def validate(self, vocab_size: int, max_model_len: int, *, mtp_enabled: bool) -> None:
        """Raise InvalidRequestError or ContextLengthError if the request breaks these limits.

        The server has already checked the parameters, so that invalid ones cost no tokenization.
        The grammar and the prompt's ids exist only afterwards, and other callers check nothing.
        """
        self.sampling.validate(vocab_size)
        prompt = self.prompt_token_ids
        if not prompt:
            message = "The prompt is empty; it needs at least one token."
            raise InvalidRequestError(message, param="prompt")
        if len(prompt) >= max_model_len:
            raise prompt_too_long(len(prompt), max_model_len)
        if self.sampling.grammar is not None and self.grammar is None:
            raise InvalidRequestError("The request's grammar has not been compiled.")
        check_token_ids("prompt", prompt, vocab_size)
        check_num_draft_tokens(self.options.num_draft_tokens, mtp_enabled=mtp_enabled)


def prompt_too_long(count: int | str, max_model_len: int, more: str = "") -> ContextLengthError:
    """Returns the error for a prompt of `count` tokens; agents recognize its wording."""
    return ContextLengthError(
        f"The prompt is too long: {count} tokens > {max_model_len - 1} maximum. This model's "
        f"maximum context length is {max_model_len} tokens{more}."
    )


def check_num_draft_tokens(count: int | None, *, mtp_enabled: bool) -> None:
    """Raise InvalidRequestError if the engine can't draft `count` tokens per step."""
    field = "mtp.num_draft_tokens"
    why = None
    if count is not None and not 0 <= count <= MAX_DRAFT_TOKENS:
        why = f"; it must be 0 to {MAX_DRAFT_TOKENS}."
    elif count and not mtp_enabled:
        why = ", but this server runs without MTP: only 0 is possible."
    if why is not None:
        raise InvalidRequestError(f"{field} is {count}{why}", param=field)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, of the model's unprocessed distribution."""

    logprob: float  # of the emitted token, or of the prompt's token
    top: tuple[tuple[int, float], ...]  # ids and logprobs of the most probable tokens, best first
    rank: int | None = None  # of a prompt's token, 1 if none is more probable; else None


class PrefillProgress(NamedTuple):
    """How much of a prompt is cached, in tokens."""

    total: int
    reused: int  # from the prefix cache
    done: int  # reused and computed
    admitted_at: float  # `perf_counter`


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one step for one request; the last output has a finish reason."""

    request_id: str
    token_ids: tuple[int, ...] = ()  # emitted, in order
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if the request asked for them
    # "stop" for an end-of-sequence or stop id, which is then the last of `token_ids`; "length" if
    # max_tokens or the context is used up; "error" with `error`.
    finish_reason: FinishReason | None = None
    error: MlxMtpError | None = None
    num_draft_tokens: int = 0  # drafts of this step to report (see `StepRow.num_drafts`)
    num_accepted_tokens: int = 0  # accepted drafts
    # Indices in `token_ids` of drafts that were not sampled (see `SamplingParams.optimistic`).
    optimistic: tuple[int, ...] = ()
    draft_source: str = ""  # source of the drafts: a name in --drafts
    num_reused_tokens: int = 0  # prompt tokens from the prefix cache; in the first output only
    admitted_at: float = 0.0  # `perf_counter` at the request's admission; in the first output only
    # Of all prompt tokens but the first, if the request asked for them; in the first output only.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    drafts: tuple[int, ...] | None = None  # drafts to report; None without `RequestOptions.trace`
    # In outputs up to the first tokens, with `RequestOptions.progress`.
    progress: PrefillProgress | None = None
