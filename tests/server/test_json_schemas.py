"""JSON schemas that are closed: those for which it is sound, and what grammars then allow."""

import json
from typing import Any

import pytest

from mlx_mtp.sampling.grammar import GrammarCompiler
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.grammar.json_schemas import close_objects, styled
from mlx_mtp.text.tokenizer import Tokenizer
from tests.support.fake_engine import EOS

Schema = dict[str, Any]


def thing(names: str, **more: Any) -> Schema:
    return {"type": "object", "properties": {name: {} for name in names}, **more}


def shut(names: str, **more: Any) -> Schema:
    return thing(names, **more, additionalProperties=False)


NULL: Schema = {"type": "null"}
TO_A = {"$ref": "#/$defs/A"}
TAGGED = {"discriminator": {"propertyName": "a"}}
CLOSED: list[tuple[Schema, Schema]] = [
    (thing("ab", required=["a"]), shut("ab", required=["a"])),
    ({"type": "array", "items": thing("a")}, {"type": "array", "items": shut("a")}),
    ({"properties": {"x": thing("a")}}, shut("x") | {"properties": {"x": shut("a")}}),
    ({"anyOf": [thing("a"), NULL]}, {"anyOf": [shut("a"), NULL]}),
    ({"allOf": [thing("a")], "title": "t"}, {"allOf": [shut("a")], "title": "t"}),
    ({"oneOf": [thing("a"), thing("b")], **TAGGED}, {"oneOf": [shut("a"), shut("b")], **TAGGED}),
    ({"$defs": {"A": thing("a")}, **TO_A}, {"$defs": {"A": shut("a")}, **TO_A}),
    (thing("a", **{"$defs": {"A": thing("b")}}), shut("a", **{"$defs": {"A": shut("b")}})),
]
del CLOSED[2][1]["type"]
# Schemas that state more about an object, in one place or two, are left as they are.
OPEN: list[Schema] = [
    *(thing("a", additionalProperties=value) for value in (True, False, NULL)),
    thing("a", required=["b"]),
    thing("a", patternProperties={"^x": {}}),
    thing("a", minProperties=2),
    thing("a", propertyNames={"pattern": "a|b"}),
    thing("a", unevaluatedProperties=False),
    thing("a", const={"a": 1, "b": 2}),
    {"allOf": [thing("a"), thing("b")]},
    {"$defs": {"A": thing("a")}, "allOf": [TO_A, thing("b")]},
    {"$defs": {"A": thing("a")}, "properties": {}, **TO_A},
    {"allOf": [{"anyOf": [thing("a"), NULL]}, thing("b")]},
    thing("a", anyOf=[{"required": ["a"]}, thing("b")]),
    # With both closed, an object valid under both, and so refused, would be valid under one.
    {"oneOf": [thing("a"), thing("b")]},
    {"oneOf": [{"items": thing("a")}, {"items": thing("b")}]},
    {"not": thing("a")},
    {"not": {"items": thing("a")}},
    {"items": {"allOf": [{"$ref": "#other"}, thing("a")]}},
    {"enum": [thing("a")]},
    {"default": thing("a"), "type": "object"},
]


def test_where_it_is_sound_objects_are_closed() -> None:
    for schema, expected in CLOSED:
        assert close_objects(schema) == expected
    for schema in OPEN:
        assert close_objects(schema) == schema


def test_a_definition_that_one_place_extends_stays_open() -> None:
    schema = {"$defs": {"A": thing("a")}, "anyOf": [TO_A, {"allOf": [TO_A, thing("b")]}]}
    assert close_objects(schema) == schema
    # A list of the schema itself describes other values, so closing the schema is sound.
    tree = {"type": "object", "properties": {"kids": {"items": {"$ref": "#"}}}}
    assert close_objects(tree) == tree | {"additionalProperties": False}


ITEM = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"items": {"type": "integer"}}},
}
TEXTS = {
    '{"a":1,"b":[1,2]}': ("default", "none", "open"),
    '{"a": 1, "b": [1, 2]}': ("default", "open"),
    '{"a":1, "b":[1,2]}': ("default", "open"),
    '{ "a": 1 }': ("default", "open"),
    '{"a" : 1}': ("default", "open"),
    '{"a":\n1}': ("default", "open"),
    '{"b": [1,\n2]}': ("default", "open"),
    '{"b": [ 1]}': ("default", "open"),
    '{"a":  1}': (),
    '{\n  "a": 1\n}': ("default", "open"),
    '{"a":1,"c":2}': ("open",),
}
STYLES: dict[str, dict[str, Any]] = {
    "default": {},
    "none": {"no_whitespace": True},
    "open": {"closed": False},
}


@pytest.mark.parametrize("style", STYLES)
def test_what_a_grammar_allows(tokenizer: Tokenizer, style: str) -> None:
    schema = json.dumps(styled(ITEM, **STYLES[style]))
    compiler = GrammarCompiler(tokenizer.to_json(), [EOS])
    grammar = compiler.compile(GrammarSpec("json_schema", schema)).matcher
    for text, styles in TEXTS.items():
        matcher = grammar.deep_copy()
        fits = all(matcher.consume_token(token) for token in tokenizer.encode(text))
        assert (fits and matcher.is_accepting()) == (style in styles), text
    standard = styled(ITEM, as_standard=True)
    assert "additionalProperties" not in standard
    assert styled(standard) == standard, "its options are given: it is taken as it is"
