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
from tests.server.parsing.pieces import (
    Make,
    events_of,
    hermes,
    places,
    same_however_cut,
    steady,
    summary,
    xml,
)

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
SCHEMAS = {"get_weather": WEATHER, "f": {}, "two words": {}}


def maker(tools: str, **more: Any) -> Make:
    form = OutputFormat("qwen3", tools)
    return lambda: form.parser(thinking=False, schemas=SCHEMAS, **more)


HERMES, XML = maker("hermes"), maker("qwen3_coder")
ROME = '{"city": "Rome"}'
OPENED = '<tool_call>{"name": "f", "arguments": {"a": '
CALL = hermes("f", ROME)
BROKEN = '<tool_call>\n{"name": "f", "arguments": {'
DONE = ("call", "f", ROME)


def text(of: str) -> list[Any]:
    return [("text", of)]


CLOSED = "}}\n</tool_call>"
NONSENSE = ", x}\n</tool_call>"
TIGHT = '{"a":[1,{"b":"}"}]}'
TAGS = '{"a": "</tool_call> <tool_call> \\" {"}'
HERMES_CASES: dict[str, tuple[str, list[Any]]] = {
    "two": (f"I look.\n\n{CALL}\n{CALL}\n", [("text", "I look."), DONE, DONE]),
    "no white space": (f'<tool_call>{{"name":"f","arguments":{TIGHT}}}', [("call", "f", TIGHT)]),
    "text after": (f"{CALL}\nDone.", [DONE, ("text", "\nDone.")]),
    "after a think block": (f"<think>\nhm\n</think>\n\n{CALL}", [("think", "hm"), DONE]),
    "arguments first": (f'<tool_call>{{"arguments": {ROME}, "name": "f"}}</tool_call>', [DONE]),
    "arguments as text": (hermes("f", json.dumps(ROME)), [DONE]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', [("call", "f", "{}")]),
    "null for arguments": (hermes("f", "null"), [("call", "f", "{}")]),
    "an empty text for arguments": (hermes("f", '""'), [("call", "f", "{}")]),
    "parameters": ('<tool_call>{"name": "f", "parameters": {}}', [("call", "f", "{}")]),
    "tags in a string": (hermes("f", TAGS), [("call", "f", TAGS)]),
    "a line break in a string": (hermes("f", '{"a": "x\ny"}'), [("call", "f", '{"a": "x\\ny"}')]),
    "a brace too many": (CALL.replace("}}", "}}}"), [DONE]),
    "a brace too few": (CALL.replace("}}", "}"), [DONE]),
    "a field after the arguments": (CALL.replace("}}", '}, "id": 5}'), [DONE]),
    "arguments twice": (CALL.replace("}}", '}, "arguments": {}}'), [DONE]),
    "nonsense after the arguments": (CALL.replace("}}", "}, x}"), [DONE, ("text", NONSENSE)]),
    "cut after its arguments": (CALL[: CALL.index("}}") + 1], [DONE]),
    "half a closing tag": (CALL.removesuffix("call>"), [DONE]),
    "an unknown tool": (hermes("g.h", "{}"), [("call", "g.h", "{}")]),
    "an odd name": (hermes("two words", "{}"), [("call", "two words", "{}")]),
    "white space alone": (" \n", text(" \n")),
    # Broken in one way or another: content, never lost.
    "no object": ("<tool_call>oops</tool_call>", text("<tool_call>oops</tool_call>")),
    "a mention": ("Use <tool_call> for it.", text("Use <tool_call> for it.")),
    "a mention, then a call": (f"`<tool_call>`: {CALL}", [("text", "`<tool_call>`:"), DONE]),
    "two openers": (f"<tool_call>{CALL}", [("text", "<tool_call>"), DONE]),
    "no name": ('<tool_call>{"arguments": {}} x', text('<tool_call>{"arguments": {}} x')),
    "a name that is none": (hermes("a b", "{}"), text(hermes("a b", "{}"))),
    "a name with half a character": (hermes("\\ud800", "{}"), text(hermes("\\ud800", "{}"))),
    "a list of arguments": (hermes("f", "[1]"), text(hermes("f", "[1]"))),
    "not JSON": (hermes("f", "{a: 1}"), [("broken", BROKEN), ("text", "a: 1" + CLOSED)]),
    "a comma too many": (
        hermes("f", '{"a": 1,}'),
        [("broken", BROKEN + '"a": 1,'), ("text", CLOSED)],
    ),
    "an infinite number": (
        hermes("f", '{"a": Infinity}'),
        [("broken", BROKEN + '"a":'), ("text", " Infinity" + CLOSED)],
    ),
    "cut in its tag": ("abc <tool_c", text("abc <tool_c")),
    "cut in its name": ('x <tool_call>{"name": "f', text('x <tool_call>{"name": "f')),
    "cut in its arguments": (CALL[: CALL.index('me"}')], [("cut", "f", '{"city": "Ro')]),
    "cut in a number": (f"{OPENED}-1.5e", [("cut", "f", '{"a": -1.5e')]),
    "cut in a word": (f"{OPENED}tru", [("cut", "f", '{"a": tru')]),
    "cut in an escape": (f'{OPENED}"x\\ud83c\\u', [("cut", "f", '{"a": "x\\ud83c\\u')]),
}


WEATHER_DONE = ("call", "get_weather", ROME)
XML_CASES: dict[str, tuple[str, list[Any]]] = {
    "none": (xml("f"), [("call", "f", "{}")]),
    "two": (
        f"Both:\n{xml('f')}\n{xml('get_weather', city='Rome')}",
        [("text", "Both:"), ("call", "f", "{}"), WEATHER_DONE],
    ),
    "in one line": (
        "<tool_call><function=get_weather><parameter=city>Rome</parameter></function></tool_call>",
        [WEATHER_DONE],
    ),
    "without its opening tag": (
        "Well.\n" + xml("get_weather", city="Rome").removeprefix("<tool_call>\n"),
        [("text", "Well."), WEATHER_DONE],
    ),
    "without its closing tag": (
        xml("get_weather", city="Rome").removesuffix("</tool_call>"),
        [WEATHER_DONE],
    ),
    "a parameter left open": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</function>\n</tool_call>",
        [WEATHER_DONE],
    ),
    "a key in quotes and more": (xml("f", **{'a"b': "x"}), [("call", "f", '{"a\\"b": "x"}')]),
    "a mention": ("Write <function=f or so>.", text("Write <function=f or so>.")),
    "an unknown tool without the tag": ("<function=g>", text("<function=g>")),
    "no function": ("<tool_call>\n{}", text("<tool_call>\n{}")),
    "two openers": (f"<tool_call>{xml('f')}", [("text", "<tool_call>"), ("call", "f", "{}")]),
    "text where a parameter belongs": (
        "<tool_call><function=f>oops</function></tool_call>",
        [("broken", "<tool_call><function=f>"), ("text", "oops</function></tool_call>")],
    ),
    "cut in a value": (
        "so <tool_call><function=f><parameter=a>\nxy",
        [("text", "so"), ("cut", "f", '{"a": "xy')],
    ),
    "cut before its parameters": ("<tool_call><function=f>", [("cut", "f", "{")]),
    "cut in a parameter's name": (
        "<tool_call><function=f><parameter=a>\nxy\n</parameter>\n<parameter=bc",
        [("cut", "f", '{"a": "xy", "bc')],
    ),
    "cut in its name": ("<tool_call><function=f", text("<tool_call><function=f")),
}


@pytest.mark.parametrize(
    ("make", "said", "expected"),
    [
        *(pytest.param(HERMES, *case, id=name) for name, case in HERMES_CASES.items()),
        *(pytest.param(XML, *case, id=f"xml: {name}") for name, case in XML_CASES.items()),
    ],
)
def test_calls(make: Make, said: str, expected: list[Any]) -> None:
    assert summary(events_of(make(), [said])) == expected
    assert summary(events_of(make(), said)) == expected


LONG = 'def f():\n    return "</parameter>"  # <b> & \\n\n'
READ_VALUES = {
    "city": [("5", '"5"'), ("", '""'), (LONG, json.dumps(LONG))],
    "days": [("5", "5"), ("5.0", "5"), ("5.5", '"5.5"')],
    "exact": [("True", "true"), ("maybe", '"maybe"')],
    "near": [('["a", "b"]', '["a", "b"]'), ("a, b", '"a, b"')],
    "options": [("{'a': True, 'b': None}", '{"a": true, "b": null}')],
    "unit": [("celsius", '"celsius"')],
    "level": [("null", "null"), ("5", "5"), ("high", '"high"')],
    "anything": [('{"x": 1}', '{"x": 1}'), ("5", '"5"')],
    "note": [("null", "null"), ("", "null"), ("x", '"x"')],
}
CUT_VALUES = {
    "city": [("", '"'), ("Ro\n", '"Ro\\n'), ("a <", '"a <'), ("a\n</para", '"a\\n</para')],
    "days": [("1\n</param", "1"), ("1\n</parameter>", "1"), ("one", '"one'), ("5,", '"5,')],
    "exact": [("tr", "tr"), ("Tr", '"Tr'), ("true\n</parameter>\n</fun", "true")],
    "near": [('["a", "b', '["a", "b'), ('["</par', '["</par'), ("['a', 'b", "\"['a', 'b")],
    "options": [('{"a": 1}\n</', '{"a": 1}')],
    "note": [("nul", '"nul'), ("", "")],
    "level": [("-", "-")],
    "anything": [("5", '"5'), ('{"x": [', '{"x": [')],
}
END = "\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("key", READ_VALUES)
def test_values_of_tags(key: str) -> None:
    read = [(written + END, "call", value + "}") for written, value in READ_VALUES[key]]
    cut = [(written, "cut", value) for written, value in CUT_VALUES.get(key, [])]
    for written, kind, value in read + cut:
        said = f"<tool_call>\n<function=get_weather>\n<parameter={key}>\n{written}"
        for pieces in ([said], said):
            (found,) = summary(events_of(XML(), pieces))
            assert found == (kind, "get_weather", f'{{"{key}": {value}')


def test_arguments_come_in_pieces() -> None:
    for make, said in ((HERMES, CALL), (XML, xml("get_weather", city="Rome is far away"))):
        parser = make()
        pieces = [event for char in said for event in parser.feed(char)]
        assert isinstance(pieces[0], ToolStart)
        assert sum(isinstance(piece, ToolArguments) for piece in pieces) > 10


JSON_PIECES = ['"', "\\", "\\u12", "\\ud83c", "\\udf89", "{", "}", "[", "]", ",", ":", " ", "\n"]
JSON_PIECES += ["1", "-", "e", ".", "true", "nul", "x", '"a": ', "\x01"]


@steady
@given(st.lists(st.sampled_from(JSON_PIECES), max_size=30).map("".join))
def test_what_is_emitted_of_arguments_always_begins_valid_json(written: str) -> None:
    harmony = OutputFormat("gpt_oss", "gpt_oss").parser(thinking=False, schemas={})
    for parser, said in (
        (HERMES(), f'<tool_call>{{"name": "f", "arguments": {{{written}}}}}'),
        (harmony, "<|channel|>commentary to=functions.f<|message|>{" + written),
    ):
        emitted = ""
        for event in events_of(parser, [said]):
            if isinstance(event, ToolArguments):
                emitted += event.text
                assert jiter.from_json(emitted.encode(), partial_mode=True) is not None
            elif isinstance(event, ToolEnd):
                assert isinstance(json.loads(emitted), dict)


def test_hostile_depths_and_numbers_break_a_call() -> None:
    for value in ("[" * 100_000, '{"a":' * 1000, "9" * 5000, "1e999"):
        said = hermes("f", f'{{"a": {value}}}')
        events = summary(events_of(HERMES(), [said]))
        assert {kind for kind, *_ in events} == {"broken", "text"}
        assert "".join(part for _, part in events) == said


def test_after_the_last_call_that_is_wanted_nothing_is() -> None:
    for format_, said in (("hermes", f"a {CALL}\n{CALL} b"), ("qwen3_coder", f"a {xml('f')} b")):
        for pieces in ([said], said):
            parser = maker(format_, max_calls=1)()
            found = summary(events_of(parser, pieces))
            assert [kind for kind, *_ in found] == ["text", "call"]
            assert parser.done


PIECES = ["<tool_call>", "</tool_call>", "<function=f>", "<function=", "</function>", "null", "é🎉"]
PIECES += ["<parameter=city>", "<parameter=x>", "</parameter>", '{"name": "f", "arguments": ']
PIECES += ['{"a": 1}', "{", "}", '"', "\\", ",", ":", "1", "<", "</", "\n", " ", "word", CALL]
texts = st.lists(st.sampled_from([*PIECES, xml("f", x="1")]), max_size=14).map("".join)


@steady
@given(texts, places)
def test_any_text_however_split(said: str, at: list[int]) -> None:
    """What comes out does not depend on the pieces; a call has an object; no word is lost."""
    for format_ in ("hermes", "qwen3_coder"):
        same_however_cut(maker(format_), said, at)
        same_however_cut(maker(format_, max_calls=1), said, at)
        events = summary(events_of(maker(format_)(), [said]))
        for kind, *rest in events:
            if kind == "call":
                assert isinstance(json.loads(rest[1]), dict)
            if kind == "cut":
                # The beginning of an object, which no client can take for all of it.
                assert isinstance(jiter.from_json(rest[1].encode(), partial_mode=True), dict)
                with pytest.raises(ValueError, match=r"column \d"):
                    json.loads(rest[1])
        if not any(kind in ("call", "cut") for kind, *_ in events):
            assert "".join("".join(part for _, part in events).split()) == "".join(said.split())


@steady
@given(st.text(), st.text())
def test_any_text_comes_back_from_a_string_parameter(city: str, note: str) -> None:
    for ascii_only in (True, False):
        written = json.dumps({"city": city, "note": note}, ensure_ascii=ascii_only)
        ((_, _, found),) = summary(events_of(HERMES(), hermes("f", written)))
        assert json.loads(found) == {"city": city, "note": note}
    ((_, _, found),) = summary(events_of(XML(), xml("get_weather", city=city)))
    assert json.loads(found) == {"city": city}
