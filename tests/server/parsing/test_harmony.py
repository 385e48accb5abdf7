"""gpt-oss's format: channels, calls, and whatever else its text may be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.server.parsing.formats import OutputFormat
from mlx_mtp.server.parsing.harmony import MARKERS
from tests.server.parsing.pieces import Make, events_of, places, same_however_cut, steady, summary


def maker(tools: bool = True, **more: Any) -> Make:
    form = OutputFormat.choose("<|channel|>", "gpt_oss")
    return lambda: form.parser(thinking=False, schemas={} if tools else None, **more)


THINK = "<|channel|>analysis<|message|>Let me see.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>Hello <b>!"
OPENED = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
CALL = OPENED + '{"a": 1}'
DONE = ("call", "f", '{"a": 1}')

CASES: dict[str, tuple[str, list[Any]]] = {
    "no channels": ("Hello", [("text", "Hello")]),
    "an answer": (FINAL + "<|return|>", [("text", "Hello <b>!")]),
    "reasoning": (THINK + NEXT + FINAL, [("think", "Let me see."), ("text", "Hello <b>!")]),
    "a call": (THINK + NEXT + CALL, [("think", "Let me see."), DONE]),
    "the recipient first": (
        "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}<|call|>",
        [("call", "f", "{}")],
    ),
    "two calls": (f"{CALL}<|call|>{NEXT}{CALL}  <|call|>", [DONE, DONE]),
    "text after a call": (f"{CALL}  so it is", [DONE, ("text", "so it is")]),
    "a preamble": (
        f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}",
        [("text", "I look."), DONE],
    ),
    "no arguments": (OPENED + "<|call|>", [("call", "f", "{}")]),
    "cut in reasoning": (THINK.removesuffix(".<|end|>"), [("think", "Let me see")]),
    "cut in a header": (f"{THINK}{NEXT}<|c", [("think", "Let me see."), ("text", NEXT + "<|c")]),
    "cut in a call": (CALL[:-1], [("cut", "f", '{"a": 1')]),
    "a broken call": (
        CALL.replace(": 1", " 1") + "<|call|>",
        [("broken", OPENED + '{"a"'), ("text", " 1}")],
    ),
    "a marker in a string": (OPENED + '{"<|end|>x', [("broken", OPENED + '{"'), ("text", "x")]),
    "a marker that ends nothing": (
        OPENED + '{"<|message|><|call|>',
        [("broken", OPENED + '{"<|message|>')],
    ),
}


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_harmony(text: str, expected: list[Any]) -> None:
    assert summary(events_of(maker()(), [text])) == expected
    assert summary(events_of(maker()(), text)) == expected


def test_a_call_without_tools_is_text() -> None:
    assert summary(events_of(maker(tools=False)(), CALL)) == [("text", CALL)]


def test_after_the_last_call_that_is_wanted_nothing_is() -> None:
    parser = maker(max_calls=1)()
    assert summary(events_of(parser, f"{CALL}<|call|>{NEXT}{CALL}<|call|>{NEXT}{FINAL}")) == [DONE]
    assert parser.done


PIECES = [*MARKERS, "analysis", "final", "commentary", " to=functions.f", "{}", '{"', "<", "  "]


@steady
@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join), places)
def test_what_comes_out_does_not_depend_on_the_pieces(text: str, at: list[int]) -> None:
    same_however_cut(maker(), text, at)
    same_however_cut(maker(max_calls=1), text, at)
