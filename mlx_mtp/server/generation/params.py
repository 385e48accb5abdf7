"""From a request body, the model's defaults and the room in the context to engine requests."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_mtp.engine.request import Request, check_num_draft_tokens
from mlx_mtp.errors import ContextLengthError, InvalidRequestError, ModelError
from mlx_mtp.sampling.bad_words import BadWords
from mlx_mtp.sampling.grammar import Grammar
from mlx_mtp.sampling.params import RANGES, Range, SamplingParams

MAX_SEQUENCES = 128  # most prompts times choices in one request
MAX_PROMPT_LOGPROBS = 1 << 16  # of one request: those of the prompts' tokens, alternatives included
_SEED_BITS = 53  # of seeds that we choose: exact in clients whose numbers are doubles


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How an answer is made, whichever API it was asked through."""

    # The values of `SamplingParams` that the client gave; the tokens of `logit_bias` are texts.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens_field: str = "max_tokens"  # the API's name for the most tokens of an answer
    cut_to_context: bool = False  # where there is no room for `max_tokens`, fewer will do
    num_prompts: int = 1
    n: int = 1  # choices for each prompt
    echo: bool = False  # each choice begins with its prompt
    stop: Sequence[str] = ()
    include_stop: bool = False  # the text ends with the stop string or stop token, if it has text
    skip_special_tokens: bool = True  # leave them out of the text
    bad_words: Sequence[str] = ()
    num_draft_tokens: int | None = None
    trace: bool = False  # the stream has the drafts of each step
    progress: bool = False  # and says how much of the prompt is computed
    user: str | None = None  # the client's name for its end user
    cache_salt: str | None = None

    def check(self, max_choices: int, *, mtp_enabled: bool, drafts: bool) -> None:
        if not 1 <= self.n <= max_choices:
            raise InvalidRequestError(f"n is {self.n}, but must be 1 to {max_choices}.", param="n")
        if self.num_prompts * self.n > MAX_SEQUENCES:
            asked = f"{self.num_prompts} prompts times n = {self.n}"
            most = f"the {MAX_SEQUENCES} answers that one request may ask for"
            raise InvalidRequestError(f"{asked} are more than {most}.", param="prompt")
        check_num_draft_tokens(self.num_draft_tokens, mtp_enabled=mtp_enabled)
        if (share := self.sampling.get("optimistic")) and not drafts:
            message = (
                f"mtp.optimistic is {share}, but this server drafts nothing: only 0 is possible."
            )
            raise InvalidRequestError(message, param="mtp.optimistic")

    def room(self, prompt_tokens: int, max_model_len: int) -> int:
        """Most tokens that the answer to a prompt may have; ContextLengthError if too few."""
        wanted = self.sampling.get("max_tokens")
        left = max_model_len - prompt_tokens
        length = f"This model's maximum context length is {max_model_len} tokens"
        if left <= 0:
            fault = f"The prompt is too long: {prompt_tokens} tokens > {max_model_len - 1} maximum."
            raise ContextLengthError(f"{fault} {length}, the answer included.")
        if wanted is not None and wanted > left and not self.cut_to_context:
            parts = f"{prompt_tokens} of prompt and {wanted} of answer"
            message = f"{length}, but {prompt_tokens + wanted} were asked for: {parts}."
            raise ContextLengthError(message, param=self.max_tokens_field)
        most = left if wanted is None else min(wanted, left)
        least = self.sampling.get("min_tokens", 0)
        if least > most:
            message = f"min_tokens is {least}, but the answer can have {most} tokens at most."
            raise InvalidRequestError(message, param="min_tokens")
        return most


def model_defaults(generation_config: Mapping[str, Any]) -> SamplingParams:
    """The model's own values, or neutral ones; raises ModelError for what no sampler could use."""
    given = {name: generation_config.get(name) for name, r in RANGES.items() if r.from_model}
    given = _all_kept({name: value for name, value in given.items() if value is not None})
    if generation_config.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        if not isinstance(given.get("top_k", 0), int):
            raise TypeError(f"top_k is {given['top_k']!r}, which is not an integer")
        params = SamplingParams(max_tokens=1, **given)
        params.validate(vocab_size=1)
    except (InvalidRequestError, TypeError) as error:
        raise ModelError(f"The model's generation_config.json can't be used: {error}") from error
    return params


def sampling_params(
    options: RequestOptions, defaults: SamplingParams, seeds: random.Random, vocab_size: int
) -> SamplingParams:
    """The client's values over the model's defaults; InvalidRequestError: one is out of range."""
    values = _all_kept(options.sampling)
    if "seed" not in values:
        values["seed"] = seeds.getrandbits(_SEED_BITS)
    bias = values.get("logit_bias", {}).items()
    values["logit_bias"] = tuple((_token_id(key), value) for key, value in bias)
    for name in {"stop_token_ids", "allowed_token_ids"} & values.keys():
        values[name] = tuple(values[name])
    params = replace(defaults, **values)
    prompt_alone = options.echo or params.prompt_logprobs is not None  # Then it will do.
    allowed = Range(0 if prompt_alone else 1, RANGES["max_tokens"].high)
    allowed.check(options.max_tokens_field, params.max_tokens)
    params.validate(vocab_size)
    return params


def engine_requests(
    answer_id: str,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    options: RequestOptions,
    max_model_len: int,
    *,
    grammar: Grammar | None = None,
    bad_words: BadWords | None = None,
    client: tuple[str, ...] = (),
) -> list[Request]:
    """One engine request for each prompt and choice, in the order of the answer's choices."""
    requests: list[Request] = []
    for prompt in prompts:
        if not prompt:
            raise InvalidRequestError("The prompt has no tokens.")
        room = options.room(len(prompt), max_model_len)
        requests += [
            Request(
                f"{answer_id}-{len(requests) + choice}",
                prompt,
                replace(params, max_tokens=room, choice=choice, prompt_logprobs=reported),
                num_draft_tokens=options.num_draft_tokens,
                grammar=grammar,
                bad_words=bad_words,
                client=client,
                cache_salt=options.cache_salt or "",
                trace=options.trace,
                progress=options.progress and choice == 0,  # The others wait for its prefix.
            )
            for choice in range(options.n)
            # Those of one choice will do where they are no part of the choices.
            for reported in [params.prompt_logprobs if options.echo or choice == 0 else None]
        ]
    _check_prompt_logprobs(requests)
    return requests


def _check_prompt_logprobs(requests: Sequence[Request]) -> None:
    asked = [r for r in requests if r.sampling.prompt_logprobs is not None]
    count = sum(len(r.prompt_token_ids) * (1 + (r.sampling.prompt_logprobs or 0)) for r in asked)
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"{count} logprobs of prompts are asked for, alternatives included; one request may "
            f"have {MAX_PROMPT_LOGPROBS}. Send fewer or shorter prompts, or ask for fewer "
            "alternatives.",
            param="prompt_logprobs",
        )


def _all_kept(values: Mapping[str, Any]) -> dict[str, Any]:
    # vLLM's -1 for "keep all tokens", which is 0 here and in transformers.
    return {**values, "top_k": 0} if values.get("top_k") == -1 else dict(values)


def _token_id(key: str) -> int:
    # As an integer prints itself, so that no two keys name one token.
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
        message = f"logit_bias has the key {key[:40]!r}, which is not a token id."
        raise InvalidRequestError(message, param="logit_bias")
    return int(key)
