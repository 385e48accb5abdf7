"""The fields of all APIs for the form of an answer and for how much to think before it."""

import json
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Discriminator,
    FailFast,
    Field,
    PrivateAttr,
    Tag,
    model_validator,
)

from mlx_mtp.bounded_json import unique_names
from mlx_mtp.sampling.grammar import MAX_CHOICES, MAX_GRAMMAR_CHARACTERS
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.api.schema import FORM, WireModel, at_most, few_values, refusal
from mlx_mtp.server.generation.inputs import EFFORTS, Effort
from mlx_mtp.server.grammar.json_schemas import styled
from mlx_mtp.text.parsing.json_reader import loads


def _as_schema(value: object) -> object:
    if not isinstance(value, str):
        return value
    _check_size(value)
    try:
        loads(value)
        return json.loads(value, object_pairs_hook=unique_names)
    except ValueError as error:
        raise refusal(f"is not the JSON text of a schema: {error}") from None


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    _check_size(json.dumps(schema))
    return schema


def _check_size(text: str, of: str = " of JSON") -> None:
    size, most = len(text), MAX_GRAMMAR_CHARACTERS
    if size > most:
        raise refusal(f"has {size} characters{of}; at most {most} are allowed")


AnswerSchema = Annotated[dict[str, Any], BeforeValidator(few_values), AfterValidator(_check_schema)]
AnswerType = Literal["text", "json_object", "json_schema"]
SchemaOrText = Annotated[AnswerSchema, BeforeValidator(_as_schema)]
Choices = Annotated[list[str], FailFast(), Field(min_length=1), at_most(MAX_CHOICES)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


def schema_grammar(schema: dict[str, Any]) -> GrammarSpec:
    """Returns the grammar of answers that follow a schema and its order of properties."""
    return GrammarSpec("json_schema", json.dumps(schema))


def type_grammar(answer_type: AnswerType, schema: dict[str, Any] | None) -> GrammarSpec | None:
    """Returns the grammar of answers of a type; None: any text."""
    if schema is not None:
        return schema_grammar(schema)
    return GrammarSpec("json_object") if answer_type == "json_object" else None


class JsonSchema(WireModel):
    """OpenAI's named schema; llama.cpp's clients leave out the name."""

    name: Annotated[str, Field(min_length=1, max_length=64)] = "answer"
    schema_: AnswerSchema = Field(alias="schema")
    description: str | None = None
    strict: bool = False  # without effect: a schema is always enforced


class ResponseFormat(WireModel):
    """The form of a chat's answer; llama.cpp's clients send a schema with type json_object."""

    type: AnswerType
    json_schema: JsonSchema | None = None
    schema_: AnswerSchema | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _fields_fit_the_type(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise refusal("is required for type json_schema", field="json_schema")
        for field, value, kind in (
            ("json_schema", self.json_schema, "json_schema"),
            ("schema", self.schema_, "json_object"),
        ):
            if value is not None and self.type != kind:
                raise refusal(f"belongs to type {kind}, not {self.type}", field=field)
        return self

    def spec(self) -> GrammarSpec | None:
        schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
        return type_grammar(self.type, schema)


class StructuredOutputs(WireModel):
    """vLLM's field for the form of an answer."""

    json_schema: SchemaOrText | None = Field(default=None, alias="json")
    regex: GrammarText | None = None
    choice: Choices = Field(default_factory=list)
    grammar: GrammarText | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: GrammarText | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if self.json_object is False:
            raise refusal("must be true, or be left out", field="json_object")
        if len(self._given()) != 1:
            raise refusal("must have one of json, regex, choice, grammar and json_object")
        return self

    def spec(self) -> GrammarSpec:
        (kind,) = self._given()
        if kind in ("json_schema", "json_object") and self.model_fields_set & _STYLES:
            schema = self.json_schema if kind == "json_schema" else {"type": "object"}
            form = styled(
                schema or {},
                closed=self.disable_additional_properties,
                no_whitespace=self.disable_any_whitespace,
                whitespace=self.whitespace_pattern,
            )
            return schema_grammar(form)
        return _spec(kind, getattr(self, kind))

    def _given(self) -> list[str]:
        return [*(self.model_fields_set - _STYLES)]


_STYLES = {"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"}


def _from_tgi(value: object) -> object:
    # TGI's field is an object with a type and a value; llama.cpp's is a text.
    if isinstance(value, str):
        _check_size(value, "")
        return {"grammar": value}
    if not isinstance(value, dict) or "type" not in value:
        raise refusal("must be a string, or an object with type and value")
    kind, inner = value["type"], value.get("value")
    if kind == "json_schema" and isinstance(inner, dict):
        kind, inner = "json", inner.get("schema")
    return {kind: inner} if kind in ("json", "regex") else value


def either(kind: type) -> Discriminator:
    """Returns the discriminator of a union: tag `kind` for values of type `kind`, else `word`."""
    return Discriminator(lambda value: FORM + ("kind" if isinstance(value, kind) else "word"))


JsonOrSchema = Annotated[
    Annotated[AnswerSchema, Tag(FORM + "kind")]
    | Annotated[Literal["", "json"], Tag(FORM + "word")],
    either(dict),
]
"""Ollama's form of an answer: any JSON, a schema, or "" for text."""


def json_grammar(form: dict[str, Any] | str) -> GrammarSpec | None:
    """Returns the grammar of answers in Ollama's `format`; None: any text."""
    if isinstance(form, dict):
        return schema_grammar(form)
    return GrammarSpec("json_object") if form else None


class GuidedFields(WireModel):
    """All fields of OpenAI's two endpoints, and of similar servers, for the form of an answer."""

    response_format: ResponseFormat | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices = Field(default_factory=list)
    guided_grammar: GrammarText | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: SchemaOrText | None = None  # llama.cpp, SGLang
    regex: GrammarText | None = None  # SGLang, outlines
    ebnf: GrammarText | None = None  # SGLang
    grammar: Annotated[StructuredOutputs, BeforeValidator(_from_tgi)] | None = None
    format: JsonOrSchema | None = None  # Ollama's, which Open WebUI sends here too

    _forms: list[str] = PrivateAttr()  # names of the fields that were given

    @model_validator(mode="after")
    def _forms_agree(self) -> Self:
        self._forms = [name for name in GuidedFields.model_fields if name in self.model_fields_set]
        for field in self._forms[1:]:
            if self._form(field) != self._form(self._forms[0]):
                raise refusal(f"can't be combined with {self._forms[0]}", field=field)
        return self

    def guided(self) -> tuple[str, GrammarSpec | None] | None:
        """Returns the name of the field that was given, and its grammar; None if none was given."""
        return (self._forms[0], self._form(self._forms[0])) if self._forms else None

    def _form(self, field: str) -> GrammarSpec | None:
        value = getattr(self, field)
        if isinstance(value, ResponseFormat | StructuredOutputs):
            return value.spec()
        if field == "format":
            return json_grammar(value)
        return _spec(field.removeprefix("guided_"), value)


def _spec(kind: str, value: Any) -> GrammarSpec:
    if kind == "json_object":
        return GrammarSpec("json_object")
    if kind == "choice":
        return GrammarSpec("choice", json.dumps(value))
    if kind in ("regex", "grammar", "ebnf"):
        return GrammarSpec("regex" if kind == "regex" else "lark", value)
    return schema_grammar(value)


class _ThinkingWish(WireModel):
    """One field's settings for thinking; those that it leaves out are up to the model."""

    enabled: bool | None = None
    type: Literal["enabled", "disabled", "adaptive"] | None = None
    effort: Effort | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        default=None, validation_alias=AliasChoices("max_tokens", "budget_tokens")
    )
    exclude: bool = False  # think, but leave it out of the answer

    def fields(self) -> dict[str, Any]:
        """Returns the settings `thinking`, `effort` and `budget` that are given or implied."""
        thinking = {"enabled": True, "disabled": False}.get(self.type or "", self.enabled)
        if thinking is None and (self.effort or self.max_tokens):
            thinking = self.effort != "none"
        fields = {"thinking": thinking, "effort": self.effort, "budget": self.max_tokens}
        return {name: value for name, value in fields.items() if value is not None}


def _as_wish(value: object) -> object:
    if isinstance(value, bool):
        return {"enabled": value}
    if isinstance(value, int) and 0 <= value < 1 << 31:
        return {"max_tokens": value}
    if value in EFFORTS:
        return {"effort": value}
    if isinstance(value, dict):
        return value
    raise refusal(
        f"must be true, false, an effort ({', '.join(EFFORTS)}), a number of tokens below 2^31 or "
        "an object",
        unsupported=isinstance(value, str),
    )


_ThinkingField = Annotated[_ThinkingWish, BeforeValidator(_as_wish)]


class ThinkingFields(WireModel):
    """A chat's fields for how much to think. Several may be given if they agree."""

    reasoning_effort: Effort | None = None
    reasoning: _ThinkingField | None = None  # OpenRouter
    enable_thinking: _ThinkingField | None = None  # Qwen
    thinking: _ThinkingField | None = None  # Anthropic, DeepSeek
    think: _ThinkingField | None = None  # Ollama
    thinking_budget: _ThinkingField | None = None  # Qwen
    include_reasoning: bool = True  # OpenRouter, vLLM

    _wish: dict[str, Any] = PrivateAttr()  # the settings `thinking`, `effort`, `budget`

    @model_validator(mode="after")
    def _agree(self) -> Self:
        self._wish = {}
        for field in ThinkingFields.model_fields:
            given = getattr(self, field)
            if field == "reasoning_effort" and given is not None:
                given = _ThinkingWish(effort=given)
            if isinstance(given, _ThinkingWish):
                for name, value in given.fields().items():
                    if self._wish.setdefault(name, value) != value:
                        raise refusal(f"contradicts another field about {name}", field=field)
        return self

    @cached_property
    def hides_reasoning(self) -> bool:
        fields = [getattr(self, name) for name in ThinkingFields.model_fields]
        return not self.include_reasoning or any(getattr(f, "exclude", False) for f in fields)
