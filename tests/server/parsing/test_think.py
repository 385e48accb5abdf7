"""The think block: where it begins and ends, and what happens to what is beside it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.server.parsing.formats import OutputFormat
from tests.server.parsing.pieces import (
    events_of,
    hermes,
    places,
    same_however_cut,
    steady,
    summary,
)

FORMAT = OutputFormat("qwen3", "hermes")
CASES: list[tuple[str, bool, list[Any]]] = [
    # the text, whether the prompt opened the block, what comes out
    ("", False, []),
    (" \n", False, [("text", " \n")]),
    ("  indented", False, [("text", "  indented")]),
    ("<think>\nso\n</think>\n\nyes", False, [("think", "so"), ("text", "yes")]),
    ("\n\n<think>so</think>yes", False, [("think", "so"), ("text", "yes")]),
    ("a\n\nb\n</think>\n\n c\n", True, [("think", "a\n\nb"), ("text", " c\n")]),
    ("<think>\nso</think>yes", True, [("think", "so"), ("text", "yes")]),
    ("<think>\n\n</think>\n\nyes", False, [("text", "yes")]),
    ("cut short\n", True, [("think", "cut short\n")]),
    ("cut </thi", True, [("think", "cut </thi")]),
    ("a < b</ think></think>", True, [("think", "a < b</ think>")]),
    ("<thin", False, [("text", "<thin")]),
    ("<thinking>x", False, [("text", "<thinking>x")]),
    ("no <think>x</think>", False, [("text", "no <think>x</think>")]),
    ("a</think>b</think>c", True, [("think", "a"), ("text", "b</think>c")]),
]


@pytest.mark.parametrize(("text", "opened", "expected"), CASES)
def test_think_blocks(text: str, opened: bool, expected: list[Any]) -> None:
    assert summary(events_of(FORMAT.parser(thinking=opened, schemas=None), [text])) == expected


def test_a_call_ends_a_block_that_was_left_open() -> None:
    text = f"I should call it: <tool_call> first.\n{hermes('f', '{}')}"
    expected = [("think", "I should call it: <tool_call> first."), ("call", "f", "{}")]
    parser = FORMAT.parser(thinking=True, schemas={"f": {}})
    assert summary(events_of(parser, text)) == expected
    without_tools = FORMAT.parser(thinking=True, schemas=None)
    assert summary(events_of(without_tools, text)) == [("think", text)]


def test_the_parser_knows_where_reasoning_is() -> None:
    parser = FORMAT.parser(thinking=False, schemas=None)
    seen = []
    for piece in ["<think>", "a", "</think>", "\n\n", "b"]:
        parser.feed(piece)
        seen.append(parser.in_reasoning)
    assert seen == [True, True, False, False, False]
    assert FORMAT.parser(thinking=True, schemas=None).in_reasoning


PARTS = ["<think>", "</think>", "<tool_call>", "{", '"', "<function=", "\n", " ", "a", "<", "</"]


@steady
@given(st.lists(st.sampled_from(PARTS)).map("".join), st.booleans(), st.booleans(), places)
def test_any_text_however_split(text: str, opened: bool, tools: bool, at: list[int]) -> None:
    """What comes out does not depend on the pieces; nothing but tags and newlines is lost."""
    schemas = {"f": {}} if tools else None
    same_however_cut(lambda: FORMAT.parser(thinking=opened, schemas=schemas), text, at)
    events = summary(events_of(FORMAT.parser(thinking=opened, schemas=None), text))
    found = "".join("".join(part for _, part in events).split())
    bare = "".join(text.split())
    possible = (bare, bare.replace("<think>", "", 1))
    assert found in {*possible, *(each.replace("</think>", "", 1) for each in possible)}
