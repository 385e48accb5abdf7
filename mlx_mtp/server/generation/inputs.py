"""What a request asks for, in one form for all APIs, and the engine requests made from it."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from mlx_mtp.engine.request import Request, RequestOptions, check_num_draft_tokens, prompt_too_long
from mlx_mtp.engine.stats import EngineInfo
from mlx_mtp.errors import InvalidRequestError, ModelError, UsageError
from mlx_mtp.sampling.bad_words import BadWords
from mlx_mtp.sampling.grammar import Grammar
from mlx_mtp.sampling.params import RANGES, GrammarSpec, Range, SamplingParams
from mlx_mtp.server.generation.pictures import has_images, texts_and_pictures
from mlx_mtp.vision.placed import PromptImages

Role = Literal["system", "user", "assistant", "tool"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)

BUDGETS: Mapping[str, int] = {"minimal": 512, "low": 2048}
"""Maximum number of thinking tokens by reasoning effort; higher efforts have no maximum."""
_BETWEEN = "\n\n"
MAX_PROMPT_LOGPROBS = 1 << 16  # per request, alternatives included
_MARK = "mlx-mtp:"
_SEED_BITS = 53  # bits of a seed drawn by the server: exact in clients that read it as a double
MAX_SEQUENCES = 128  # prompts times choices per request
ALL_TOKENS = -1  # vLLM's value of top_k that keeps all tokens; here and in transformers it is 0
_NO_LIMIT = int(RANGES["max_tokens"].high)
THINKING, EFFORT, BUDGET = "enable_thinking", "reasoning_effort", "thinking_budget"
"""Keys of `chat_template_kwargs`: two template variables, and the server's own budget."""
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an earlier answer; its arguments are JSON text, or what the model wrote."""

    name: str
    arguments: str
    id: str | None = None

    def for_template(self, *, as_object: bool = False) -> dict[str, Any]:
        """Returns the call with the object that its arguments encode.

        Arguments that encode no object stay text or, if `as_object`, become {"arguments": text}.
        """
        arguments = object_or_text(self.arguments)
        if as_object and isinstance(arguments, str):
            arguments = {"arguments": arguments}
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a chat; one of role tool has the result of the call `tool_call_id`."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def for_template(self, *, as_object: bool = False) -> dict[str, Any]:
        calls = [call.for_template(as_object=as_object) for call in self.tool_calls]
        more = {
            "name": self.name,
            "reasoning_content": self.reasoning,
            "tool_call_id": self.tool_call_id,
            "tool_calls": calls or None,
        }
        given = {name: value for name, value in more.items() if value is not None}
        content: str | list[dict[str, str]] = self.content
        if has_images(self.content):
            content = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
                for part in texts_and_pictures(self.content)
            ]
        return {"role": self.role, "content": content, **given}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; if `strict`, calls must fit the schema `parameters`."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """Returns the tool as the client described it, with its fields in the usual order.

        A tool without parameters gets an empty schema, as some templates need one.
        """
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or _NO_PARAMETERS
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, must or can't call tools."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: frozenset[str] | None = None  # tools that the model may call; None: all
    field: str = "tool_choice"  # the name in the request, for errors


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat that the model continues, and the constraints on its answer."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True  # one answer may have several calls
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables from the client
    thinking: bool | None = None  # None: the template's default
    thinking_budget: int | None = None  # tokens after which the think block is closed
    response: GrammarSpec | None = None  # the grammar of an answer that is not a tool call
    response_field: str = "response_format"  # the name in the request, for errors
    effort: str | None = None  # OpenAI's `reasoning_effort`, for templates that read it
    continue_final: bool = False  # the last message is the beginning of the answer
    generation_prompt: bool = True  # the prompt ends with the beginning of an answer
    template: str | None = None  # the client's chat template; None: the model's

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the prompt describes; a call of any other tool is text."""
        if self.tool_choice.mode == "none":
            return []
        names = self.tool_choice.names
        return [tool for tool in self.tools if names is None or tool.name in names]

    @property
    def variables(self) -> dict[str, Any]:
        """The template variables that the client set, in `template_kwargs` or in other fields."""
        levels = {THINKING: self.thinking, EFFORT: self.effort}
        given = {key: value for key, value in levels.items() if value is not None}
        return {**given, **self.template_kwargs}

    def with_effort(self, effort: Effort | None) -> Conversation:
        """Returns the chat with the thinking that OpenAI's `reasoning_effort` asks for."""
        if effort is None:
            return self
        budget = BUDGETS.get(effort) if self.thinking_budget is None else self.thinking_budget
        return replace(self, thinking=effort != "none", thinking_budget=budget, effort=effort)

    def with_template_kwargs(self, kwargs: Mapping[str, Any]) -> Conversation:
        """Returns the chat with a client's template variables.

        The server itself uses `thinking_budget`, so the template does not get it. Raises
        InvalidRequestError if it is not a number of tokens.
        """
        rest = dict(kwargs)
        budget = rest.pop(BUDGET, self.thinking_budget)
        if budget is not None and (type(budget) is not int or not 0 <= budget < 1 << 31):
            field = f"chat_template_kwargs.{BUDGET}"
            message = f"{field} must be a number of tokens, 0 or more."
            raise InvalidRequestError(message, param=field)
        return replace(self, template_kwargs=rest, thinking_budget=budget)

    def with_defaults(self, kwargs: Mapping[str, Any]) -> Conversation:
        """Returns the chat with the server's values of variables that the client did not set."""
        budget = kwargs.get(BUDGET) if self.thinking_budget is None else self.thinking_budget
        own = self.variables if budget is None else {**self.variables, BUDGET: budget}
        return self.with_template_kwargs({**kwargs, **own})


def folded(messages: Iterable[Message]) -> list[Message]:
    """Returns the chat with no system message except the first message.

    Agents send system messages in later places, where Qwen's templates refuse them. They are
    appended to the system or user message before them, or become user messages: merged into the
    first message they would change the prompt's beginning, and no prefix could be reused. Without
    a user message, which some templates need, the last system message becomes one.
    """
    given, chat = list(messages), list[Message]()
    systems = [n for n, message in enumerate(given) if message.role == "system"]
    if systems and not any(message.role == "user" for message in given):
        given[systems[-1]] = replace(given[systems[-1]], role="user")
    for message in given:
        if message.role != "system" or not chat:
            chat.append(message)
        elif chat[-1].role in ("system", "user"):
            last = chat.pop()
            chat.append(replace(last, content=last.content + _BETWEEN + message.content))
        else:
            chat.append(replace(message, role="user"))
    return chat


def object_or_text(text: str) -> Any:
    """Returns the object that a JSON text encodes, {} for blank text, or other text unchanged."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def wrap(text: str) -> str:
    """Encode reasoning as an opaque string that clients keep and send back, but don't read."""
    return _MARK + base64.b64encode(text.encode()).decode()


def unwrap(text: str) -> str:
    """Decode a string made by `wrap`; returns "" for any other text."""
    if not text.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(text[len(_MARK) :], validate=True).decode()
    except ValueError:  # It is no base64, or no UTF-8.
        return ""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What a request body sets for its answers, except the prompts."""

    # The fields of `SamplingParams` that the client set; token ids in `logit_bias` are strings.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    engine: RequestOptions = field(default_factory=RequestOptions)  # `admit` adds client and salt
    max_tokens_field: str = "max_tokens"  # the API's name of `max_tokens`, for errors
    num_prompts: int = 1
    n: int = 1  # choices per prompt
    echo: bool = False  # each choice begins with its prompt
    stop: Sequence[str] = ()
    include_stop: bool = False  # the answer's text includes the stop string or stop token
    skip_special_tokens: bool = True  # leave special tokens out of the answer's text
    bad_words: Sequence[str] = ()
    user: str | None = None  # the client's name for its end user


def model_defaults(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Returns the values of generation_config.json, and neutral ones for missing values.

    Raises ModelError for a value that can't be used.
    """
    names = [name for name, values in RANGES.items() if values.from_model]
    given: dict[str, Any] = {
        name: generation_config[name] for name in names if generation_config.get(name) is not None
    }
    if given.get("top_k") == ALL_TOKENS:
        given["top_k"] = 0
    if generation_config.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        if not isinstance(given.get("top_k", 0), int):
            raise TypeError(f"top_k is {given['top_k']!r}, which is not an integer")
        params = SamplingParams(max_tokens=_NO_LIMIT, **given)
        params.validate(vocab_size=1)
    except (InvalidRequestError, TypeError) as error:
        raise ModelError(f"The model's generation_config.json can't be used: {error}") from error
    return params


def with_flags(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """Returns `defaults` with the flags `given` set; raises UsageError for a value out of range."""
    if given.get("top_k") == ALL_TOKENS:
        given = {**given, "top_k": 0}
    params = replace(defaults, **given)
    try:
        params.validate(vocab_size=1)
    except InvalidRequestError as error:
        raise UsageError(f"--{(error.param or '').replace('_', '-')}: {error}") from None
    return params


def sampling_params(
    options: AnswerOptions,
    defaults: SamplingParams,
    seeds: random.Random,
    info: EngineInfo,
    max_choices: int = 1,
) -> SamplingParams:
    """Returns `defaults` with the client's values set; a missing seed is drawn from `seeds`.

    Raises InvalidRequestError for an option that is out of range or impossible on this server.
    """
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
    if values.get("top_k") == ALL_TOKENS:
        values["top_k"] = 0
    if "seed" not in values:
        values["seed"] = seeds.getrandbits(_SEED_BITS)
    bias = values.get("logit_bias", {}).items()
    values["logit_bias"] = tuple((_token_id(key), value) for key, value in bias)
    for name in {"stop_token_ids", "allowed_token_ids"} & values.keys():
        values[name] = tuple(values[name])
    params = replace(defaults, **values)
    # A request for an echo or for logprobs of the prompt needs no answer tokens.
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
    images: PromptImages | None = None,  # in the only prompt
) -> list[Request]:
    """Returns one engine request per prompt and choice, in the order of the answer's choices.

    `params.max_tokens` is cut to the tokens that the prompt leaves of `max_model_len`. Raises
    ContextLengthError for a prompt that leaves none, and InvalidRequestError for an empty prompt,
    too large `min_tokens` or too many logprobs of prompts.
    """
    requests: list[Request] = []
    for prompt in prompts:
        if not prompt:
            raise InvalidRequestError("The prompt has no tokens.")
        size = len(prompt)
        left = max_model_len - size
        if left <= 0:
            raise prompt_too_long(size, max_model_len, ", the answer included")
        # Cut, not refused: clients ask for more than small contexts have left, and a refusal would
        # make agents compact the chat.
        room = min(params.max_tokens, left)
        if params.min_tokens > room:
            message = f"min_tokens is {params.min_tokens}, but the answer can have {room} tokens"
            raise InvalidRequestError(f"{message} at most.", param="min_tokens")
        for choice in range(options.n):
            # The other choices share the first one's prompt logprobs, unless each has an echo, and
            # its progress, as they wait for its prefix.
            is_first = choice == 0
            reported = params.prompt_logprobs if options.echo or is_first else None
            request = Request(
                f"{answer_id}-{len(requests)}",
                prompt,
                replace(params, max_tokens=room, choice=choice, prompt_logprobs=reported),
                options=options.engine if is_first else replace(options.engine, progress=False),
                grammar=grammar,
                bad_words=bad_words,
                images=images,
            )
            requests.append(request)
    reports = [(r.prompt_token_ids, r.sampling.prompt_logprobs) for r in requests]
    count = sum(len(prompt) * (1 + top) for prompt, top in reports if top is not None)
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"{count} logprobs of prompts are asked for, alternatives included; one request may "
            f"have {MAX_PROMPT_LOGPROBS}. Send fewer or shorter prompts, or ask for fewer "
            "alternatives.",
            param="prompt_logprobs",
        )
    return requests


def _token_id(key: str) -> int:
    # Only as Python prints the integer: no two keys can name the same token.
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
        message = f"logit_bias has the key {key[:40]!r}, which is not a token id."
        raise InvalidRequestError(message, param="logit_bias")
    return int(key)
