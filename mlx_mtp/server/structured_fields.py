"""What an answer must look like, as clients say it: `response_format` and vLLM's words for it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, model_validator

from mlx_mtp.sampling.grammar import MAX_CHOICES, MAX_GRAMMAR_CHARACTERS
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.fields import WireModel, at_most, few_values, refusal


def _as_schema(value: object) -> object:
    """JSON text becomes the schema that it is the text of."""
    if not isinstance(value, str):
        return value
    _check_size(len(value))
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise refusal(f"is not the JSON text of a schema: {error}") from None


def _dumped(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(json.dumps(schema))
    except (ValueError, RecursionError):
        raise refusal("is nested too deeply") from None
    _check_size(size)
    return schema


def _check_size(characters: int) -> None:
    if characters > MAX_GRAMMAR_CHARACTERS:
        raise refusal(
            f"has {characters} characters of JSON; at most {MAX_GRAMMAR_CHARACTERS} are allowed"
        )


Schema = Annotated[dict[str, Any], BeforeValidator(few_values), AfterValidator(_dumped)]
Choices = Annotated[list[str], FailFast(), Field(min_length=1), at_most(MAX_CHOICES)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class JsonSchema(WireModel):
    """A schema with the name that OpenAI wants for it."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: Schema = Field(alias="schema")
    description: str | None = None
    # Without `strict` OpenAI promises less; here a schema always holds.
    strict: bool = False


class ResponseFormat(WireModel):
    """The form of a chat's answer. llama.cpp's clients send a schema with type json_object."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Schema | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _fields_fit_the_type(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise refusal("is required for type json_schema", field="json_schema")
        for field, value, kind in (
            ("json_schema", self.json_schema, "json_schema"),
            ("schema", self.schema_, "json_object"),
        ):
            if value is not None and self.type != kind:
                raise refusal(f"belongs to type {kind}, not {self.type}", field=field)
        return self

    def grammar(self) -> GrammarSpec | None:
        """What an answer of this form must look like."""
        if self.type == "text":
            return None
        if self.json_schema is not None:
            return schema_grammar(self.json_schema.schema_)
        return GrammarSpec("json_object") if self.schema_ is None else schema_grammar(self.schema_)


class StructuredOutputs(WireModel):
    """The same in vLLM's words of today."""

    json_schema: Annotated[Schema, BeforeValidator(_as_schema)] | None = Field(
        default=None, alias="json"
    )
    regex: Text | None = None
    choice: Choices = Field(default_factory=list)
    grammar: Text | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        if self.json_object is False:
            raise refusal("must be true, or be left out", field="json_object")
        if len(_given(self, StructuredOutputs)) != 1:
            raise refusal("must have one of json, regex, choice, grammar and json_object")
        return self

    def spec(self) -> GrammarSpec:
        """What is asked for."""
        if self.json_object:
            return GrammarSpec("json_object")
        spec = _spec(self.json_schema, self.regex, self.choice, self.grammar)
        assert spec is not None, "one of them is there"
        return spec


class GuidedFields(WireModel):
    """The same in vLLM's words, for both of OpenAI's endpoints."""

    guided_json: Annotated[Schema, BeforeValidator(_as_schema)] | None = None
    guided_regex: Text | None = None
    guided_choice: Choices = Field(default_factory=list)
    guided_grammar: Text | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _at_most_one(self) -> GuidedFields:
        given = _given(self, GuidedFields)
        if len(given) > 1:
            raise refusal(f"can't be combined with {given[0]}", field=given[1])
        return self

    def guided(self) -> tuple[str, GrammarSpec] | None:
        """The field that was given, and what it asks for."""
        given = _given(self, GuidedFields)
        if not given:
            return None
        if self.structured_outputs is not None:
            return given[0], self.structured_outputs.spec()
        spec = _spec(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        assert spec is not None, "one of them is there"
        return given[0], spec


def _given(fields: WireModel, among: type[WireModel]) -> list[str]:
    """The names of the fields that are there, of those that `among` has."""
    return [name for name in among.model_fields if getattr(fields, name) not in (None, [])]


def _spec(
    schema: dict[str, Any] | None, regex: str | None, choice: list[str], grammar: str | None
) -> GrammarSpec | None:
    if schema is not None:
        return schema_grammar(schema)
    if regex is not None:
        return GrammarSpec("regex", regex)
    if choice:
        return GrammarSpec("choice", json.dumps(choice))
    return None if grammar is None else GrammarSpec("lark", grammar)


def schema_grammar(schema: dict[str, Any]) -> GrammarSpec:
    """The spec of a JSON schema; the order of its properties is that of the answer's."""
    return GrammarSpec("json_schema", json.dumps(schema))
