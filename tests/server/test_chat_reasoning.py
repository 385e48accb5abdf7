"""Reasoning in chat completions: split off, streamed, counted, switched and limited."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import Serve, Served
from tests.server.fake_engine import FakeEngine, answer
from tests.server.test_chat_tools import prompt_of
from tests.server.wire_help import CHAT, ask, chat_body, events, joined, saying

THINK = {"chat_template_kwargs": {"enable_thinking": True}}
TEXT = "I add.\nIt is 4.\n</think>\n\nFour."


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return saying(tokenizer, TEXT)


@pytest.fixture(scope="module")
def client(serve: Serve, engine: FakeEngine) -> Iterator[Served]:
    with serve(engine) as client:
        yield client


def test_reasoning_is_split_off(client: Served, tokenizer: Tokenizer) -> None:
    body = ask(client, **THINK)
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("I add.\nIt is 4.", "Four.")
    details = body["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len(tokenizer.encode(TEXT[: TEXT.index("\n\nFour")]))
    chunks = events(client, **THINK, stream_options={"include_usage": True})
    streamed = joined(chunks)
    assert (streamed["reasoning_content"], streamed["content"]) == ("I add.\nIt is 4.", "Four.")
    assert chunks[-1]["usage"] == body["usage"]
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    assert sum("reasoning_content" in delta for delta in deltas) > 3


def test_other_answers(
    client: Served, engine: FakeEngine, serve: Serve, tokenizer: Tokenizer
) -> None:
    def message(client: Served, **fields: Any) -> tuple[str | None, str]:
        (choice,) = ask(client, **fields)["choices"]
        return choice["message"].get("reasoning_content"), choice["message"]["content"]

    # Without a think block in the prompt the text is content.
    assert message(client) == (None, TEXT)
    assert ask(client, **THINK, max_tokens=3)["choices"][0]["finish_reason"] == "length"
    begun, content = message(client, **THINK, max_tokens=3)
    assert content == ""
    assert "I add.\nIt is 4.".startswith(begun or "no reasoning")
    # A block that the model opens itself.
    opened = f"<think>\n{TEXT}"
    engine.script = answer(tokenizer.encode(opened))
    assert message(client) == ("I add.\nIt is 4.", "Four.")
    harmony = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Y"
    )
    for parser, text, expected in (
        ("none", opened, (None, opened)),
        ("gpt_oss", harmony, ("hm", "Y")),
    ):
        with serve(saying(tokenizer, text), reasoning_parser=parser) as other:
            assert message(other) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"chat_template_kwargs": {"enable_thinking": True, "thinking_budget": 7}}, 7),
        ({"chat_template_kwargs": {"enable_thinking": True, "thinking_budget": 0}}, 0),
        ({"reasoning_effort": "low"}, 2048),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"thinking_budget": 7}}, 7),
    ],
)
def test_a_thinking_budget(
    client: Served, engine: FakeEngine, fields: dict[str, Any], expected: int
) -> None:
    ask(client, **fields)
    grammar = engine.submitted[-1].sampling.grammar
    assert grammar == GrammarSpec("free", free_until="</think>", free_tokens=expected)


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"thinking_budget": 7}}, False),
    ],
)
def test_effort_switches_thinking(
    client: Served, engine: FakeEngine, tokenizer: Tokenizer, fields: dict[str, Any], thinks: bool
) -> None:
    ask(client, **fields)
    assert prompt_of(engine, tokenizer).endswith("<think>\n") == thinks
    assert engine.submitted[-1].sampling.grammar is None


def test_reasoning_goes_back_into_the_prompt(
    client: Served, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    earlier = {"role": "assistant", "content": "Hm.", "reasoning_content": "so so"}
    ask(client, messages=[{"role": "user", "content": "hi"}, earlier])
    assert "so so" in prompt_of(engine, tokenizer)


def test_budgets_that_are_none(client: Served) -> None:
    for budget in (-1, 1.5, "7", True):
        kwargs = {"thinking_budget": budget}
        response = client.post(CHAT, json=chat_body(chat_template_kwargs=kwargs))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "chat_template_kwargs.thinking_budget"
