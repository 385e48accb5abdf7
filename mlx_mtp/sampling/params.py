"""What a request asks of the sampler. No arrays here: the server may import this."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mlx_mtp.errors import InvalidRequestError

MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
_INT64 = 1 << 63
_LEAST_TEMPERATURE = 1e-5

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "free"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer must look like. Equal specs share one compiled grammar.

    Args:
        kind: how `value` is to be read; "free" asks for nothing after `free_until`.
        value: the JSON text of a schema ("json_schema") or of a list of strings ("choice"), a
            regular expression that the whole answer matches ("regex"), or a grammar in
            llguidance's dialect of Lark ("lark"); empty for "json_object".
        free_until: text that the answer is free to write until it has come; the grammar begins
            after it ("</think>"). None: the grammar holds from the first token on.
        free_tokens: most tokens that may come before `free_until`; then that text is forced (a
            thinking budget). None: as many as the model likes.
    """

    kind: GrammarKind
    value: str = ""
    free_until: str | None = None
    free_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence is sampled. Neutral values leave the distribution as the model gives it.

    Args:
        max_tokens: most tokens to generate, 1 or more.
        temperature: 0 is greedy, and so is anything below 1e-5, where scores would overflow.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep the k most probable tokens (and ties with the last); 0 keeps all.
        min_p: keep tokens at least this share of the most probable one, in [0, 1].
        repetition_penalty: divides (multiplies when negative) logits of tokens in prompt or output.
        presence_penalty: subtracted once from logits of tokens already in the output.
        frequency_penalty: subtracted per occurrence in the output.
        logit_bias: (token id, value) pairs added to the logits.
        seed: any int64; with `choice` and the position it determines the noise.
        choice: index among the request's `n` choices, which must not share noise.
        stop_token_ids: ids that end the sequence, beside the model's own end-of-sequence ids.
        ignore_eos: the model's own end-of-sequence ids do not end it.
        top_logprobs: alternatives to report for each token, 0 for the chosen token alone,
            None for no logprobs at all.
        grammar: what the answer must look like; None leaves it free.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    choice: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    grammar: GrammarSpec | None = None

    @property
    def greedy(self) -> bool:
        """The most probable token is taken; no noise is drawn."""
        return self.temperature < _LEAST_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Some penalty differs from its neutral value, so token counts are needed."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def truncates(self) -> bool:
        """Some token may be cut from the distribution before it is sampled."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def noise_seed(self) -> int:
        """The uint32 word that, with a position, keys the noise: a hash of seed and choice."""
        text = f"{self.seed}:{self.choice}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")

    def validate(self, vocab_size: int) -> None:
        """Check every field before it can reach mlx, which does not check token ids.

        Raises:
            InvalidRequestError: names the field, its value and the range allowed.
        """
        _within("max_tokens", self.max_tokens, 1, 1 << 31)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within("top_k", self.top_k, 0, 1 << 31)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("seed", self.seed, -_INT64, _INT64 - 1)
        _within("n", self.choice, 0, 1 << 16)
        if self.top_logprobs is not None:
            _within("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        _at_most("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        _at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        for token, value in self.logit_bias:
            check_token_ids("logit_bias", (token,), vocab_size)
            _within("logit_bias", value, -100.0, 100.0)
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        if self.grammar is not None and self.grammar.free_tokens is not None:
            _within("thinking_budget", self.grammar.free_tokens, 0, 1 << 31)
        if self.grammar is not None and self.grammar.kind != "free" and self.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos can't be combined with a grammar, which decides where an answer ends.",
                param="ignore_eos",
            )


def _within(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be a finite number, not {value}.", param=name)
    if value > high or value < low or (open_low and value == low):
        least = "more than" if open_low else "at least"
        raise InvalidRequestError(
            f"{name} is {value}, but must be {least} {low} and at most {high}.", param=name
        )


def _at_most(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequestError(
            f"{name} has {count} entries; at most {limit} are allowed.", param=name
        )


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Check that mlx has an embedding for each.

    Raises:
        InvalidRequestError: names the field and the first token that is out of range.
    """
    wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"{name} names token {wrong}, but this model's token ids are 0 to {vocab_size - 1}.",
            param=name,
        )
