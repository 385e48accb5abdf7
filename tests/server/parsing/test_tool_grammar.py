"""The grammars that enforce calls: what they allow, and that the parsers can read it."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_mtp.errors import GrammarError, UnsupportedParameterError
from mlx_mtp.sampling.grammar import GrammarCompiler
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.generation.inputs import Conversation, Message, Tool, ToolChoice
from mlx_mtp.server.grammar.answer_grammar import answer_grammar
from mlx_mtp.text.parsing.formats import OutputFormat
from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.parsing import pieces
from tests.server.parsing.pieces import events_of, summary, xml
from tests.support.fake_engine import EOS

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"$ref": "#/$defs/days"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1}},
}
FREE = Tool("free", None, {"type": "object", "additionalProperties": True})
TOOLS = [Tool("get_weather", None, WEATHER), FREE]
STRICT = [Tool("get_weather", None, WEATHER, strict=True), FREE]
MUST = ToolChoice("required")
Accepts = Callable[[GrammarSpec, str], bool]


def hermes(name: str, **values: Any) -> str:
    return pieces.hermes(name, json.dumps(values, ensure_ascii=False))


FORMATS: dict[str, Callable[..., str]] = {"hermes": hermes, "qwen3_coder": xml}
both = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.to_json(), (EOS,))


@pytest.fixture(scope="module")
def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer) -> Accepts:
    """Returns a function that tells whether a grammar accepts exactly this text as an answer."""
    matchers: dict[GrammarSpec, Any] = {}

    def accepts(spec: GrammarSpec, text: str) -> bool:
        if spec not in matchers:
            matchers[spec] = compiler.compile(spec).matcher
        matcher, tokens = matchers[spec].deep_copy(), tokenizer.encode(text)
        return matcher.try_consume_tokens(list(tokens)) == len(tokens) and matcher.is_accepting()

    return accepts


def grammar(tokenizer: Tokenizer, name: str, *, thinks: bool = False, **fields: Any) -> GrammarSpec:
    chat = Conversation([Message("user", "hi")], **{"tools": TOOLS, "tool_choice": MUST, **fields})
    form = OutputFormat("qwen3", name)
    spec = answer_grammar(chat, form, tokenizer.added_tokens, thinking=thinks)
    assert spec is not None
    return spec


def of_schema(tokenizer: Tokenizer, name: str, schema: Any, *, strict: bool = True) -> GrammarSpec:
    return grammar(tokenizer, name, tools=[Tool("f", None, schema, strict=strict)])


def read(name: str, schema: Any, text: str) -> Any:
    """Returns the arguments that a client gets."""
    parser = OutputFormat("none", name).parser(thinking=False, schemas={"f": schema})
    ((kind, tool, arguments),) = summary(events_of(parser, [text]))
    assert (kind, tool) == ("call", "f")
    return json.loads(arguments)


@both
def test_answers_with_calls(accepts: Accepts, tokenizer: Tokenizer, name: str) -> None:
    call = FORMATS[name]
    rome = call("get_weather", city="Rome, or so: é")
    free = call("free", anything="at all")
    bad = [call("get_weather"), call("other", city="Rome"), call("get_weather", city="x", more="x")]
    bad += [call("get_weather", city="Rome", unit="kelvin")]
    bad += [call("get_weather", city="Rome", days=days) for days in ("three", 0)]
    named = ToolChoice("required", frozenset({"get_weather"}))
    cases: list[tuple[dict[str, Any], list[str], list[str]]] = [
        (
            {},
            [call("get_weather", city="Rome", unit="celsius", days=3), f"{rome}\n{rome}\n{free}"],
            ["", "Rome is sunny.", f"Well: {rome}", rome + " Done.", *bad],
        ),
        ({"parallel_tool_calls": False}, [rome, free], [f"{rome}\n{rome}", *bad]),
        ({"tool_choice": named}, [rome], [f"{rome}\n{rome}", free, *bad]),
        (
            {"thinks": True},
            [f"I think <of> {{}}.\n</think>\n\n{rome}"],
            [f"I think.\n</think>\n\nWell: {rome}", rome],
        ),
        (
            {"tools": STRICT, "tool_choice": ToolChoice()},
            ["Hello <b>.", f"I look.\n{rome}\n{free} Done.", f"<think>{rome}"],
            [rome + text for text in bad],
        ),
    ]
    for form, good in (
        (GrammarSpec("json_object"), '{"a": 1}'),
        (GrammarSpec("json_schema", json.dumps(WEATHER)), '{"city": "Rome"}'),
        (GrammarSpec("choice", '["yes", "no"]'), "yes"),
    ):
        fields = {"tool_choice": ToolChoice(), "response": form}
        cases.append((fields, [good, rome, f"{rome}\n{free}"], ["x", good + rome, '{"city": ']))
    for fields, good_texts, bad_texts in cases:
        spec = grammar(tokenizer, name, **fields)
        for text in good_texts:
            assert accepts(spec, text), (fields, text)
        for text in bad_texts:
            assert not accepts(spec, text), (fields, text)
    with pytest.raises(UnsupportedParameterError, match="token for tool calls"):
        answer_grammar(
            Conversation([], tools=STRICT), OutputFormat("qwen3", name), {}, thinking=False
        )


DEFINITIONS = {
    "unit": {"enum": ["celsius", "fahrenheit"], "title": "Unit", "type": "string"},
    "spot": {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "in": {"$ref": "#/$defs/unit"}},
        "required": ["x"],
        "additionalProperties": False,
    },
    "circle": {"$ref": "#/$defs/circle"},
}


def tool_schema(value: Any, **more: Any) -> dict[str, Any]:
    """Returns the schema of an object with one required parameter `a`."""
    return {
        "type": "object",
        "properties": {"a": value},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": DEFINITIONS,
        **more,
    }


UNIT, SPOT = {"$ref": "#/$defs/unit"}, {"$ref": "#/$defs/spot"}
STRING, NULL, OBJECT = {"type": "string"}, {"type": "null"}, {"type": "object"}
TWO_OR_NULL = {"type": ["string", "null"], "enum": ["a", "b"]}
STRING_OR_FROM_3 = {"anyOf": [STRING, {"type": "integer", "minimum": 3}]}
SPOTS = {"type": "array", "items": SPOT, "minItems": 1}
VALUES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "string": ({**STRING, "x-note": 1}, ["", "x", "a\nb", "5", "<b> & </b>"], []),
    "enum": ({**STRING, "enum": ["a", "b"]}, ["a", "b"], ["c", "ab", ""]),
    "reference": (UNIT, ["celsius"], ["kelvin", ""]),
    "allOf": ({"allOf": [UNIT, {"enum": ["celsius", "x"]}]}, ["celsius"], ["fahrenheit", "x"]),
    "enum that is not nullable": (TWO_OR_NULL, ["a"], [None, ""]),
    "string or number": ({"type": ["string", "integer"]}, ["x", "5 km", 5], []),
    "string or small number": (STRING_OR_FROM_3, ["x", 3, 12], [2, -5]),
    "definitions": (SPOTS, [[{"x": 1}, {"x": 2, "in": "celsius"}]], [[], [{}], "x"]),
    "anything": ({}, ["x", {"b": 1}], []),
}


@both
@pytest.mark.parametrize(("value", "good", "bad"), VALUES.values(), ids=VALUES)
def test_values(
    accepts: Accepts, tokenizer: Tokenizer, name: str, value: Any, good: list[Any], bad: list[Any]
) -> None:
    schema, call = tool_schema(value), FORMATS[name]
    spec = of_schema(tokenizer, name, schema)
    for argument in good:
        text = call("f", a=argument)
        assert accepts(spec, text), text
        found = read(name, schema, text)
        jsonschema.validate(found, schema)
        assert found == {"a": argument} or "type" not in str(value)
    for argument in bad:
        assert not accepts(spec, call("f", a=argument)), argument
    for text in (call("f"), call("f", a=good[0], undeclared="x")):
        assert not accepts(spec, text), text


@both
def test_the_whole_schema(accepts: Accepts, tokenizer: Tokenizer, name: str) -> None:
    call, text = FORMATS[name], tool_schema(STRING)
    for schema in ({"$defs": {"T": text}, "$ref": "#/$defs/T"}, {"allOf": [text]}):
        spec = of_schema(tokenizer, name, schema)
        assert accepts(spec, call("f", a="5"))
        assert read(name, schema, call("f", a="5")) == {"a": "5"}
        assert not accepts(spec, call("f"))
        assert not accepts(spec, call("f", a="x", b="x"))
    # Without parameters no arguments are accepted, unless the schema allows them in another way.
    empty = {**OBJECT, "properties": {}}
    for schema, is_open in (
        (None, False),
        ({**empty, "required": [], "title": "Nothing"}, False),
        ({**OBJECT, "additionalProperties": True}, True),
        ({**empty, "additionalProperties": STRING}, True),
        ({"anyOf": [{**OBJECT, "properties": {"city": STRING}}]}, True),
    ):
        spec = of_schema(tokenizer, name, schema, strict=False)
        assert accepts(spec, call("f", city="Paris")) == is_open
        assert is_open or accepts(spec, call("f"))


WORDS = ["a", "b", 5, None, True, "null", "5", "true", "", -3, 5.5, "{}", "abc", [1], {"x": 1}]
TYPES = ["string", "integer", "null", "boolean", "number", "object", "array"]
some_types = st.lists(st.sampled_from(TYPES), min_size=1, max_size=2, unique=True)
some_words = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4)
atoms = st.one_of(
    st.builds(lambda n: {"type": "integer", "minimum": n}, st.integers(-5, 6)),
    st.builds(lambda e: {"enum": e}, some_words),
    st.builds(lambda c: {"const": c}, st.sampled_from(WORDS)),
    st.builds(lambda t: {"type": t}, some_types),
    st.builds(lambda t, e: {"type": t, "enum": e}, some_types, some_words),
    st.builds(lambda t: {"type": ["string", *t], "minimum": 3, "maxItems": 1}, some_types),
    st.sampled_from([{}, {"minimum": 3}, {"items": {"type": "integer"}}, True, False, UNIT, SPOT]),
)
value_schemas = st.recursive(
    atoms,
    lambda inner: st.builds(
        lambda word, parts, more: {**(more if isinstance(more, dict) else {}), word: parts},
        st.sampled_from(["anyOf", "oneOf", "allOf"]),
        st.lists(inner, min_size=1, max_size=3),
        st.one_of(st.just({}), atoms),
    ),
    max_leaves=5,
)
BARE = ["", "null", "None", "5", "-3", "5.5", "true", "True", "a", "ab", "abcd", "{}", "[1]", '"a"']
BARE += ['{"x": 1}', "{'x': 1}", " 5 ", "5a", "{a", "celsius", "kelvin", "x\ny", "5.0", "[1, 2]"]


@settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=list(HealthCheck),
)
@given(value_schemas)
def test_whatever_is_let_through_is_read_as_what_fits(
    compiler: GrammarCompiler, tokenizer: Tokenizer, value: Any
) -> None:
    schema = tool_schema(value)
    try:
        matcher = compiler.compile(of_schema(tokenizer, "qwen3_coder", schema)).matcher
    except (UnsupportedParameterError, GrammarError):
        return
    assert matcher is not None
    validator = jsonschema.Draft202012Validator(schema)
    for bare in BARE:
        text = xml("f", a=bare)
        tokens = list(tokenizer.encode(text))
        if matcher.deep_copy().validate_tokens(tokens) == len(tokens):
            validator.validate(read("qwen3_coder", schema, text))


REQUIRED = [{"required": ["a"]}, {"required": ["b"]}]
NO_NAMES = {**OBJECT, "properties": {"a>b": STRING}}
UNSUPPORTED: dict[str, tuple[Any, str, bool]] = {
    # the schema, the keyword in the error, whether the schema is that of one parameter
    "minLength": ({**STRING, "minLength": 2}, "minLength", True),
    "pattern": ({"anyOf": [{**STRING, "pattern": "a"}, NULL]}, "pattern", True),
    "one string for two": ({"oneOf": [STRING, {"const": "a"}]}, "oneOf", True),
    "a reference to nowhere": ({"$ref": "#/$defs/none"}, "$ref", True),
    "too deep": ({"$ref": "#/$defs/d0"}, "$ref", True),
    "a word that ends its value": ({"enum": ["</parameter>"]}, "enum", True),
    "anyOf": (tool_schema({}, anyOf=REQUIRED), "anyOf", False),
    "required, but not declared": (tool_schema({}, required=["b"]), "required", False),
    "a name that is no tag": (NO_NAMES, "properties", False),
}


@pytest.mark.parametrize(("schema", "keyword", "inner"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_tags_cannot_enforce_is_an_error(
    tokenizer: Tokenizer, schema: Any, keyword: str, inner: bool
) -> None:
    if inner:
        # Expanded in full, these would be 20 ** 20 schemas.
        deep = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 20} for i in range(20)}
        schema = tool_schema(schema, **{"$defs": {**DEFINITIONS, **deep, "d20": {}}})
    with pytest.raises(UnsupportedParameterError) as raised:
        of_schema(tokenizer, "qwen3_coder", schema)
    assert raised.value.param == "tools"
    for word in ('"f"', f'"{keyword}"', '"a"' if inner else "schema"):
        assert word in str(raised.value)
    # Without `strict` a tool can have such a schema: what can't be enforced is left open.
    assert of_schema(tokenizer, "qwen3_coder", schema, strict=False)


def test_a_grammar_that_would_be_huge_is_not_built(tokenizer: Tokenizer) -> None:
    """The grammar would have a copy of the definitions for each parameter."""
    properties = {f"p{i}": {"type": "array", "items": SPOT} for i in range(1000)}
    schema = {"type": "object", "properties": properties, "$defs": {"spot": {"title": "x" * 10**5}}}
    with pytest.raises(GrammarError, match="262144 characters") as raised:
        of_schema(tokenizer, "qwen3_coder", schema)
    assert raised.value.param == "tools"


def test_a_text_with_tags_does_not_end_early(accepts: Accepts, tokenizer: Tokenizer) -> None:
    spec = of_schema(tokenizer, "qwen3_coder", tool_schema(STRING))
    for text in ("</parameter>", "</parameter>x", "a</function>\nb"):
        assert accepts(spec, xml("f", a=text)), text
    for text in ("</parameter><parameter=b>\nx", "x</parameter>\n\n</function>y"):
        assert not accepts(spec, xml("f", a=text)), text
