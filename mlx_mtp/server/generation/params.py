"""From a body's options, the model's defaults and the room in the context to engine requests."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_mtp.engine.request import Request, RequestOptions, check_num_draft_tokens
from mlx_mtp.engine.stats import EngineInfo
from mlx_mtp.errors import ContextLengthError, InvalidRequestError, ModelError
from mlx_mtp.sampling.bad_words import BadWords
from mlx_mtp.sampling.grammar import Grammar
from mlx_mtp.sampling.params import RANGES, Range, SamplingParams

MAX_SEQUENCES = 128  # prompts times choices of one request
MAX_PROMPT_LOGPROBS = 1 << 16  # of one request, alternatives included
_ALL = -1  # vLLM's top_k that keeps all tokens, which is 0 here and in transformers
_SEED_BITS = 53  # of seeds that the server draws: exact in clients whose numbers are doubles


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What a body asks of its answers, whichever API it came through."""

    # The values of `SamplingParams` that the client gave; the tokens of `logit_bias` are texts.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    engine: RequestOptions = field(default_factory=RequestOptions)  # `admit` adds client and salt
    max_tokens_field: str = "max_tokens"  # the API's name for the most tokens of an answer
    cut_to_context: bool = False  # where `max_tokens` don't fit the context, fewer will do
    num_prompts: int = 1
    n: int = 1  # choices for each prompt
    echo: bool = False  # each choice begins with its prompt
    stop: Sequence[str] = ()
    include_stop: bool = False  # the text ends with the stop string or stop token, if it has text
    skip_special_tokens: bool = True  # leave them out of the text
    bad_words: Sequence[str] = ()
    user: str | None = None  # the client's name for its end user

    def room(self, prompt_tokens: int, max_model_len: int) -> int:
        """Most tokens that the answer to a prompt may have; ContextLengthError if too few."""
        max_tokens = self.sampling.get("max_tokens")
        left = max_model_len - prompt_tokens
        length = f"This model's maximum context length is {max_model_len} tokens"
        if left <= 0:
            fault = f"The prompt is too long: {prompt_tokens} tokens > {max_model_len - 1} maximum."
            raise ContextLengthError(f"{fault} {length}, the answer included.")
        if max_tokens is not None and max_tokens > left and not self.cut_to_context:
            parts = f"{prompt_tokens} of prompt and {max_tokens} of answer"
            message = f"{length}, but {prompt_tokens + max_tokens} were asked for: {parts}."
            raise ContextLengthError(message, param=self.max_tokens_field)
        room = left if max_tokens is None else min(max_tokens, left)
        min_tokens = self.sampling.get("min_tokens", 0)
        if min_tokens > room:
            message = f"min_tokens is {min_tokens}, but the answer can have {room} tokens at most."
            raise InvalidRequestError(message, param="min_tokens")
        return room


def model_defaults(generation_config: Mapping[str, Any]) -> SamplingParams:
    """The model's own values, or neutral ones; raises ModelError for what no sampler could use."""
    names = [name for name, values in RANGES.items() if values.from_model]
    given: dict[str, Any] = {
        name: generation_config[name] for name in names if generation_config.get(name) is not None
    }
    if given.get("top_k") == _ALL:
        given["top_k"] = 0
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
    options: AnswerOptions,
    defaults: SamplingParams,
    seeds: random.Random,
    info: EngineInfo,
    max_choices: int = 1,
) -> SamplingParams:
    """The client's values over the model's defaults; InvalidRequestError: an option is wrong."""
    n, values = options.n, dict(options.sampling)
    if not 1 <= n <= max_choices:
        raise InvalidRequestError(f"n is {n}, but must be 1 to {max_choices}.", param="n")
    if options.num_prompts * n > MAX_SEQUENCES:
        product = f"{options.num_prompts} prompts times n = {n}"
        most = f"the {MAX_SEQUENCES} answers that one request may ask for"
        raise InvalidRequestError(f"{product} are more than {most}.", param="prompt")
    check_num_draft_tokens(options.engine.num_draft_tokens, mtp_enabled=info.mtp_enabled)
    if (share := values.get("optimistic")) and not info.draft_sources:
        message = f"mtp.optimistic is {share}, but this server drafts nothing: only 0 is possible."
        raise InvalidRequestError(message, param="mtp.optimistic")
    if values.get("top_k") == _ALL:
        values["top_k"] = 0
    if "seed" not in values:
        values["seed"] = seeds.getrandbits(_SEED_BITS)
    bias = values.get("logit_bias", {}).items()
    values["logit_bias"] = tuple((_token_id(key), value) for key, value in bias)
    for name in {"stop_token_ids", "allowed_token_ids"} & values.keys():
        values[name] = tuple(values[name])
    params = replace(defaults, **values)
    # What asks for something of the prompt may do without an answer.
    least = 0 if options.echo or params.prompt_logprobs is not None else 1
    max_tokens = Range(least, RANGES["max_tokens"].high)
    max_tokens.check(options.max_tokens_field, params.max_tokens)
    params.validate(info.vocab_size)
    return params


def engine_requests(
    answer_id: str,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    options: AnswerOptions,
    max_model_len: int,
    *,
    grammar: Grammar | None = None,
    bad_words: BadWords | None = None,
) -> list[Request]:
    """One engine request for each prompt and choice, in the order of the answer's choices."""
    requests: list[Request] = []
    for prompt in prompts:
        if not prompt:
            raise InvalidRequestError("The prompt has no tokens.")
        room = options.room(len(prompt), max_model_len)
        for choice in range(options.n):
            # The first choice's logprobs of the prompt are all choices', unless each has an echo;
            # and its progress is theirs, as they wait for its prefix.
            is_first = choice == 0
            reported = params.prompt_logprobs if options.echo or is_first else None
            request = Request(
                f"{answer_id}-{len(requests)}",
                prompt,
                replace(params, max_tokens=room, choice=choice, prompt_logprobs=reported),
                options=options.engine if is_first else replace(options.engine, progress=False),
                grammar=grammar,
                bad_words=bad_words,
            )
            requests.append(request)
    if params.prompt_logprobs is not None:
        _check_prompt_logprobs(requests)
    return requests


def _check_prompt_logprobs(requests: Sequence[Request]) -> None:
    reported = [(r, r.sampling.prompt_logprobs) for r in requests]
    count = sum(len(r.prompt_token_ids) * (1 + top) for r, top in reported if top is not None)
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"{count} logprobs of prompts are asked for, alternatives included; one request may "
            f"have {MAX_PROMPT_LOGPROBS}. Send fewer or shorter prompts, or ask for fewer "
            "alternatives.",
            param="prompt_logprobs",
        )


def _token_id(key: str) -> int:
    # As an integer prints itself, so that no two keys name one token.
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
        message = f"logit_bias has the key {key[:40]!r}, which is not a token id."
        raise InvalidRequestError(message, param="logit_bias")
    return int(key)
