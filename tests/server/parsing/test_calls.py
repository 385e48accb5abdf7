"""Calls that are slightly wrong, part of reasoning or only shown: how they are parsed."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jiter
import pytest

from mlx_mtp.text.parsing.formats import OutputFormat
from tests.server.parsing.pieces import events_of, hermes, summary, xml
from tests.support.quick import full

STRING = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "write_file": {
        "properties": {"path": STRING, "content": STRING},
        "required": ["path", "content"],
    },
    "list_files": {"properties": {}},
    "free": {},
    "put": {
        "properties": {
            "n": {"type": "integer"},
            "items": {"type": "array"},
            "obj": {"type": "object"},
        }
    },
}
WRITE, LIST = xml("write_file", path="a", content="b"), xml("list_files")
JSON_WRITE = hermes("write_file", '{"path": "a", "content": "b"}')
WROTE = ("call", "write_file", '{"path": "a", "content": "b"}')
LISTED = ("call", "list_files", "{}")
P, F, C = "</parameter>\n", "</function>\n", "</tool_call>"
OPEN_WRITE = WRITE[: WRITE.index(f"\n{P}{F}")]  # up to the end of the last value
BARE = WRITE.removeprefix("<tool_call>\n").removesuffix(f"\n{C}")


def text(of: str) -> tuple[str, str]:
    return "text", of


def think(of: str) -> tuple[str, str]:
    return "think", of


def wrote(content: str) -> tuple[str, str, str]:
    return "call", "write_file", json.dumps({"path": "a", "content": content}, ensure_ascii=False)


def free(arguments: str) -> tuple[str, str, str]:
    return "call", "free", arguments


def cut(name: str, arguments: str) -> tuple[str, str, str]:
    return "cut", name, arguments


def put(key: str, value: str) -> str:
    return f"<tool_call>\n<function=put>\n<parameter={key}>\n{value}\n{P}{F}{C}"


NAMELESS = f"<tool_call>\n<function=free>\n<parameter=\necho hi\n{P}{F}{C}"
SHOWN = f"To list:\n\n```xml\n{LIST}\n```\n\nThat is all."
THOUGHT = f"I could call:\n{LIST}\nBut writing is better."
EXAMPLE = f"Doc:\n{xml('write_file', path='p', content='c')}\nend"
INNER = f"{OPEN_WRITE}\n<tool_call>\n<function=free>\n<parameter=a>\nx\n"
Answers = dict[str, tuple[str, list[Any]]]
REPORTED: Answers = {
    "1 no </function>": (WRITE.replace(F, "") + f"\n{LIST}", [WROTE, LISTED]),
    "2 no </function>, text": (WRITE.replace(F, "") + "\nDone.", [WROTE, text("\nDone.")]),
    "3 no </parameter>": (WRITE.replace(f"a\n{P}", "a\n"), [WROTE]),
    "4 thought of": (f"<think>{THOUGHT}\n</think>\n\n{WRITE}", [think(THOUGHT), WROTE]),
    "5 a tag in prose": (
        "Write `<function=list_files>` to call it.",
        [text("Write `<function=list_files>` to call it.")],
    ),
    "6 no name": (NAMELESS, [text(NAMELESS)]),
    "7 JSON": (JSON_WRITE, [WROTE]),
    "7 JSON in a function": (
        f'<tool_call>\n<function=write_file>\n{{"path": "a", "content": "b"}}\n{F}{C}',
        [WROTE],
    ),
    "8 in a fence": (SHOWN, [text(SHOWN)]),
}
CLOSING: Answers = {
    "no </tool_call>": (WRITE.replace(C, ""), [WROTE]),
    "no </tool_call>, a call": (WRITE.replace(C, "") + LIST, [WROTE, LISTED]),
    "no </tool_call>, text": (WRITE.replace(C, "") + "Done.", [WROTE, text("\nDone.")]),
    "no last </parameter>": (f"{OPEN_WRITE}\n{F}{C}", [WROTE]),
    "no </parameter> at all": (WRITE.replace(P, ""), [WROTE]),
    "no </parameter>, </function>": (f"{OPEN_WRITE}\n{C}", [WROTE]),
    "only </parameter>": (f"{OPEN_WRITE}\n{P}", [WROTE]),
    "only </parameter>, a call": (f"{OPEN_WRITE}\n{P}{LIST}", [WROTE, LISTED]),
    "only </parameter>, text": (f"{OPEN_WRITE}\n{P}Done.", [WROTE, text("\nDone.")]),
    "none, a call": (f"{OPEN_WRITE}\n{LIST}", [WROTE, LISTED]),
    "none": (OPEN_WRITE, [cut("write_file", '{"path": "a", "content": "b')]),
    "only </function>": (f"{OPEN_WRITE}\n{F}", [WROTE]),
    "too early for what it needs": (
        f"<tool_call>\n<function=write_file>\n<parameter=path>\na\n{P}Done.",
        [cut("write_file", '{"path": "a"'), text("\nDone.")],
    ),
    "no arguments": ("<tool_call>\n<function=list_files>\n</tool_call>", [LISTED]),
    "no arguments, </func>": ("<tool_call><function=list_files></func></tool_call>", [LISTED]),
    "</param>": (WRITE.replace("</parameter>", "</param>"), [WROTE]),
    "</parameters>": (WRITE.replace("</parameter>", "</parameters>"), [WROTE]),
    "</parameter=path>": (WRITE.replace(P, "</parameter=path>\n"), [WROTE]),
    "</parameter": (WRITE.replace(P, "</parameter\n"), [WROTE]),
    "</ parameter>": (WRITE.replace(P, "</ parameter>\n"), [WROTE]),
    "</func>": (WRITE.replace("</function>", "</func>"), [WROTE]),
    "</function=write_file>": (WRITE.replace(F, "</function=write_file>\n"), [WROTE]),
    "</function": (WRITE.replace(F, "</function\n"), [WROTE]),
    "</tool_calls>": (WRITE.replace(C, "</tool_calls>"), [WROTE]),
    "</toolcall>, text": (WRITE.replace(C, "</toolcall> so"), [WROTE, text(" so")]),
    "both mangled": (WRITE.replace(f"{P}{F}", "</param>\n</func>\n"), [WROTE]),
    "doubled </parameter>": (WRITE.replace(P, P + P), [WROTE]),
    "doubled </function>": (WRITE.replace(F, F + F), [WROTE]),
    "doubled </tool_call>": (f"{WRITE}\n{C}\n{LIST}", [WROTE, LISTED]),
    "another order": (WRITE.replace(f"{P}{F}", F + P), [WROTE]),
    "stray, then text": (f"{WRITE}\n</function> so", [WROTE, text(" so")]),
    "one line": (WRITE.replace("\n", ""), [WROTE]),
    "one line, no </parameter>": (
        WRITE.replace("\n", "").replace("</parameter>", "", 1),
        [WROTE],
    ),
    "bare": (BARE, [WROTE]),
    "bare, no </function>": (BARE.replace("</function>", ""), [WROTE]),
    "indented": (WRITE.replace("\n<", "\n  <"), [WROTE]),
}
OPENING: Answers = {
    "doubled <parameter>": (WRITE.replace("<parameter=path>", "\n<parameter=path>" * 2), [WROTE]),
    "quoted names": (re.sub(r"=(\w+)>", r'="\1">', WRITE), [WROTE]),
    "a parameter twice": (
        WRITE.replace("=content>", "=path>"),
        [cut("write_file", '{"path": "a"'), text("\nb\n" + P + F + C)],
    ),
    "unknown, no </parameter>": (
        f"<tool_call>\n<function=free>\n<parameter=a>\nx\n<parameter=b>\ny\n{P}{F}{C}",
        [free('{"a": "x", "b": "y"}')],
    ),
    "no name in the second": (
        WRITE.replace("=content>", "=>"),
        [cut("write_file", '{"path": "a"'), text("\nb\n" + P + F + C)],
    ),
    "doubled <tool_call>": (f"<tool_call>\n{WRITE}", [text("<tool_call>"), WROTE]),
    "two functions in one tag": (f"<tool_call>\n{BARE}\n{LIST[12:]}", [WROTE, LISTED]),
    "an unknown bare function": ("<function=no></function>", [text("<function=no></function>")]),
}
EXAMPLES: Answers = {
    "a call": (WRITE.replace("b\n", f"{EXAMPLE}\n"), [wrote(EXAMPLE)]),
    "only a call": (WRITE.replace("b\n", f"{LIST}\n"), [wrote(LIST)]),
    "two": (WRITE.replace("b\n", f"{LIST}\n{EXAMPLE}\n"), [wrote(f"{LIST}\n{EXAMPLE}")]),
    "no own </parameter>": (f"{OPEN_WRITE}\n{LIST}\nend\n{F}{C}", [wrote(f"b\n{LIST}\nend")]),
    "not balanced": (
        f"{INNER}{F}{C}\n{P}{F}{C}",
        [WROTE, free('{"a": "x"}')],
    ),
    "a call that is cut": (INNER, [WROTE, cut("free", '{"a": "x\\n')]),
    "tags in a line": (
        WRITE.replace("b\n", "Use <tool_call> and </parameter> so\n"),
        [wrote("Use <tool_call> and </parameter> so")],
    ),
    "XML that is no call": (
        WRITE.replace(
            "b\n", '<function name="f">\n<parameter name="x">5</parameter>\n</function>\n'
        ),
        [wrote('<function name="f">\n<parameter name="x">5</parameter>\n</function>')],
    ),
    "in JSON": (
        hermes("write_file", json.dumps({"path": "a", "content": EXAMPLE})),
        [wrote(EXAMPLE)],
    ),
}
MENDED: Answers = {
    "single quotes": (
        "<tool_call>\n{'name': 'free', 'arguments': {'a': 'it\\'s', 'b': \"c\"}}\n</tool_call>",
        [free('{"a": "it\'s", "b": "c"}')],
    ),
    "an apostrophe": (hermes("free", "{'a': 'it's \"so\"'}"), [free('{"a": "it\'s \\"so\\""}')]),
    "constants of Python": (hermes("free", '{"a": [True, None]}'), [free('{"a": [true, null]}')]),
    "names without quotes": (hermes("free", "{a: 1}"), [free('{"a": 1}')]),
    "a comma too many": (hermes("free", '{"a": [1, 2,],}'), [free('{"a": [1, 2]}')]),
    "a raw line break": (hermes("free", '{"a": "x\ny"}'), [free('{"a": "x\\ny"}')]),
    "a backslash": (hermes("free", '{"a": "\\d\\ud800"}'), [free('{"a": "\\\\d\\\\ud800"}')]),
    "no ]": (hermes("free", '{"a": [1, 2}'), [free('{"a": [1, 2]}')]),
    "no }}": (hermes("free", '{"a": 1}').replace("}}", ""), [free('{"a": 1\n}')]),
    "no end, text": (hermes("free", "{}").replace(C, "Done."), [free("{}"), text("\nDone.")]),
    "no closing quote": (
        hermes("free", '{"a": "x}') + f"\n{LIST}",
        [cut("free", '{"a": "x}}\\n'), LISTED],
    ),
    "two objects": (
        hermes("free", "{}").replace(f"\n{C}", "\n") + JSON_WRITE.removeprefix("<tool_call>\n"),
        [free("{}"), WROTE],
    ),
    "a list of calls": (
        '<tool_call>\n[{"name": "free", "arguments": {}}, {"name": "list_files", '
        '"arguments": {}}]\n</tool_call>',
        [free("{}"), LISTED],
    ),
    "a function under JSON": (f"{JSON_WRITE}\n{WRITE}", [WROTE, WROTE]),
    "one JSON value a line": (
        put("items", '{"a": 1}\n{"b": 2}'),
        [("call", "put", '{"items": [{"a": 1}, {"b": 2}]}')],
    ),
    "one JSON value": (put("items", '"a"'), [("call", "put", '{"items": ["a"]}')]),
    "a raw line break in a value": (
        put("obj", '{"a": "x\ny"}'),
        [("call", "put", '{"obj": {"a": "x\\ny"}}')],
    ),
    "a value of Python": (
        put("obj", "{'a': True}"),
        [("call", "put", '{"obj": {"a": true}}')],
    ),
    "JSON in a bare function": ("<function=free>{}</function> so", [free("{}"), text(" so")]),
    "JSON in a function, not closed": (
        f"<tool_call>\n<function=free>\n{{}}\n{LIST}",
        [free("{}"), LISTED],
    ),
}
ASIDE: Answers = {
    "in a fence, then a call": (f"{SHOWN}\n{WRITE}", [text(SHOWN), WROTE]),
    "first a fence": (f"```\n{WRITE}\n```\n", [text(f"```\n{WRITE}\n```\n")]),
    "a longer fence": (
        f"````md\n```\n{LIST}\n```\n{LIST}\n````\n{WRITE}",
        [text(f"````md\n```\n{LIST}\n```\n{LIST}\n````"), WROTE],
    ),
    "a fence that is not closed": (f"```sh\nls\n{WRITE}", [text("```sh\nls"), WROTE]),
    "code before a call": (f"`ls` it is.\n{WRITE}", [text("`ls` it is."), WROTE]),
    "in a line of code": (f"Say `{LIST}` so.", [text(f"Say `{LIST}` so.")]),
    "a backtick alone": (f"Don`t.\n{WRITE}", [text("Don`t."), WROTE]),
    "thinking that is not closed": (f"<think>So:\n\n{WRITE}", [think("So:"), WROTE]),
    "two calls at its end": (f"<think>So:\n{WRITE}\n{LIST}\n", [think("So:"), WROTE, LISTED]),
    "only the last is at its end": (
        f"<think>No {LIST} but\n{WRITE}",
        [think(f"No {LIST} but"), WROTE],
    ),
    "then more thinking": (f"<think>{LIST}\nno", [think(f"{LIST}\nno")]),
    "half a call": (f"<think>So {OPEN_WRITE}", [think(f"So {OPEN_WRITE}")]),
    "JSON in thinking": (
        f"<think>So {JSON_WRITE}\n</think>\n\nyes",
        [think(f"So {JSON_WRITE}"), text("yes")],
    ),
    "a stray </think>": ("</think>\n\nyes", [text("yes")]),
}
TABLE = REPORTED | {
    f"{name}: {what}": case
    for name, cases in {
        "closing": CLOSING,
        "opening": OPENING,
        "example": EXAMPLES,
        "mended": MENDED,
        "aside": ASIDE,
    }.items()
    for what, case in cases.items()
}
SIZES = (1, 2, 3, None)


def pieces(said: str, size: int | None, chance: random.Random) -> Iterator[str]:
    """Yields the answer in tokens of `size` characters, or of random sizes if `size` is None."""
    at = 0
    while at < len(said):
        end = at + (size or chance.randint(1, 12))
        yield said[at:end]
        at = end


def read(said: str, tools: str, *, cut: bool = False) -> list[Any]:
    """Returns the parsed answer, which must be the same however the answer is split."""
    chance = random.Random(said)
    found = []
    for tokens in ([said], *(pieces(said, size, chance) for size in SIZES)):
        parser = OutputFormat("qwen3", tools).parser(thinking=False, schemas=SCHEMAS)
        found.append(events_of(parser, tokens, cut=cut))
    assert all(events == found[0] for events in found)
    return summary(found[0])


@pytest.mark.parametrize(("said", "expected"), TABLE.values(), ids=TABLE)
def test_what_answers_are_read_as(said: str, expected: list[Any]) -> None:
    for tools in ("qwen3_coder", "hermes"):
        assert read(said, tools) == expected


def test_a_limit_ends_no_call() -> None:
    """A call that the model did not end is cut, and no call is read after an open value."""
    begun = '{"path": "a", "content": "b'
    for said, content in ((f"{OPEN_WRITE}\n{P}", begun + '"'), (f"{OPEN_WRITE}\n{LIST}", begun)):
        assert read(said, "qwen3_coder", cut=True) == [cut("write_file", content)]
    for before in ("```\n", "<think>"):
        ((_, found),) = read(before + LIST, "qwen3_coder", cut=True)
        assert found.endswith(LIST)


# Random damage of valid answers.
PLAIN = ["a.txt", "x = '1'\nprint(\"hi\")\n", "", "don't <b>", "é 🎉"]
TAG = re.compile(r"</?(?:tool_call|function|parameter)(?:=[^<>\n]*)?>")
ANY_TAG = re.compile(TAG.pattern + "|</?think>|```")
BEGINNING = re.compile(rf"(?m)^[ \t]*((?:{TAG.pattern}\s*)+)")
FAMILIES = {
    "qwen3.5": xml,
    "qwen3_coder": lambda name, **v: xml(name, **v).removeprefix("<tool_call>\n"),
    "hermes": lambda name, **v: hermes(name, json.dumps(v)),
    "mixed": lambda name, **v: f"<tool_call>\n<function={name}>\n{json.dumps(v)}\n{F}{C}",
}


def valid_call(chance: random.Random) -> str:
    family = chance.choice([*FAMILIES])
    # JSON has its own quoting, so tags in its strings need not be balanced.
    contents = [*PLAIN, EXAMPLE, LIST, "```\nx\n```"] if family.startswith("qwen") else PLAIN
    name = chance.choice([*SCHEMAS])
    values: dict[str, Any] = {}
    if name == "write_file":
        values = {"path": chance.choice(PLAIN), "content": chance.choice(contents)}
    elif name == "free":
        values = {
            key: chance.choice(contents) for key in chance.sample("qxz", chance.randint(0, 2))
        }
    elif name == "put":
        values = {"n": chance.randint(0, 9), "items": [1, {"a": "b"}], "obj": {"x": [True, None]}}
    return FAMILIES[family](name, **values)


def valid_answer(chance: random.Random) -> str:
    calls = "\n".join(valid_call(chance) for _ in range(chance.randint(1, 3)))
    before = chance.choice(["", "<think>So.\n</think>\n\n", f"<think>{THOUGHT}\n", "<think>"])
    before += chance.choice(["", "I look.\n", "`ls` so:\n", SHOWN + "\n"])
    return before + calls + chance.choice(["", "\nDone."])


def damaged(chance: random.Random, said: str) -> str:
    """Returns the answer cut, or with a character or tag lost, added, doubled, moved or mangled."""
    at = chance.randint(0, len(said))
    tags = list(ANY_TAG.finditer(said))
    if not tags or chance.random() < 0.4:
        end = at + chance.randint(0, 4)
        odd = chance.choice(["", "\n", '"', "'", "<", ">", "`", "\n\n", "x", "}"])
        return chance.choice([said[:at], said[:at] + said[end:], said[:at] + odd + said[at:]])
    tag, other = chance.choice(tags), chance.choice(tags)
    start, end = tag.span()
    inside = chance.randrange(start, end)
    spoilt = chance.choice(["", chance.choice("s /\nx<>") + said[inside]])
    moved = tag[0] if tag[0] != "```" else ""
    return chance.choice(
        [
            said[:start] + said[end:],
            said[:end] + chance.choice(["", "\n"]) + said[start:],
            said[:inside] + spoilt + said[inside + 1 :],
            said[:start] + other[0] + said[end:] if other[0] != "```" else said,
            said[:start] + tag[0].upper() + said[end:],
            said[: other.start()] + moved + "\n" + said[other.start() :],
        ]
    )


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from strings(each)


def is_balanced(value: str) -> bool:
    opened: list[str] = []
    for tag in TAG.findall(value):
        name = re.sub(r"[</>]|=.*", "", tag)
        if not tag.startswith("</"):
            opened.append(name)
        elif not opened or opened.pop() != name:
            return False
    return not opened


def has_only_examples(value: str) -> bool:
    """True if the tags in a value are balanced, except for tags in the middle of a line."""
    return is_balanced(value) or is_balanced(" ".join(BEGINNING.findall(value)))


THOUSANDS = [range(first, first + 1000) for first in range(0, 20_000, 1000)]


@pytest.mark.parametrize("numbers", [range(300), *map(full, THOUSANDS)], ids=str)
def test_any_damage(numbers: range) -> None:
    """A damaged answer is parsed the same however it is split; no argument has part of a call."""
    for number in numbers:
        chance = random.Random(number)
        said = valid_answer(chance)
        for _ in range(chance.randint(1, 3)):
            said = damaged(chance, said)
        for kind, *found in read(said, "qwen3_coder", cut=chance.random() < 0.3):
            if kind == "call":
                assert isinstance(json.loads(found[1]), dict), said
            if kind in ("call", "cut"):
                value = jiter.from_json(found[1].encode(), partial_mode="trailing-strings")
                assert all(map(has_only_examples, strings(value))), said
