"""What strict tools enforce: the same of each format, or an error that names what it can't."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_mtp.errors import GrammarError, UnsupportedParameterError
from mlx_mtp.sampling.grammar import GrammarCompiler
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.answer_grammar import answer_grammar
from mlx_mtp.server.conversation import Conversation, Message, Tool, ToolChoice
from mlx_mtp.server.parsing.formats import OutputFormat
from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.parsing.pieces import events_of, summary
from tests.server.parsing.test_tool_grammar import (
    FORMATS,
    accepts,
    both,
    compiler,
    tokenizer,
    xml,
)

__all__ = ["compiler", "tokenizer"]

NESTED = {"type": "array", "items": {"$ref": "#/$defs/spot"}, "minItems": 1}
DEFINITIONS = {
    "unit": {"enum": ["celsius", "fahrenheit"], "title": "Unit", "type": "string"},
    "spot": {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "in": {"$ref": "#/$defs/unit"}},
        "required": ["x"],
        "additionalProperties": False,
    },
}


def tool_schema(value: Any, **more: Any) -> dict[str, Any]:
    """One required parameter `a`."""
    return {
        "type": "object",
        "properties": {"a": value},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": DEFINITIONS,
        **more,
    }


def grammar(tokenizer: Tokenizer, form: str, schema: Any, *, strict: bool = True) -> GrammarSpec:
    chat = Conversation(
        [Message("user", "hi")],
        tools=[Tool("f", None, schema, strict=strict)],
        tool_choice=ToolChoice("required"),
    )
    spec = answer_grammar(chat, OutputFormat("none", form), tokenizer.added_tokens, thinking=False)
    assert spec is not None
    return spec


def read(form: str, schema: Any, text: str) -> Any:
    """The arguments that a client gets."""
    parser = OutputFormat("none", form).parser(thinking=False, schemas={"f": schema})
    ((kind, name, arguments),) = summary(events_of(parser, [text]))
    assert (kind, name) == ("call", "f")
    return json.loads(arguments)


VALUES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "string": ({"type": "string"}, ["", "x", "a\nb", "5", "<b> & </b>"], []),
    "enum": ({"type": "string", "enum": ["a", "b"]}, ["a", "b"], ["c", "ab", ""]),
    "enum without a type": ({"enum": ["a", 5, None]}, ["a", 5, None], ["b", 6]),
    "reference": ({"$ref": "#/$defs/unit"}, ["celsius"], ["kelvin", ""]),
    "reference with more": (
        {"$ref": "#/$defs/unit", "description": "d", "default": "celsius"},
        ["celsius"],
        ["kelvin"],
    ),
    "allOf of one": ({"allOf": [{"$ref": "#/$defs/unit"}]}, ["celsius"], ["kelvin"]),
    "allOf of two": (
        {"allOf": [{"type": "string", "maxLength": 3}, {"minLength": 2}]},
        ["ab", "abc"],
        ["a", "abcd"],
    ),
    "const": ({"const": "yes"}, ["yes"], ["no", "yes!"]),
    "const with a type": ({"type": "string", "const": "yes"}, ["yes"], ["no"]),
    "const number": ({"const": 5}, [5], [6, "x"]),
    "pattern": ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["abd", "", "abc\nx"]),
    "pattern anywhere": ({"type": "string", "pattern": "b+"}, ["abc", "b"], ["ac", ""]),
    "pattern of two": ({"type": "string", "pattern": "^a|/b$"}, ["ax", "x/b"], ["xa", "/bx"]),
    "pattern of digits": ({"type": "string", "pattern": "^\\d{2}[\\w-]$"}, ["12_"], ["1", "12!"]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é🎉c"], ["a", "abcd"]),
    "length of many lines": ({"type": "string", "maxLength": 3}, ["a\nb"], ["a\nbc"]),
    "date": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "today"]),
    "date-time": (
        {"type": "string", "format": "date-time"},
        ["2026-11-22T10:00:00Z", "2026-11-22T10:00:00.5+01:00"],
        ["2026-11-22 10:00", "2026-11-22T25:00:00Z"],
    ),
    "uuid": (
        {"type": "string", "format": "uuid"},
        ["12345678-1234-5678-1234-567812345678"],
        ["1234"],
    ),
    "nullable": ({"type": ["string", "null"]}, ["x", "5", None], []),
    "nullable enum": (
        {"type": ["string", "null"], "enum": ["a", "b", None]},
        ["a", None],
        ["c", ""],
    ),
    "nullable enum, as anyOf": (
        {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}], "default": None},
        ["celsius", None],
        ["kelvin", ""],
    ),
    "enum that is not nullable": (
        {"type": ["string", "null"], "enum": ["a", "b"]},
        ["a"],
        [None, ""],
    ),
    "nullable pattern": (
        {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"type": "null"}]},
        ["aa", None],
        ["b"],
    ),
    "string or number": ({"type": ["string", "integer"]}, ["x", 5], []),
    "pattern or number": (
        {"anyOf": [{"type": "string", "pattern": "^[a-z0-9]+$"}, {"type": "integer"}]},
        ["abc", 5, -7],
        ["a b", 5.5],
    ),
    "string or small number": (
        {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]},
        ["x", 3, 12],
        [2, -5],
    ),
    "string or object": (
        {"anyOf": [{"type": "string", "maxLength": 3}, {"$ref": "#/$defs/spot"}]},
        ["abc", {"x": 1}],
        ["abcd", {"y": 1}, {}],
    ),
    "string or any object": (
        {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "object"}, {"type": "boolean"}]},
        ["abc", {"y": 1}, True],
        ["abcd"],
    ),
    "one of two words": ({"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["c"]),
    "any of words": (
        {"anyOf": [{"enum": ["a", "b"]}, {"type": "string", "pattern": "^x-"}]},
        ["a", "x-1"],
        ["c"],
    ),
    "a list of definitions": (NESTED, [[{"x": 1}, {"x": 2, "in": "celsius"}]], [[], [{}], "x"]),
    "an object of definitions": (
        {"$ref": "#/$defs/spot"},
        [{"x": 1, "in": "fahrenheit"}],
        [{"x": "1"}, {"x": 1, "in": "kelvin"}, {"x": 1, "y": 2}],
    ),
    "number": ({"type": "number", "minimum": 0}, [0, 1.5], [-1, "x"]),
    "nullable number": ({"type": ["integer", "null"]}, [5, None], ["x", 1.5]),
    "anything": ({}, ["x", {"b": 1}], []),
    "no value but text": ({"type": "string", "x-note": 1}, ["x"], []),
}


@both
@pytest.mark.parametrize(("value", "good", "bad"), VALUES.values(), ids=VALUES)
def test_values(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    name: str,
    value: Any,
    good: list[Any],
    bad: list[Any],
) -> None:
    schema = tool_schema(value)
    spec, call = grammar(tokenizer, name, schema), FORMATS[name]
    for argument in good:
        text = call("f", a=argument)
        assert accepts(compiler, tokenizer, spec, text), text
        found = read(name, schema, text)
        jsonschema.validate(found, schema)
        assert found == {"a": argument} or "type" not in str(value)
    for argument in bad:
        text = call("f", a=argument)
        assert not accepts(compiler, tokenizer, spec, text), text
    for text in (call("f"), call("f", a=(good or ["x"])[0], undeclared="x")):
        assert not accepts(compiler, tokenizer, spec, text), text


@both
def test_the_whole_schema(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    call = FORMATS[name]
    recursive = {"$defs": {"T": tool_schema({"type": "string"})}, "$ref": "#/$defs/T"}
    for schema in (recursive, {"allOf": [tool_schema({"type": "string"})]}):
        spec = grammar(tokenizer, name, schema)
        assert accepts(compiler, tokenizer, spec, call("f", a="5"))
        assert read(name, schema, call("f", a="5")) == {"a": "5"}
        assert not accepts(compiler, tokenizer, spec, call("f"))
        assert not accepts(compiler, tokenizer, spec, call("f", a="x", b="x"))


@both
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "schema",
    [
        None,
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {}, "required": [], "title": "Nothing"},
        {"type": "object", "properties": {}, "additionalProperties": False},
    ],
)
def test_without_parameters_there_are_no_arguments(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str, schema: Any, strict: bool
) -> None:
    spec = grammar(tokenizer, name, schema, strict=strict)
    assert accepts(compiler, tokenizer, spec, FORMATS[name]("f"))
    assert not accepts(compiler, tokenizer, spec, FORMATS[name]("f", city="Paris"))


@both
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": True},
        {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}},
        {"type": "object", "patternProperties": {"^c": {"type": "string"}}},
        {"anyOf": [{"type": "object", "properties": {"city": {"type": "string"}}}]},
    ],
)
def test_schemas_that_say_more_are_open(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str, schema: Any
) -> None:
    spec = grammar(tokenizer, name, schema, strict=False)
    assert accepts(compiler, tokenizer, spec, FORMATS[name]("f", city="Paris"))


WORDS = ["a", "b", 5, None, True, "null", "5", "true", "", -3, 5.5, "{}", "abc"]
TYPES = ["string", "integer", "null", "boolean", "number", "object", "array"]
atoms = st.one_of(
    st.builds(lambda n: {"type": "string", "minLength": n}, st.integers(0, 3)),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 4)),
    st.builds(
        lambda p: {"type": "string", "pattern": p}, st.sampled_from(["^a", "b$", r"^\d+$", "l|5"])
    ),
    st.builds(lambda n: {"type": "integer", "minimum": n}, st.integers(-5, 6)),
    st.builds(lambda e: {"enum": e}, st.lists(st.sampled_from(WORDS), min_size=1, max_size=4)),
    st.builds(
        lambda t: {"type": t}, st.lists(st.sampled_from(TYPES), min_size=1, max_size=2, unique=True)
    ),
    st.builds(
        lambda t, e: {"type": t, "enum": e},
        st.lists(st.sampled_from(TYPES), min_size=1, max_size=2, unique=True),
        st.lists(st.sampled_from(WORDS), min_size=1, max_size=4),
    ),
    st.sampled_from([{}, {"minLength": 2}, {"$ref": "#/$defs/unit"}, {"$ref": "#/$defs/spot"}]),
)
value_schemas = st.recursive(
    atoms,
    lambda inner: st.builds(
        lambda word, parts, more: {word: parts, **more},
        st.sampled_from(["anyOf", "oneOf", "allOf"]),
        st.lists(inner, min_size=1, max_size=3),
        st.one_of(st.just({}), atoms),
    ),
    max_leaves=5,
)
BARE = ["", "null", "None", "5", "-3", "5.5", "true", "True", "a", "ab", "abcd", "{}", "[1]", '"a"']
BARE += ['{"x": 1}', "{'x': 1}", " 5 ", "5a", "{a", "celsius", "kelvin", "x\ny", "2024-02-29"]


@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(value_schemas)
def test_whatever_is_let_through_is_read_as_what_fits(
    compiler: GrammarCompiler, tokenizer: Tokenizer, value: Any
) -> None:
    schema = tool_schema(value)
    try:
        matcher = compiler.compile(grammar(tokenizer, "qwen3_coder", schema)).matcher
    except (UnsupportedParameterError, GrammarError):
        return
    assert matcher is not None
    validator = jsonschema.Draft202012Validator(schema)
    for bare in BARE:
        text = xml("f", a=bare)
        tokens = list(tokenizer.encode(text))
        if matcher.deep_copy().validate_tokens(tokens) == len(tokens):
            validator.validate(read("qwen3_coder", schema, text))


UNSUPPORTED: dict[str, tuple[Any, str, bool]] = {
    "not": ({"type": "string", "not": {"const": "a"}}, "not", True),
    "format": ({"type": "string", "format": "regex"}, "format", True),
    "look-ahead": ({"type": "string", "pattern": "^(?!a)b"}, "pattern", True),
    "a backslash at the end": ({"type": "string", "pattern": "x\\"}, "pattern", True),
    "word boundary": ({"type": "string", "pattern": "\\bx"}, "pattern", True),
    "overlapping oneOf": (
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
        "oneOf",
        True,
    ),
    "a reference to nowhere": ({"$ref": "#/$defs/none"}, "$ref", True),
    "a circle": ({"$ref": "#/$defs/circle"}, "$ref", True),
    "a reference within the parameters": (
        {"type": "array", "items": {"$ref": "#/properties/a"}},
        "$ref",
        True,
    ),
    "limits of what is text": ({"minimum": 3}, "minimum", True),
    "a word that ends its value": ({"enum": ["</parameter>"]}, "enum", True),
    "anyOf": (tool_schema({}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]), "anyOf", False),
    "minProperties": (tool_schema({}, minProperties=1), "minProperties", False),
    "if": (tool_schema({}, **{"if": {}, "then": {}}), "if", False),
    "others of a type": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        "additionalProperties",
        False,
    ),
    "required, but not declared": (tool_schema({}, required=["b"]), "required", False),
    "a name that is no tag": (
        {"type": "object", "properties": {"a>b": {"type": "string"}}},
        "properties",
        False,
    ),
}


@pytest.mark.parametrize(("schema", "keyword", "inner"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_tags_cannot_enforce_is_an_error(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, keyword: str, inner: bool
) -> None:
    if inner:
        circle = {"circle": {"$ref": "#/$defs/circle"}}
        schema = tool_schema(schema, **{"$defs": DEFINITIONS | circle})
    with pytest.raises(UnsupportedParameterError) as raised:
        grammar(tokenizer, "qwen3_coder", schema)
    assert raised.value.param == "tools"
    for word in ('"f"', f'"{keyword}"', '"a"' if inner else "schema"):
        assert word in str(raised.value)
    # A tool that is only forced may have such a schema: what can't be enforced is left open.
    assert grammar(tokenizer, "qwen3_coder", schema, strict=False)


def test_a_text_with_tags_does_not_end_early(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    spec = grammar(tokenizer, "qwen3_coder", tool_schema({"type": "string"}))
    for text in ("</parameter>", "</parameter>x", "a</function>\nb"):
        call = xml("f", a=text)
        assert accepts(compiler, tokenizer, spec, call), text
    for text in (
        "</parameter><parameter=b>\nx",
        "x</parameter>\n\n</function>y",
        "\n</parameter>\ny",
    ):
        assert not accepts(compiler, tokenizer, spec, xml("f", a=text)), text
