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
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'

CASES: dict[str, tuple[str, list[Any]]] = {
    "no channels": ("Hello", [("text", "Hello")]),
    "an answer": (FINAL, [("text", "Hello <b>!")]),
    "its end": (FINAL + "<|return|>", [("text", "Hello <b>!")]),
    "reasoning": (THINK + NEXT + FINAL, [("think", "Let me see."), ("text", "Hello <b>!")]),
    "a call": (THINK + NEXT + CALL, [("think", "Let me see."), ("call", "f", '{"a": 1}')]),
    "the recipient first": (
        "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}<|call|>",
        [("call", "f", "{}")],
    ),
    "two calls": (
        f"{CALL}<|call|>{NEXT}{CALL}<|call|>",
        [("call", "f", '{"a": 1}'), ("call", "f", '{"a": 1}')],
    ),
    "a preamble": (
        f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}",
        [("text", "I look."), ("call", "f", '{"a": 1}')],
    ),
    "no arguments": (
        "<|channel|>commentary to=functions.f<|message|><|call|>",
        [("call", "f", "{}")],
    ),
    "cut in reasoning": (THINK.removesuffix(".<|end|>"), [("think", "Let me see")]),
    "cut in a header": (
        f"{THINK}{NEXT}<|chan",
        [("think", "Let me see."), ("text", NEXT + "<|chan")],
    ),
    "cut in a call": (CALL[:-1], [("cut", "f", '{"a": 1')]),
    "a broken call": (
        CALL.replace(": 1", " 1") + "<|call|>",
        [("broken", CALL.replace(": 1}", " ")), ("text", "1}")],
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
    found = summary(events_of(parser, f"{CALL}<|call|>{NEXT}{CALL}<|call|>{NEXT}{FINAL}"))
    assert found == [("call", "f", '{"a": 1}')]
    assert parser.done


PIECES = st.sampled_from(
    [*MARKERS, "analysis", "final", "commentary", " to=functions.f", "{}", "<"]
)


def test_after_the_last_call_nothing_is_told() -> None:
    same_however_cut(maker(max_calls=1), "<|channel|> to=functions.f<|message|>{}<|message|>", [])


@steady
@given(st.lists(PIECES, max_size=20).map("".join), places)
def test_what_comes_out_does_not_depend_on_the_pieces(text: str, at: list[int]) -> None:
    same_however_cut(maker(), text, at)
    same_however_cut(maker(max_calls=1), text, at)
