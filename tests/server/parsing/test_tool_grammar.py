"""The grammars that enforce calls: what they let through, and that the parsers read it back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_mtp.errors import UnsupportedParameterError
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.sampling.grammar import GrammarCompiler
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.answer_grammar import answer_grammar
from mlx_mtp.server.conversation import Conversation, Message, Tool, ToolChoice
from mlx_mtp.server.parsing.formats import OutputFormat
from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.fake_engine import EOS
from tests.server.parsing.pieces import events_of, summary

SCHEMA = {
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
OPEN = {"type": "object", "additionalProperties": True}
TOOLS = [Tool("get_weather", None, SCHEMA), Tool("free", None, OPEN)]
STRICT = [Tool("get_weather", None, SCHEMA, strict=True), TOOLS[1]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED_MODEL)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.to_json(), (EOS,))


def hermes(name: str, **values: Any) -> str:
    arguments = json.dumps(values, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def xml(name: str, **values: Any) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
        "</parameter>\n"
        for key, value in values.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


FORMATS = {"hermes": hermes, "qwen3_coder": xml}
both = pytest.mark.parametrize("name", FORMATS)


def grammar(tokenizer: Tokenizer, name: str, **fields: Any) -> GrammarSpec:
    thinking = fields.pop("thinks", False)
    fields = {"tools": TOOLS, "tool_choice": ToolChoice("required"), **fields}
    chat = Conversation([Message("user", "hi")], **fields)
    form = OutputFormat("qwen3", name)
    spec = answer_grammar(chat, form, tokenizer.added_tokens, thinking=thinking)
    assert spec is not None
    return spec


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: GrammarSpec, text: str) -> bool:
    """The grammar lets exactly this text be an answer."""
    matcher = compiler.compile(spec).matcher
    assert matcher is not None
    matcher, tokens = matcher.deep_copy(), tokenizer.encode(text)
    return matcher.try_consume_tokens(list(tokens)) == len(tokens) and matcher.is_accepting()


@both
def test_calls_are_required(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    call, spec = FORMATS[name], grammar(tokenizer, name)

    def ok(text: str) -> bool:
        return accepts(compiler, tokenizer, spec, text)

    rome = call("get_weather", city="Rome, or so: é")
    assert ok(rome)
    assert ok(call("get_weather", city="Rome", unit="celsius", days=3))
    assert ok(f"{rome}\n{rome}\n{call('free')}")
    assert ok(call("free", anything="at all"))
    assert not ok("Rome is sunny.")
    assert not ok(f"Well: {rome}")
    assert not ok(rome + " Done.")
    assert not ok(call("get_weather"))
    assert not ok(call("other", city="Rome"))
    assert not ok(call("get_weather", city="Rome", unit="kelvin"))
    assert not ok(call("get_weather", city="Rome", days="three"))
    assert not ok(call("get_weather", city="Rome", more="x"))
    assert not ok("")


@both
def test_one_call_is_one(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    rome = FORMATS[name]("get_weather", city="Rome")
    named = ToolChoice("required", frozenset({"get_weather"}))
    for fields in ({"parallel_tool_calls": False}, {"tool_choice": named}):
        spec = grammar(tokenizer, name, **fields)
        assert accepts(compiler, tokenizer, spec, rome)
        assert not accepts(compiler, tokenizer, spec, f"{rome}\n{rome}")
    assert not accepts(compiler, tokenizer, spec, FORMATS[name]("free"))


@both
def test_reasoning_before_the_call_is_free(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    spec = grammar(tokenizer, name, thinks=True)
    rome = FORMATS[name]("get_weather", city="Rome")
    assert accepts(compiler, tokenizer, spec, f"I think <of> {{}}.\n</think>\n\n{rome}")
    assert not accepts(compiler, tokenizer, spec, f"I think.\n</think>\n\nWell: {rome}")
    assert not accepts(compiler, tokenizer, spec, rome)


@both
def test_strict_tools_leave_text_free(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    call = FORMATS[name]
    spec = grammar(tokenizer, name, tools=STRICT, tool_choice=ToolChoice())
    rome = call("get_weather", city="Rome")
    for text in ("Hello <b>.", f"I look.\n{rome}\n{call('free')} Done.", rome, f"<think>{rome}"):
        assert accepts(compiler, tokenizer, spec, text)
    for text in (call("get_weather"), call("other"), f"{rome}{call('get_weather', days=0)}"):
        assert not accepts(compiler, tokenizer, spec, text)
    with pytest.raises(UnsupportedParameterError, match="token for tool calls"):
        answer_grammar(
            Conversation([], tools=STRICT), OutputFormat("qwen3", name), {}, thinking=False
        )


@both
def test_an_answer_of_a_form_or_calls(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    rome = FORMATS[name]("get_weather", city="Rome")
    for form, good in (
        (GrammarSpec("json_object"), '{"a": 1}'),
        (GrammarSpec("json_schema", json.dumps(SCHEMA)), '{"city": "Rome"}'),
        (GrammarSpec("choice", '["yes", "no"]'), "yes"),
    ):
        spec = grammar(tokenizer, name, tool_choice=ToolChoice(), response=form)
        for text in (good, rome, f"{rome}\n{rome}"):
            assert accepts(compiler, tokenizer, spec, text)
        for text in ("Rome", good + rome, '{"city": '):
            assert not accepts(compiler, tokenizer, spec, text)


@both
def test_what_is_forced_is_read_back(tokenizer: Tokenizer, name: str) -> None:
    text = FORMATS[name]("get_weather", city="Rome", unit="celsius", days=3)
    schemas = {"get_weather": SCHEMA}
    parser = OutputFormat("qwen3", name).parser(thinking=False, schemas=schemas)
    ((kind, tool, arguments),) = summary(events_of(parser, [text]))
    assert (kind, tool) == ("call", "get_weather")
    assert json.loads(arguments) == {"city": "Rome", "unit": "celsius", "days": 3}
