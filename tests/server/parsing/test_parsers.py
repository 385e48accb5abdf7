"""Answers in Qwen's two formats and in gpt-oss's: valid, broken and cut, split in any way."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import jiter
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_mtp.text.parsing.answer import AnswerParser
from mlx_mtp.text.parsing.events import Text, ToolArguments, ToolCut, ToolEnd
from mlx_mtp.text.parsing.formats import OutputFormat
from mlx_mtp.text.parsing.harmony import MARKERS
from tests.server.parsing.pieces import events_of, hermes, summary, xml

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
Make = Callable[..., AnswerParser]


def maker(name: str) -> Make:
    form = OutputFormat("gpt_oss" if name == "gpt_oss" else "qwen3", name)

    def make(*, opened: bool = False, tools: bool = True, **more: Any) -> AnswerParser:
        return form.parser(thinking=opened, schemas=SCHEMAS if tools else None, **more)

    return make


FORMATS = {name: maker(name) for name in ("hermes", "qwen3_coder", "gpt_oss")}
HERMES, XML, HARMONY = FORMATS.values()


def think(thought: str) -> tuple[str, str]:
    return "think", thought


def text(of: str) -> tuple[str, str]:
    return "text", of


THINK_CASES: list[tuple[str, bool, list[Any]]] = [
    # the text, whether the prompt opened the block, what comes out
    ("", False, []),
    ("<think>\nso\n</think>\n\nyes", False, [think("so"), text("yes")]),
    ("\n\n<think>so</think>yes", False, [think("so"), text("yes")]),
    ("a\n\nb\n</think>\n\n c\n", True, [think("a\n\nb"), text(" c\n")]),
    ("<think>\n\n</think>\n\nyes", False, [text("yes")]),
    ("cut </thi", True, [think("cut </thi")]),
    ("a < b</ think></think>", True, [think("a < b</ think>")]),
    ("<thinking>x", False, [text("<thinking>x")]),
    ("no <think>x</think>", False, [text("no <think>x</think>")]),
    ("a</think>b</think>c", True, [think("a"), text("b</think>c")]),
]
ROME = '{"city": "Rome"}'
CALL, DONE = hermes("f", ROME), ("call", "f", ROME)
EMPTY = ("call", "f", "{}")
OPENED = '<tool_call>{"name": "f", "arguments": {"a": '
CLOSED = "}}\n</tool_call>"
TIGHT = '{"a":[1,{"b":"}"}]}'
TAGS = '{"a": "</tool_call> <tool_call> \\" {"}'
HERMES_CASES: list[tuple[str, list[Any]]] = [
    (f"I look.\n\n{CALL}\n{CALL}\n", [text("I look."), DONE, DONE]),
    (f'<tool_call>{{"name":"f","arguments":{TIGHT}}}', [("call", "f", TIGHT)]),
    (f"{CALL}\nDone.", [DONE, text("\nDone.")]),
    (f'<tool_call>{{"arguments": {ROME}, "name": "f"}}</tool_call>', [DONE]),
    (hermes("f", json.dumps(ROME)), [DONE]),
    (hermes("f", "null"), [EMPTY]),
    (hermes("f", '""'), [EMPTY]),
    ('<tool_call>{"name": "f", "parameters": {}}', [EMPTY]),
    (hermes("f", TAGS), [("call", "f", TAGS)]),
    (hermes("f", '{"a": "x\ny"}'), [("call", "f", '{"a": "x\\ny"}')]),
    # Whatever follows the arguments, the call is whole.
    (CALL.replace("}}", "}}}"), [DONE]),
    (CALL.replace("}}", "}"), [DONE]),
    (CALL.replace("}}", '}, "id": 5, "x": "' + "<" * 1000 + '"}'), [DONE]),
    (CALL.replace("}}", '}, "arguments": {}}'), [DONE]),
    (CALL.replace("}}", "}, x}"), [DONE, text(", x}\n</tool_call>")]),
    (CALL[: CALL.index("}}") + 1], [DONE]),
    # Broken calls become content; nothing is lost.
    ("Use <tool_call> for it.", [text("Use <tool_call> for it.")]),
    (f"`<tool_call>`: {CALL}", [text("`<tool_call>`:"), DONE]),
    (f"<tool_call>{CALL}", [text("<tool_call>"), DONE]),
    ('<tool_call>{"arguments": {}} x', [text('<tool_call>{"arguments": {}} x')]),
    (hermes("a b", "{}"), [text(hermes("a b", "{}"))]),
    (hermes("\\ud800", "{}"), [text(hermes("\\ud800", "{}"))]),
    (hermes("f", "[1]"), [text(hermes("f", "[1]"))]),
    # A call that has begun stays a call, unfinished.
    (hermes("f", '{"a": 1 2}'), [("cut", "f", '{"a": 1'), text("2" + CLOSED)]),
    ('x <tool_call>{"name": "f', [text('x <tool_call>{"name": "f')]),
    (CALL[: CALL.index('me"}')], [("cut", "f", '{"city": "Ro')]),
    (f"{OPENED}-1.5e", [("cut", "f", '{"a": -1.5e')]),
    (f'{OPENED}"x\\ud83c\\u', [("cut", "f", '{"a": "x\\ud83c\\u')]),
]
FUNCTION = "<tool_call><function=f>"
PARAMETER = f"{FUNCTION}<parameter=a>\nxy"
WEATHER_CALL, WEATHER_DONE = xml("get_weather", city="Rome"), ("call", "get_weather", ROME)
XML_CASES: list[tuple[str, list[Any]]] = [
    (f"Both:\n{xml('f')}\n{WEATHER_CALL}", [text("Both:"), EMPTY, WEATHER_DONE]),
    (WEATHER_CALL.replace("\n", ""), [WEATHER_DONE]),
    (f"Well.\n{WEATHER_CALL.removeprefix('<tool_call>')}", [text("Well."), WEATHER_DONE]),
    (WEATHER_CALL.removesuffix("</tool_call>"), [WEATHER_DONE]),
    (WEATHER_CALL.replace("</parameter>\n", ""), [WEATHER_DONE]),
    (xml("f", **{'a"b': "x"}), [("call", "f", '{"a\\"b": "x"}')]),
    ("Write <function=f or so>.", [text("Write <function=f or so>.")]),
    ("<tool_call>\n{}", [text("<tool_call>\n{}")]),
    (f"{FUNCTION}oops</function>", [text(f"{FUNCTION}oops</function>")]),
    (f"so {PARAMETER}", [text("so"), ("cut", "f", '{"a": "xy')]),
    (f"{PARAMETER}\n</parameter>\n<parameter=bc", [("cut", "f", '{"a": "xy", "bc')]),
]
THOUGHT = "<|channel|>analysis<|message|>Let me see.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>Hello <b>!"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
ONE, ONE_DONE = TO_F + '{"a": 1}', ("call", "f", '{"a": 1}')
FIRST = "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}<|call|>"
HARMONY_CASES: list[tuple[str, list[Any]]] = [
    (FINAL + "<|return|>", [text("Hello <b>!")]),
    (THOUGHT + NEXT + FINAL, [think("Let me see."), text("Hello <b>!")]),
    (THOUGHT + NEXT + ONE, [think("Let me see."), ONE_DONE]),
    (FIRST, [EMPTY]),
    (f"{ONE}<|call|>{NEXT}{ONE}  <|call|>", [ONE_DONE, ONE_DONE]),
    (f"{ONE}  so it is", [ONE_DONE, text("so it is")]),
    (f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{ONE}", [text("I look."), ONE_DONE]),
    (f"{THOUGHT}{NEXT}<|c", [think("Let me see."), text(NEXT + "<|c")]),
    (ONE[:-1], [("cut", "f", '{"a": 1')]),
    (ONE.replace(": 1", " 1") + "<|call|>", [("cut", "f", '{"a" '), text("1}")]),
    # A marker within a call breaks the call, even if it ends nothing.
    (TO_F + '{"<|end|>x', [("cut", "f", '{"'), text("x")]),
    (TO_F + '{"<|message|><|call|>', [("cut", "f", '{"<|message|>')]),
]
IN_BLOCK = "I should call it: <tool_call> first."


@pytest.mark.parametrize(
    ("make", "fields", "said", "expected"),
    [
        *((HERMES, {"opened": o, "tools": False}, said, out) for said, o, out in THINK_CASES),
        *((HERMES, {}, *case) for case in HERMES_CASES),
        *((XML, {}, *case) for case in XML_CASES),
        *((HARMONY, {}, *case) for case in HARMONY_CASES),
        (HARMONY, {"tools": False}, ONE, [text(ONE)]),
        (HERMES, {"opened": True}, f"{IN_BLOCK}\n{CALL}", [think(IN_BLOCK), DONE]),
        (HERMES, {"opened": True, "tools": False}, IN_BLOCK + CALL, [think(IN_BLOCK + CALL)]),
        (HERMES, {"max_calls": 1}, f"a {CALL}\n{CALL} b", [text("a"), DONE]),
        (XML, {"max_calls": 1}, f"a {xml('f')} b", [text("a"), EMPTY]),
        (HARMONY, {"max_calls": 1}, f"{ONE}<|call|>{NEXT}{ONE}<|call|>{NEXT}{FINAL}", [ONE_DONE]),
    ],
)
def test_answers(make: Make, fields: dict[str, Any], said: str, expected: list[Any]) -> None:
    for pieces in ([said], said):
        parser = make(**fields)
        assert summary(events_of(parser, pieces)) == expected
        assert parser.done == ("max_calls" in fields)


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
    "near": [('["a", "b', '["a", "b'), ('["</par', '["'), ("['a', 'b", '["a", "b')],
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
            (found,) = summary(events_of(XML(), pieces, cut=kind == "cut"))
            assert found == (kind, "get_weather", f'{{"{key}": {value}')


def test_arguments_come_in_pieces() -> None:
    for make, said in ((HERMES, CALL), (XML, xml("get_weather", city="Rome is far away"))):
        parser = make()
        pieces = [event for char in said for event in parser.feed(char)]
        assert sum(isinstance(piece, ToolArguments) for piece in pieces) > 10


def test_hostile_depths_and_numbers_break_a_call() -> None:
    for value in ("[" * 100_000, '{"a":' * 1000, "9" * 5000, "1e999"):
        said = hermes("f", f'{{"a": {value}}}')
        *_, cut, text = events_of(HERMES(), [said])
        assert isinstance(cut, ToolCut) and isinstance(text, Text)
        assert cut.text + text.text == said


steady = settings(deadline=None, max_examples=200)
JSON_PIECES = ['"', "\\", "\\u12", "\\ud83c", "\\udf89", "{", "}", "[", "]", ",", ":", " ", "\n"]
JSON_PIECES += ["1", "-", "e", ".", "true", "nul", "x", '"a": ', "\x01"]
PIECES = ["<tool_call>", "</tool_call>", "<function=f>", "<function=", "</function>", "null", "é🎉"]
PIECES += ["<parameter=city>", "<parameter=x>", "</parameter>", '{"name": "f", "arguments": ']
PIECES += ['{"a": 1}', "{", "}", '"', "\\", ",", ":", "1", "<", "</", "\n", " ", "word", CALL]
PIECES += [xml("f", x="1"), "<think>", "</think>", "</th"]
HARMONY_PIECES = [*MARKERS, "analysis", "final", "commentary", " to=functions.f", "{}", '{"', "<"]


def texts(pieces: list[str], most: int) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(pieces), max_size=most).map("".join)


@steady
@given(texts(JSON_PIECES, 30))
def test_what_is_emitted_of_arguments_always_begins_valid_json(written: str) -> None:
    for parser, said in (
        (HERMES(), f'<tool_call>{{"name": "f", "arguments": {{{written}}}}}'),
        (HARMONY(), "<|channel|>commentary to=functions.f<|message|>{" + written),
    ):
        emitted = ""
        for event in events_of(parser, [said]):
            if isinstance(event, ToolArguments):
                emitted += event.text
                assert jiter.from_json(emitted.encode(), partial_mode=True) is not None
            elif isinstance(event, ToolEnd):
                assert isinstance(json.loads(emitted), dict)


def words(of: str) -> str:
    return "".join(of.split())


@steady
@given(
    st.one_of(texts(PIECES, 14), texts([*HARMONY_PIECES, "  "], 20)),
    st.fixed_dictionaries(
        {"opened": st.booleans(), "tools": st.booleans(), "max_calls": st.sampled_from([None, 1])}
    ),
    st.lists(st.integers(0, 10_000), max_size=12),
)
def test_any_text_however_split(said: str, fields: dict[str, Any], at: list[int]) -> None:
    """The events don't depend on the split; a call has an object; no word is lost."""
    bounds = [0, *sorted(place % (len(said) + 1) for place in at), len(said)]
    for name, make in FORMATS.items():
        whole = events_of(make(**fields), [said])
        assert events_of(make(**fields), said) == whole
        pieces = [said[a:b] for a, b in itertools.pairwise(bounds)]
        assert events_of(make(**fields), pieces) == whole
        events = summary(whole)
        for kind, *rest in events:
            if kind == "call":
                assert isinstance(json.loads(rest[1]), dict)
            if kind == "cut":
                # An incomplete object, or nothing, so that no client takes it for the whole.
                begun = (rest[1] or "{").encode()
                assert isinstance(jiter.from_json(begun, partial_mode=True), dict)
                with pytest.raises(ValueError, match=r"column \d"):
                    json.loads(rest[1])
        if name != "gpt_oss" and not any(kind in ("call", "cut") for kind, *_ in events):
            bare = words(said)
            possible = {bare, bare.replace("<think>", "", 1)}
            possible |= {each.replace("</think>", "", 1) for each in possible}
            assert words("".join(part for _, part in events)) in possible


@steady
@given(st.text(), st.text())
@example("</toolcall", "</param>")
def test_any_text_comes_back_from_a_string_parameter(city: str, note: str) -> None:
    for ascii_only in (True, False):
        written = json.dumps({"city": city, "note": note}, ensure_ascii=ascii_only)
        ((_, _, found),) = summary(events_of(HERMES(), hermes("f", written)))
        assert json.loads(found) == {"city": city, "note": note}
    for text in (city, note):
        ((_, _, found),) = summary(events_of(XML(), xml("get_weather", city=text)))
        assert json.loads(found) == {"city": text}
