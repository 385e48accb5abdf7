"""Tool calls in Qwen's two formats: good, late, broken and cut, however the text comes."""

from __future__ import annotations

import json
from typing import Any

import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.server.parsing.events import ToolArguments, ToolEnd, ToolStart
from mlx_mtp.server.parsing.formats import OutputFormat
from tests.server.parsing.pieces import Make, events_of, places, same_however_cut, steady, summary

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "near": {"type": "array", "items": {"type": "string"}},
        "options": {"$ref": "#/$defs/options"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "level": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "anything": {},
        "note": {"type": ["string", "null"]},
    },
    "$defs": {"options": {"type": "object"}},
}
SCHEMAS = {"get_weather": WEATHER, "f": {}}


def maker(tools: str, **more: Any) -> Make:
    form = OutputFormat("qwen3", tools)
    return lambda: form.parser(thinking=False, schemas=SCHEMAS, **more)


HERMES, XML = maker("hermes"), maker("qwen3_coder")


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def xml(name: str, **values: str) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


HARMONY = "<|channel|>commentary to=functions.f<|message|>{"
ROME = '{"city": "Rome"}'
OPENED = '<tool_call>{"name": "f", "arguments": {"a": '
CALL = hermes("f", ROME)

HERMES_CASES: dict[str, tuple[str, list[Any]]] = {
    "one": (CALL, [("call", "f", ROME)]),
    "two": (f"{CALL}\n{CALL}\n", [("call", "f", ROME)] * 2),
    "no white space": (
        '<tool_call>{"name":"f","arguments":{"a":[1,{"b":"}"}]}}</tool_call>',
        [("call", "f", '{"a":[1,{"b":"}"}]}')],
    ),
    "text before": (f"I look.\n\n{CALL}", [("text", "I look."), ("call", "f", ROME)]),
    "text after": (f"{CALL}\nDone.", [("call", "f", ROME), ("text", "\nDone.")]),
    "after a think block": (
        f"<think>\nhm\n</think>\n\n{CALL}",
        [("think", "hm"), ("call", "f", ROME)],
    ),
    "arguments first": (
        f'<tool_call>{{"arguments": {ROME}, "name": "f"}}</tool_call>',
        [("call", "f", ROME)],
    ),
    "arguments as text": (
        f'<tool_call>{{"name": "f", "arguments": {json.dumps(ROME)}}}</tool_call>',
        [("call", "f", ROME)],
    ),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', [("call", "f", "{}")]),
    "null for arguments": (
        '<tool_call>{"name": "f", "arguments": null, "id": 3}</tool_call>',
        [("call", "f", "{}")],
    ),
    "parameters": ('<tool_call>{"name": "f", "parameters": {}}', [("call", "f", "{}")]),
    "a tag in a string": (
        hermes("f", '{"a": "</tool_call> <tool_call> \\" {"}'),
        [("call", "f", '{"a": "</tool_call> <tool_call> \\" {"}')],
    ),
    "a line break in a string": (hermes("f", '{"a": "x\ny"}'), [("call", "f", '{"a": "x\\ny"}')]),
    "a brace too many": (CALL.replace("}}", "}}}"), [("call", "f", ROME)]),
    "a brace too few": (CALL.replace("}}", "}"), [("call", "f", ROME)]),
    "a field after the arguments": (
        CALL.replace("}}", '}, "id": 5}'),
        [("call", "f", ROME)],
    ),
    "nonsense after the arguments": (
        CALL.replace("}}", "}, oops"),
        [("call", "f", ROME), ("text", ", oops\n</tool_call>")],
    ),
    "cut after its arguments": (CALL[: CALL.index("}}") + 1], [("call", "f", ROME)]),
    "no closing tag": (CALL.removesuffix("</tool_call>"), [("call", "f", ROME)]),
    "half a closing tag": (CALL.removesuffix("call>"), [("call", "f", ROME)]),
    "an unknown tool": (hermes("g.h", "{}"), [("call", "g.h", "{}")]),
    # Broken in one way or another: content, never lost.
    "no object": ("<tool_call>oops</tool_call>", [("text", "<tool_call>oops</tool_call>")]),
    "a mention": ("Use <tool_call> for it.", [("text", "Use <tool_call> for it.")]),
    "a mention, then a call": (
        f"`<tool_call>` is this: {CALL}",
        [("text", "`<tool_call>` is this:"), ("call", "f", ROME)],
    ),
    "two openers": (f"<tool_call>{CALL}", [("text", "<tool_call>"), ("call", "f", ROME)]),
    "no name": (
        '<tool_call>{"arguments": {}}</tool_call>',
        [("text", '<tool_call>{"arguments": {}}</tool_call>')],
    ),
    "a name that is none": (hermes("a b", "{}"), [("text", hermes("a b", "{}"))]),
    "a name with half a character": (
        hermes("\\ud800", "{}"),
        [("text", hermes("\\ud800", "{}"))],
    ),
    "a list of arguments": (hermes("f", "[1]"), [("text", hermes("f", "[1]"))]),
    "not JSON": (
        hermes("f", "{city: Rome}"),
        [
            ("broken", '<tool_call>\n{"name": "f", "arguments": {'),
            ("text", "city: Rome}}\n</tool_call>"),
        ],
    ),
    "cut in its tag": ("abc <tool_c", [("text", "abc <tool_c")]),
    "cut in its name": ('x <tool_call>{"name": "f', [("text", 'x <tool_call>{"name": "f')]),
    "cut in its arguments": (
        CALL[: CALL.index("Rome") + 2],
        [("cut", "f", '{"city": "Ro')],
    ),
    "cut in a number": (f"{OPENED}-1.5e", [("cut", "f", '{"a": -1.5e')]),
    "cut in a word": (f"{OPENED}tru", [("cut", "f", '{"a": tru')]),
    "cut in an escape": (f'{OPENED}"x\\ud83c\\u', [("cut", "f", '{"a": "x\\ud83c\\u')]),
    "an infinite number": (
        hermes("f", '{"a": Infinity}'),
        [
            ("broken", '<tool_call>\n{"name": "f", "arguments": {"a": '),
            ("text", "Infinity}}\n</tool_call>"),
        ],
    ),
}


@pytest.mark.parametrize(("text", "expected"), HERMES_CASES.values(), ids=HERMES_CASES)
def test_hermes(text: str, expected: list[Any]) -> None:
    assert summary(events_of(HERMES(), [text])) == expected
    assert summary(events_of(HERMES(), text)) == expected


def arguments(**values: Any) -> str:
    return json.dumps(values, ensure_ascii=False)


LONG = 'def f():\n    return "</parameter>"  # <b> & \\n\n'
XML_CASES: dict[str, tuple[str, list[Any]]] = {
    "one": (xml("get_weather", city="Rome"), [("call", "get_weather", ROME)]),
    "none": (xml("f"), [("call", "f", "{}")]),
    "two": (
        f"Both:\n{xml('f')}\n{xml('get_weather', city='Rome')}",
        [("text", "Both:"), ("call", "f", "{}"), ("call", "get_weather", ROME)],
    ),
    "types": (
        xml(
            "get_weather",
            city="5",
            days="5",
            exact="True",
            near='["a", "b"]',
            options="{'a': True, 'b': None}",
            unit="celsius",
            level="null",
            anything='{"x": 1}',
            note="null",
        ),
        [
            (
                "call",
                "get_weather",
                '{"city": "5", "days": 5, "exact": true, "near": ["a", "b"], '
                '"options": {"a": true, "b": null}, "unit": "celsius", "level": null, '
                '"anything": {"x": 1}, "note": null}',
            )
        ],
    ),
    "values that fit no type stay text": (
        xml("get_weather", days="many", near="a, b", level="high", exact="maybe", anything="5"),
        [
            (
                "call",
                "get_weather",
                arguments(days="many", near="a, b", level="high", exact="maybe", anything="5"),
            )
        ],
    ),
    "a whole number as 5.0": (
        xml("get_weather", days="5.0", level="5"),
        [("call", "get_weather", '{"days": 5, "level": 5}')],
    ),
    "a text of many lines, with tags in it": (
        xml("get_weather", city=LONG, days="1"),
        [("call", "get_weather", arguments(city=LONG, days=1))],
    ),
    "empty values": (
        "<tool_call><function=get_weather><parameter=city></parameter><parameter=note>\n"
        "</parameter></function></tool_call>",
        [("call", "get_weather", '{"city": "", "note": null}')],
    ),
    "in one line": (
        "<tool_call><function=get_weather><parameter=city>Rome</parameter></function></tool_call>",
        [("call", "get_weather", ROME)],
    ),
    "without its opening tag": (
        "Well.\n" + xml("get_weather", city="Rome").removeprefix("<tool_call>\n"),
        [("text", "Well."), ("call", "get_weather", ROME)],
    ),
    "without its closing tags": (
        xml("get_weather", city="Rome").removesuffix("</tool_call>"),
        [("call", "get_weather", ROME)],
    ),
    "a parameter left open": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</function>\n</tool_call>",
        [("call", "get_weather", ROME)],
    ),
    "a key in quotes and more": (
        xml("f", **{'a"b': "x"}),
        [("call", "f", '{"a\\"b": "x"}')],
    ),
    "a mention": ("Write <function=f or so>.", [("text", "Write <function=f or so>.")]),
    "an unknown tool without the tag": ("<function=g>", [("text", "<function=g>")]),
    "no function": ("<tool_call>\n{}", [("text", "<tool_call>\n{}")]),
    "text where a parameter belongs": (
        "<tool_call><function=f>oops</function></tool_call>",
        [("broken", "<tool_call><function=f>"), ("text", "oops</function></tool_call>")],
    ),
    "cut in a value": (
        "so <tool_call><function=f><parameter=a>\nxy",
        [("text", "so"), ("cut", "f", '{"a": "xy')],
    ),
    "cut after a value": (
        "<tool_call><function=f><parameter=a>\nxy\n</parameter>\n",
        [("cut", "f", '{"a": "xy"')],
    ),
    "cut before its parameters": ("<tool_call><function=f>", [("cut", "f", "{")]),
    "cut in a parameter's name": (
        "<tool_call><function=f><parameter=a>\nxy\n</parameter>\n<parameter=bc",
        [("cut", "f", '{"a": "xy", "bc')],
    ),
    "cut in its name": ("<tool_call><function=f", [("text", "<tool_call><function=f")]),
}


@pytest.mark.parametrize(("text", "expected"), XML_CASES.values(), ids=XML_CASES)
def test_qwen_xml(text: str, expected: list[Any]) -> None:
    assert summary(events_of(XML(), [text])) == expected
    assert summary(events_of(XML(), text)) == expected


CUT_VALUES: list[tuple[str, str, str]] = [
    ("city", "", '"'),
    ("city", "Ro", '"Ro'),
    ("city", "Ro\n", '"Ro\\n'),
    ("city", "a <", '"a <'),
    ("city", "a\n</para", '"a\\n</para'),
    ("city", "a\n</parameter>\n</fun", '"a"'),
    ("days", "1", "1"),
    ("days", "1\n</param", "1"),
    ("days", "1\n</parameter>", "1"),
    ("days", "one", '"one'),
    ("exact", "tr", "tr"),
    ("exact", "Tr", '"Tr'),
    ("near", '["a", "b', '["a", "b'),
    ("near", '["</par', '["</par'),
    ("near", "['a', 'b", "\"['a', 'b"),
    ("options", '{"a": 1}\n</', '{"a": 1}'),
    ("note", "nul", '"nul'),
    ("note", "", ""),
    ("level", "-", "-"),
    ("anything", "5", '"5'),
    ("anything", '{"x": [', '{"x": ['),
]


@pytest.mark.parametrize(("key", "written", "told"), CUT_VALUES)
def test_a_value_that_is_cut(key: str, written: str, told: str) -> None:
    text = f"<tool_call>\n<function=get_weather>\n<parameter={key}>\n{written}"
    for pieces in ([text], text):
        ((kind, name, found),) = summary(events_of(XML(), pieces))
        assert (kind, name) == ("cut", "get_weather")
        assert found == f'{{"{key}": {told}'


def test_arguments_come_in_pieces() -> None:
    for make, text in ((HERMES, CALL), (XML, xml("get_weather", city="Rome is far away"))):
        parser = make()
        pieces = [event for char in text for event in parser.feed(char)]
        assert isinstance(pieces[0], ToolStart)
        assert sum(isinstance(piece, ToolArguments) for piece in pieces) > 10


JSON_PIECES = st.sampled_from(
    [
        '"',
        "\\",
        "\\u12",
        "\\ud83c",
        "\\udf89",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        " ",
        "\n",
        "1",
        "-",
        "e",
        ".",
        "true",
        "nul",
        "x",
        '"a": ',
        "\x01",
    ]
)


@steady
@given(st.lists(JSON_PIECES, max_size=30).map("".join))
def test_what_is_told_of_arguments_always_begins_valid_json(text: str) -> None:
    call = f'<tool_call>{{"name": "f", "arguments": {{{text}}}}}'
    for parser, said in (
        (HERMES(), call),
        (OutputFormat("gpt_oss", "gpt_oss").parser(thinking=False, schemas={}), HARMONY + text),
    ):
        told = ""
        for event in events_of(parser, [said]):
            if isinstance(event, ToolArguments):
                told += event.text
                assert jiter.from_json(told.encode(), partial_mode=True) is not None
            elif isinstance(event, ToolEnd):
                assert isinstance(json.loads(told), dict)


def test_hostile_depths_and_numbers_break_a_call() -> None:
    for value in ("[" * 100_000, '{"a":' * 1000, "9" * 5000, "1e999"):
        said = hermes("f", f'{{"a": {value}}}')
        events = summary(events_of(HERMES(), [said]))
        assert {kind for kind, *_ in events} == {"broken", "text"}
        assert "".join(text for _, text in events) == said


def test_after_the_last_call_that_is_wanted_nothing_is() -> None:
    for make, text in (
        (maker("hermes", max_calls=1), f"a {CALL}\n{CALL} b"),
        (maker("qwen3_coder", max_calls=1), f"a {xml('f')}\n{xml('f')} b"),
    ):
        for pieces in ([text], text):
            parser = make()
            found = summary(events_of(parser, pieces))
            assert [kind for kind, *_ in found] == ["text", "call"]
            assert parser.done


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "<function=",
        "</function>",
        "<parameter=city>",
        "<parameter=x>",
        "</parameter>",
        '{"name": "f", "arguments": ',
        '{"a": 1}',
        "{",
        "}",
        '"',
        "\\",
        ",",
        ":",
        "1",
        "null",
        "<",
        "</",
        "\n",
        " ",
        "word",
        "é🎉",
    ]
)
texts = st.lists(st.one_of(PIECES, st.just(CALL), st.just(xml("f", x="1"))), max_size=14)


@steady
@given(texts.map("".join), places)
def test_what_comes_out_does_not_depend_on_the_pieces(text: str, at: list[int]) -> None:
    for make in (HERMES, XML, maker("hermes", max_calls=1), maker("qwen3_coder", max_calls=1)):
        same_however_cut(make, text, at)


@steady
@given(texts.map("".join))
def test_every_call_has_an_object_for_arguments_and_no_word_is_lost(text: str) -> None:
    for make in (HERMES, XML):
        events = summary(events_of(make(), [text]))
        for kind, *rest in events:
            if kind == "call":
                assert isinstance(json.loads(rest[1]), dict)
            if kind == "cut":
                # The beginning of an object, which no client can take for all of it.
                assert isinstance(jiter.from_json(rest[1].encode(), partial_mode=True), dict)
                with pytest.raises(ValueError, match=r"column \d"):
                    json.loads(rest[1])
        if not any(kind in ("call", "cut") for kind, *_ in events):
            told = "".join(text for _, text in events)
            assert "".join(told.split()) == "".join(text.split())


@steady
@given(st.text(), st.text())
def test_any_text_comes_back_from_a_string_parameter(city: str, note: str) -> None:
    for make, text in (
        (HERMES, hermes("f", json.dumps({"city": city, "note": note}))),
        (HERMES, hermes("f", json.dumps({"city": city, "note": note}, ensure_ascii=False))),
    ):
        ((_, _, found),) = summary(events_of(make(), text))
        assert json.loads(found) == {"city": city, "note": note}
    schema = {"properties": {"a": {"type": "string"}}}
    parser = OutputFormat("none", "qwen3_coder").parser(thinking=False, schemas={"f": schema})
    ((_, _, found),) = summary(events_of(parser, xml("f", a=city)))
    assert json.loads(found) == {"a": city}
