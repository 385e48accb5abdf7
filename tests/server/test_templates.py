"""Whole chats through templates like Qwen's, rendered and parsed again."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_mtp.config import ServerConfig
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.generation.inputs import Conversation, Message, Tool, ToolCall
from mlx_mtp.server.generation.prompting import Prompter
from mlx_mtp.text.parsing.formats import OutputFormat
from tests.server.conftest import tokenizer_with
from tests.server.parsing.pieces import events_of, hermes, summary, xml
from tests.support.in_process import IGNORED, in_process
from tests.support.wire_help import ARGUMENTS, CHAT, WEATHER, ask, chat_body, events, joined, saying

_HEAD = """
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools or system %}
  {{- '<|im_start|>system\\n' + system }}
  {%- if tools %}
    {{- '\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\n' + how }}
  {%- endif %}
  {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
  {%- if m.role == 'system' and not loop.first %}
    {{- raise_exception('A system message comes first or not at all.') }}
  {%- elif m.role == 'user' %}
    {{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
  {%- elif m.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
  {%- elif m.role == 'assistant' %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if m.reasoning_content %}
      {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
      {%- if not loop.first or m.content %}{{- '\\n' }}{%- endif %}
"""
_TAIL = """
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
"""
_JSON_CALL = """
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
"""
_XML_CALL = """
      {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
      {%- for name, value in call.function.arguments | items %}
        {{- '<parameter=' + name + '>\\n' }}
        {%- if value is string %}{{- value }}{%- else %}{{- value | tojson }}{%- endif %}
        {{- '\\n</parameter>\\n' }}
      {%- endfor %}
      {{- '</function>\\n</tool_call>' }}
"""
_ANSWER = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
_THINKS = (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"
)
_JSON_HOW = '{%- set how = \'<tool_call>{"name": ..., "arguments": ...}</tool_call>\' %}'
_XML_HOW = "{%- set how = '<tool_call><function=...><parameter=...>' %}"

CODER = _XML_HOW + _HEAD + _XML_CALL + _TAIL + _ANSWER
NEXT = _JSON_HOW + _HEAD + _JSON_CALL + _TAIL + _ANSWER
TEMPLATES = {
    "next-instruct": NEXT,
    # Thinking can't be switched off.
    "next-thinking": NEXT.replace(
        "assistant\\n' }}{%- endif", "assistant\\n<think>\\n' }}{%- endif"
    ),
    "coder": CODER,
    # Thinking is on, and can be switched off.
    "3.5": CODER.replace(_ANSWER, _THINKS),
}
"""Templates with the structures of Qwen's published models, rewritten and shortened."""
XML = ("coder", "3.5")
THINKING = ("next-thinking", "3.5")
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "sure": {"type": "boolean"},
        "list": {"type": "array"},
        "map": {"type": "object"},
        "note": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
}


@pytest.fixture(scope="module", params=TEMPLATES)
def prompter(request: pytest.FixtureRequest) -> Prompter:
    tokenizer = tokenizer_with(TEMPLATES[request.param])
    return Prompter(tokenizer, ServerConfig("tiny"))


def test_agents_chats_are_rendered(prompter: Prompter) -> None:
    """System messages within a chat, and calls without arguments, which such templates refuse."""
    chat = Conversation(
        [
            Message("system", "Be kind."),
            Message("system", "Be brief."),
            Message("user", "Do it."),
            Message("system", "Remember."),
            Message("assistant", tool_calls=(ToolCall("f", ""),)),
            Message("tool", "done"),
            Message("system", "Go on."),
        ],
        tools=[Tool("f")],
    )
    text, _ = prompter.render(chat)
    assert text.startswith("<|im_start|>system\nBe kind.\n\nBe brief.\n# Tools")
    assert "<|im_start|>user\nDo it.\n\nRemember.<|im_end|>" in text
    assert "<|im_start|>user\nGo on.<|im_end|>" in text


plain = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20).filter(
    lambda text: "</parameter>" not in text and "</function>" not in text
)
# hypothesis tries strings of the code under test, and these would have a meaning in answers.
TAGS = ("<think>", "</think>", "<tool_call>")
prose = plain.filter(lambda text: not any(tag in text for tag in TAGS))
scalars = st.one_of(st.integers(), st.booleans(), st.none(), plain)
values = st.fixed_dictionaries(
    {},
    optional={
        "text": plain,
        "count": st.integers(-(10**12), 10**12),
        "ratio": st.floats(-1e9, 1e9),
        "sure": st.booleans(),
        "list": st.lists(scalars, max_size=3),
        "map": st.dictionaries(plain, scalars, max_size=3),
        "note": st.one_of(st.integers(), st.none()),
    },
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50
)
@given(st.lists(values, min_size=1, max_size=3), prose, prose)
def test_what_a_template_writes_is_read_back(
    prompter: Prompter, calls: list[dict[str, Any]], said: str, thought: str
) -> None:
    said, thought = said.strip(), thought.strip()
    message = Message(
        "assistant",
        said,
        reasoning=thought or None,
        tool_calls=tuple(ToolCall("f", json.dumps(call)) for call in calls),
    )
    text, _ = prompter.render(Conversation([Message("user", "hi"), message]))
    turn = text.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    parser = prompter.output_format.parser(thinking=False, schemas={"f": SCHEMA})
    found = summary(events_of(parser, [turn]))
    expected: list[Any] = [("think", thought)] if thought else []
    expected += [("text", said)] if said else []
    got = [part for part in found if part[0] != "call"]
    assert got == expected
    assert [json.loads(part[2]) for part in found if part[0] == "call"] == calls


TEXTS = {"hermes": hermes("get_weather", ARGUMENTS), "qwen3_coder": xml("get_weather", city="Rome")}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_over_http(name: str) -> None:
    tokenizer = tokenizer_with(TEMPLATES[name])
    form = OutputFormat.of_template(tokenizer.template)
    assert form.tools == ("qwen3_coder" if name in XML else "hermes")
    thought = "I look.\n</think>\n\n" if name in THINKING else ""
    engine = saying(tokenizer, thought + TEXTS[form.tools])
    with in_process(engine, tokenizer=tokenizer) as client:
        message = joined(events(client, tools=[WEATHER]))
        assert message["reasoning_content"] == ("I look." if thought else "")
        assert message["tool_calls"][0]["arguments"] == ARGUMENTS
        ask(client, tools=[WEATHER], tool_choice="required")
        grammar = engine.submitted[-1].sampling.grammar
        assert grammar.free_until == ("</think>" if thought else None)
        assert ("<parameter=city>" in grammar.value) == (name in XML)
        if name == "3.5":
            ask(client, chat_template_kwargs={"thinking_budget": 9})
            budget = engine.submitted[-1].sampling.grammar
            assert budget == GrammarSpec("free", free_until="</think>", free_tokens=9)
        elif name != "next-thinking":
            ask(client, chat_template_kwargs={"enable_thinking": False})
            asked = chat_body(chat_template_kwargs={"enable_thinking": True})
            answered = client.post(CHAT, json=asked)
            assert answered.headers[IGNORED] == "chat_template_kwargs.enable_thinking"


def test_half_a_call_is_rendered(prompter: Prompter) -> None:
    """The arguments are rendered as they are, or as a JSON string."""
    for arguments in ('{"city": "Ro', "{", '{"city": "x\\ud83c', "not json", "[1]"):
        call = Message("assistant", tool_calls=(ToolCall("f", arguments),))
        text, _ = prompter.render(Conversation([Message("user", "hi"), call]))
        assert arguments in text or json.dumps(arguments)[1:-1] in text
