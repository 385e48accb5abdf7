"""The bodies of Ollama's routes: the other APIs' parameters under Ollama's names."""

import json
from abc import abstractmethod
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, AliasChoices, Field, Tag, model_validator

from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.api import schema
from mlx_mtp.server.api.forms import JsonOrSchema, either, json_grammar
from mlx_mtp.server.api.history import readable
from mlx_mtp.server.api.openai import protocol as openai
from mlx_mtp.server.api.schema import FORM, Many, ManyTools, WireModel, at_most, refusal
from mlx_mtp.server.generation import inputs, pictures
from mlx_mtp.server.generation.inputs import AnswerOptions, Conversation

# Images as spans of text (see `pictures`), which come before the message's text.
_Images = Annotated[
    list[Annotated[str, AfterValidator(pictures.as_text)]], at_most(schema.MAX_MESSAGES)
]

_OllamaThink = Annotated[
    Annotated[bool, Tag(FORM + "kind")] | Annotated[inputs.Effort, Tag(FORM + "word")],
    either(bool),
]


class _CalledFunction(WireModel):
    name: str
    arguments: schema.Schema = Field({})
    index: int | None = None


class _OllamaToolCall(WireModel):
    function: _CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"

    def call(self) -> inputs.ToolCall:
        arguments = json.dumps(self.function.arguments, ensure_ascii=False)
        return inputs.ToolCall(self.function.name, arguments, self.id)


class _OllamaMessage(WireModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: _Images = Field([])
    tool_calls: Annotated[list[_OllamaToolCall], at_most(schema.MAX_TOOLS)] = Field([])
    tool_name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> Self:
        if self.role != "assistant" and (self.thinking or self.tool_calls):
            field = "thinking" if self.thinking else "tool_calls"
            raise refusal("belongs to messages of role assistant", field=field)
        if self.role == "assistant" and self.images:
            raise refusal("belongs to messages of other roles", field="images")
        return self

    def message(self) -> inputs.Message:
        calls = tuple(call.call() for call in self.tool_calls)
        names = {"tool_call_id": self.tool_call_id, "name": self.tool_name}
        content = "".join(self.images) + self.content
        return inputs.Message(self.role, content, self.thinking, calls, **names)


class _OllamaTool(openai.OpenAITool):
    type: Literal["function"] = "function"


@schema.sampled(*(name for name in schema.SAMPLING if name != "max_tokens"))
class _OllamaRequest(schema.AnswerRequest):
    stream: bool = True
    format: JsonOrSchema = ""
    think: _OllamaThink | None = None
    logprobs: bool = False
    top_logprobs: schema.Int | None = None
    # Fields of `options` that other APIs don't have; `max_tokens` is a synonym of num_predict.
    num_predict: schema.Int = -1
    stop: schema.Stops = Field([])
    chat_template_kwargs: schema.TemplateKwargs = Field({})

    @model_validator(mode="before")
    @classmethod
    def _options_are_fields(cls, data: object) -> object:
        if not isinstance(data, dict) or not isinstance(options := data.get("options"), dict):
            return data
        return options | {key: value for key, value in data.items() if key != "options"}

    def options(self) -> AnswerOptions:
        sampling = self.sampling(
            max_tokens=self.num_predict if self.num_predict > 0 else None,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )
        return AnswerOptions(sampling, stop=self.stop)

    def grammar(self) -> GrammarSpec | None:
        return json_grammar(self.format)

    def conversation(self) -> Conversation:
        chat = replace(self.plain_conversation(), response=self.grammar(), response_field="format")
        chat = chat.with_template_kwargs(self.chat_template_kwargs)
        if isinstance(self.think, bool):
            return replace(chat, thinking=self.think)
        return chat.with_effort(self.think)

    @abstractmethod
    def plain_conversation(self) -> Conversation: ...


class OllamaChat(_OllamaRequest):
    """POST /api/chat."""

    messages: Annotated[Many[_OllamaMessage], readable] = Field([])
    tools: ManyTools[_OllamaTool] = Field([])

    def plain_conversation(self) -> Conversation:
        return Conversation(
            messages=[message.message() for message in self.messages],
            tools=[tool.function.tool() for tool in self.tools],
        )


class OllamaText(_OllamaRequest):
    """POST /api/generate: a prompt as a chat's message, or with `raw` as plain text."""

    prompt: str = ""
    system: str = ""
    raw: bool = False
    images: _Images = Field([])
    template: Annotated[str, schema.only("")] = ""
    suffix: Annotated[str, schema.only("")] = ""
    context: Annotated[list[Any], schema.only([])] = Field([])

    @model_validator(mode="after")
    def _raw_has_no_system(self) -> Self:
        if self.raw and self.system:
            raise refusal("can't be combined with raw: true; put it into prompt", field="system")
        if self.raw and self.images:
            raise refusal("can't be combined with raw: true", field="images", unsupported=True)
        return self

    def plain_conversation(self) -> Conversation:
        messages = [inputs.Message("user", "".join(self.images) + self.prompt)]
        if self.system:
            messages.insert(0, inputs.Message("system", self.system))
        return Conversation(messages)


class OllamaShow(WireModel):
    """POST /api/show."""

    model: schema.ModelName = Field("", validation_alias=AliasChoices("model", "name"))
    verbose: bool = False
