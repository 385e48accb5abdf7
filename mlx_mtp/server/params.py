"""From a request body, the model's defaults and the room in the context to engine requests."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_mtp.engine.request import Request
from mlx_mtp.errors import ContextLengthError, InvalidRequestError, ModelError
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.server.options import Options
from mlx_mtp.server.protocols import EngineInfoLike

MAX_SEQUENCES = 128
"""Most prompts times choices in one request."""

# Seeds that we choose stay exact in clients whose numbers are doubles.
_SEED_BITS = 53


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What applies where a request says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingDefaults:
        """Read the model's generation_config.json; OpenAI's defaults fill what it leaves open.

        Raises:
            ModelError: a value there is none that a sampler could use.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        given = {name: config[name] for name in names if config.get(name) is not None}
        given |= _all_kept(given)
        if config.get("do_sample") is False:
            given["temperature"] = 0.0
        try:
            if not isinstance(given.get("top_k", 0), int):
                raise TypeError(f"top_k is {given['top_k']!r}, which is not an integer")
            SamplingParams(max_tokens=1, **given).validate(vocab_size=1)
        except (InvalidRequestError, TypeError) as error:
            raise ModelError(
                f"The model's generation_config.json can't be used: {error}"
            ) from error
        return cls(**given)


class SeedSource:
    """Seeds for requests that bring none.

    Args:
        seed: makes the sequence of seeds repeatable; None: the system's entropy.
    """

    def __init__(self, seed: int | None) -> None:
        self._random = random.Random(seed)

    def next(self) -> int:
        """A fresh seed."""
        return self._random.getrandbits(_SEED_BITS)


def sampling_params(
    options: Options, defaults: SamplingDefaults, seed: int, vocab_size: int
) -> SamplingParams:
    """How the request's sequences are sampled, before the context's room is known.

    Raises:
        InvalidRequestError: some value is out of its range; it names the field.
    """
    chosen = {
        field.name: _first(getattr(options, field.name), getattr(defaults, field.name))
        for field in dataclasses.fields(defaults)
    }
    chosen |= _all_kept(chosen)
    params = SamplingParams(
        max_tokens=_first(options.max_tokens, 1),
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=tuple((_token_id(key), value) for key, value in options.logit_bias.items()),
        seed=seed,
        stop_token_ids=tuple(options.stop_token_ids),
        ignore_eos=options.ignore_eos,
        top_logprobs=options.top_logprobs,
        **chosen,
    )
    params.validate(vocab_size)
    return params


def check_choices(n: int, prompts: int, max_choices: int) -> None:
    """Bound the sequences of one request.

    Raises:
        InvalidRequestError: there are too many, or none.
    """
    if not 1 <= n <= max_choices:
        raise InvalidRequestError(f"n is {n}, but must be 1 to {max_choices}.", param="n")
    if prompts * n > MAX_SEQUENCES:
        raise InvalidRequestError(
            f"{prompts} prompts times n = {n} are more than the {MAX_SEQUENCES} answers "
            "that one request may ask for.",
            param="prompt",
        )


def engine_requests(
    request_id: str,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    options: Options,
    info: EngineInfoLike,
) -> list[Request]:
    """One engine request for each prompt and choice, in the order of the answer's choices.

    Raises:
        InvalidRequestError: a prompt came out empty.
        ContextLengthError: prompt and answer don't fit the context.
    """
    requests = []
    drafts = options.num_draft_tokens
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise InvalidRequestError("The prompt has no tokens.")
        max_tokens = room(len(prompt), options, info.max_model_len)
        for choice in range(options.n):
            sampling = dataclasses.replace(params, max_tokens=max_tokens, choice=choice)
            index = number * options.n + choice
            requests.append(
                Request(
                    f"{request_id}-{index}",
                    prompt,
                    sampling,
                    num_draft_tokens=drafts,
                    cache_salt=options.cache_salt or "",
                )
            )
    return requests


def room(prompt_tokens: int, options: Options, max_model_len: int) -> int:
    """Most tokens that the answer may have.

    Raises:
        ContextLengthError: it has no room, or not as much as is wanted.
    """
    wanted = options.max_tokens
    if prompt_tokens >= max_model_len:
        raise ContextLengthError(
            f"The prompt is too long: {prompt_tokens} tokens > {max_model_len - 1} maximum. This "
            f"model's maximum context length is {max_model_len} tokens, the answer included."
        )
    if wanted is None:
        return max_model_len - prompt_tokens
    if prompt_tokens + wanted <= max_model_len:
        return wanted
    if options.cut_to_context:
        return max_model_len - prompt_tokens
    raise ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens, but "
        f"{prompt_tokens + wanted} were asked for: {prompt_tokens} of prompt and {wanted} of "
        "answer.",
        param=options.max_tokens_field,
    )


def _first(value: Any, fallback: Any) -> Any:
    return fallback if value is None else value


def _all_kept(values: Mapping[str, Any]) -> dict[str, int]:
    """vLLM's -1 for "keep all tokens", which is 0 here and in transformers."""
    return {"top_k": 0} if values.get("top_k") == -1 else {}


def _token_id(key: str) -> int:
    # As an integer prints itself, so that no two keys name one token.
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
        raise InvalidRequestError(
            f"logit_bias has the key {key[:40]!r}, which is not a token id.", param="logit_bias"
        )
    return int(key)
