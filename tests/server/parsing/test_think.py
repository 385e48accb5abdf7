"""The think block: where it begins and ends, and what happens to what is beside it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.server.parsing.formats import OutputFormat
from tests.server.parsing.pieces import events_of, places, same_however_cut, steady, summary

FORMAT = OutputFormat("qwen3", "hermes")

CASES: list[tuple[str, bool, list[Any]]] = [
    # the text, whether the prompt opened the block, what comes out
    ("hello", False, [("text", "hello")]),
    ("", False, []),
    (" \n", False, [("text", " \n")]),
    ("<think>\nso\n</think>\n\nyes", False, [("think", "so"), ("text", "yes")]),
    ("\n\n<think>so</think>yes", False, [("think", "so"), ("text", "yes")]),
    ("so\n</think>\n\nyes", True, [("think", "so"), ("text", "yes")]),
    ("a\n\nb\n</think>\n\n c\n", True, [("think", "a\n\nb"), ("text", " c\n")]),
    ("<think>\n\n</think>\n\nyes", False, [("text", "yes")]),
    ("cut short\n", True, [("think", "cut short\n")]),
    ("cut </thi", True, [("think", "cut </thi")]),
    ("a < b</ think></think>", True, [("think", "a < b</ think>")]),
    ("<thin", False, [("text", "<thin")]),
    ("<thinking>x", False, [("text", "<thinking>x")]),
    ("no <think>x</think>", False, [("text", "no <think>x</think>")]),
    ("a</think>b</think>c", True, [("think", "a"), ("text", "b</think>c")]),
    ("<think>\nso</think>yes", True, [("think", "so"), ("text", "yes")]),
    ("  indented", False, [("text", "  indented")]),
]


@pytest.mark.parametrize(("text", "opened", "expected"), CASES)
def test_think_blocks(text: str, opened: bool, expected: list[Any]) -> None:
    assert summary(events_of(FORMAT.parser(thinking=opened, schemas=None), [text])) == expected


def test_a_call_ends_a_block_that_was_left_open() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    text = f"I should call it: <tool_call> first.\n{call}"
    expected = [("think", "I should call it: <tool_call> first."), ("call", "f", "{}")]
    parser = FORMAT.parser(thinking=True, schemas={"f": {}})
    assert summary(events_of(parser, text)) == expected
    without_tools = FORMAT.parser(thinking=True, schemas=None)
    assert summary(events_of(without_tools, text)) == [("think", text)]


def test_the_parser_tells_where_reasoning_is() -> None:
    parser = FORMAT.parser(thinking=False, schemas=None)
    seen = []
    for piece in ["<think>", "a", "</think>", "\n\n", "b"]:
        parser.feed(piece)
        seen.append(parser.in_reasoning)
    assert seen == [True, True, False, False, False]


PARTS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "{", '"', "<function=", "\n", " ", "a", "<", "</"]
)


@steady
@given(st.lists(PARTS).map("".join), st.booleans(), st.booleans(), places)
def test_what_comes_out_does_not_depend_on_the_pieces(
    text: str, opened: bool, tools: bool, at: list[int]
) -> None:
    schemas = {"f": {}} if tools else None
    same_however_cut(lambda: FORMAT.parser(thinking=opened, schemas=schemas), text, at)


@steady
@given(st.lists(PARTS).map("".join), st.booleans())
def test_nothing_but_tags_and_newlines_is_lost(text: str, opened: bool) -> None:
    events = events_of(FORMAT.parser(thinking=opened, schemas=None), text)
    told = "".join(text for _, text in summary(events))

    bare = "".join(text.split())
    without_open = bare.replace("<think>", "", 1)
    possible = (bare, without_open)
    assert "".join(told.split()) in {
        *possible,
        *(each.replace("</think>", "", 1) for each in possible),
    }
