"""The sampling parameters of a request. No arrays: the server imports this."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, get_type_hints

from mlx_mtp.errors import InvalidRequestError, UsageError

MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 16
_MOST_ENTRIES = {
    "logit_bias": MAX_LOGIT_BIAS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
}
_INT31 = 1 << 31
_INT64 = 1 << 63
_LEAST_TEMPERATURE = 1e-5

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "free"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """The form that an answer must have. Equal specs share one compiled grammar."""

    kind: GrammarKind  # how `value` is interpreted; "free": any text
    # The JSON text of a schema ("json_schema") or of a list of strings ("choice"), a regular
    # expression that the whole answer matches, or a grammar in llguidance's dialect of Lark.
    value: str = ""
    # The answer is free up to and including this text ("</think>"); then the grammar begins.
    free_until: str | None = None
    free_tokens: int | None = None  # tokens after which `free_until` is forced: a thinking budget


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a sampling parameter."""

    low: float
    high: float
    open_low: bool = False  # True: `low` itself is out of range
    from_model: bool = False  # True: the default can come from generation_config.json

    def check(self, name: str, value: float) -> None:
        """Raise InvalidRequestError, which names field `name`, for a value out of range."""
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequestError(f"{name} must be a finite number, not {value}.", param=name)
        if value > self.high or value < self.low or (self.open_low and value == self.low):
            least = "more than" if self.open_low else "at least"
            raise InvalidRequestError(
                f"{name} is {value}, but must be {least} {self.low} and at most {self.high}.",
                param=name,
            )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence is sampled; neutral values leave the model's distribution as it is.

    The APIs' fields, the defaults of generation_config.json and `validate` are derived from this.
    """

    max_tokens: Annotated[int, Range(0, _INT31)]  # 0 computes only the prompt
    # 0 is greedy, and so are values below 1e-5, which would make scores overflow.
    temperature: Annotated[float, Range(0.0, 100.0, from_model=True)] = 1.0
    # Keeps the smallest set of most probable tokens whose probabilities add up to this.
    top_p: Annotated[float, Range(0.0, 1.0, open_low=True, from_model=True)] = 1.0
    # Keeps the k most probable tokens, and tokens that tie with the last of these; 0: all.
    top_k: Annotated[int, Range(0, _INT31, from_model=True)] = 0
    # Keeps the tokens with at least this share of the most probable token's probability.
    min_p: Annotated[float, Range(0.0, 1.0, from_model=True)] = 0.0
    # Divides (if negative: multiplies) the logits of tokens in prompt or output.
    repetition_penalty: Annotated[float, Range(0.01, 100.0, from_model=True)] = 1.0
    # How many of the last tokens the repetition penalty applies to; 0: all.
    repetition_context_size: Annotated[int, Range(0, _INT31)] = 0
    # Subtracted once (presence) and per occurrence (frequency) from logits of output tokens.
    presence_penalty: Annotated[float, Range(-2.0, 2.0)] = 0.0
    frequency_penalty: Annotated[float, Range(-2.0, 2.0)] = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value) added to the logits
    allowed_token_ids: tuple[int, ...] | None = None  # the only ids to sample; None: all
    seed: Annotated[int, Range(-_INT64, _INT64 - 1)] = 0
    stop_token_ids: tuple[int, ...] = ()  # end the sequence as the end-of-sequence ids do
    ignore_eos: bool = False
    # Neither end ids nor stop strings end the sequence before this many tokens. If a grammar or
    # `allowed_token_ids` allow only the end, it ends anyway.
    min_tokens: Annotated[int, Range(0, _INT31)] = 0
    # Alternatives to report for each token; None: no logprobs at all.
    top_logprobs: Annotated[int | None, Range(0, MAX_TOP_LOGPROBS)] = None
    # The same for the prompt's tokens except the first, which has no predecessor.
    prompt_logprobs: Annotated[int | None, Range(0, MAX_TOP_LOGPROBS)] = None
    # Index of this answer among the request's `n` answers; each has its own noise.
    choice: Annotated[int, Range(0, 1 << 16)] = 0
    # Typical (lossy) acceptance: a draft replaces the sampled token if it has at least this share
    # of that token's probability; 0: off. Only with it does the answer depend on the drafts.
    optimistic: Annotated[float, Range(0.0, 1.0)] = 0.0
    grammar: GrammarSpec | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < _LEAST_TEMPERATURE

    def noise_seed(self) -> int:
        """Returns a hash of seed and choice, uint32, that keys the noise with the position."""
        text = f"{self.seed}:{self.choice}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequestError for a value or token id out of range."""
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None:
                allowed.check(name, value)
        for name, most in _MOST_ENTRIES.items():
            if len(value := getattr(self, name) or ()) > most:
                message = f"{name} has {len(value)} entries; at most {most} are allowed."
                raise InvalidRequestError(message, param=name)
        for token, value in self.logit_bias:
            check_token_ids("logit_bias", (token,), vocab_size)
            Range(-100.0, 100.0).check("logit_bias", value)
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        if self.allowed_token_ids is not None:
            name, ids = "allowed_token_ids", self.allowed_token_ids
            check_token_ids(name, ids, vocab_size)
            if not ids:
                raise InvalidRequestError(f"{name} is empty; it must have an id.", param=name)
        if self.grammar is not None and self.grammar.free_tokens is not None:
            Range(0, _INT31).check("thinking_budget", self.grammar.free_tokens)
        if self.grammar is not None and self.grammar.kind != "free" and self.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos can't be combined with a grammar, which decides where an answer ends.",
                param="ignore_eos",
            )


RANGES = {
    name: extra
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    for extra in getattr(hint, "__metadata__", ())
}


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise InvalidRequestError, which names field `name`, for the first id out of range."""
    wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"{name} names token {wrong}, but this model's token ids are 0 to {vocab_size - 1}.",
            param=name,
        )


def check_draft_vocab(ids: Iterable[int], vocab_size: int, source: str) -> tuple[int, ...]:
    """Returns the ids in ascending order; raises UsageError for a wrong id, or if there is none.

    The error names `source`.
    """
    checked: set[int] = set()
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise UsageError(
                f"{source} names token {token!r}, but this model's token ids are 0 to "
                f"{vocab_size - 1}."
            )
        if token in checked:
            raise UsageError(f"{source} names token {token} twice; each may occur once.")
        checked.add(token)
    if not checked:
        raise UsageError(f"{source} names no token; it must name at least one.")
    return tuple(sorted(checked))
