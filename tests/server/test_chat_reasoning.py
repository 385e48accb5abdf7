"""Reasoning in chat completions: split off, streamed, counted, switched and limited."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import Serve, Served
from tests.server.fake_engine import FakeEngine
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
    assert message["reasoning_content"] == "I add.\nIt is 4."
    assert message["content"] == "Four."
    details = body["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len(tokenizer.encode(TEXT[: TEXT.index("\n\nFour")]))


def test_reasoning_is_streamed(client: Served) -> None:
    chunks = events(client, **THINK, stream_options={"include_usage": True})
    message = joined(chunks)
    assert message["reasoning_content"] == "I add.\nIt is 4."
    assert message["content"] == "Four."
    assert chunks[-1]["usage"] == ask(client, **THINK)["usage"]
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    assert sum("reasoning_content" in delta for delta in deltas) > 3


def test_without_a_think_block_in_the_prompt_the_text_is_content(client: Served) -> None:
    message = ask(client)["choices"][0]["message"]
    assert message["content"] == TEXT
    assert "reasoning_content" not in message


def test_a_block_that_the_model_opens_itself(serve: Serve, tokenizer: Tokenizer) -> None:
    with serve(saying(tokenizer, f"<think>\n{TEXT}")) as client:
        message = ask(client)["choices"][0]["message"]
        assert message["reasoning_content"] == "I add.\nIt is 4."
        assert message["content"] == "Four."
    with serve(saying(tokenizer, f"<think>\n{TEXT}"), reasoning_parser="none") as client:
        assert ask(client)["choices"][0]["message"]["content"] == f"<think>\n{TEXT}"


def test_reasoning_that_is_cut(client: Served) -> None:
    (choice,) = ask(client, **THINK, max_tokens=3)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert "I add.\nIt is 4.".startswith(choice["message"]["reasoning_content"])


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
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            False,
        ),
        ({"chat_template_kwargs": {"thinking_budget": 7}}, False),
    ],
)
def test_effort_switches_thinking(
    client: Served, engine: FakeEngine, tokenizer: Tokenizer, fields: dict[str, Any], thinks: bool
) -> None:
    ask(client, **fields)
    request = engine.submitted[-1]
    text = b"".join(map(tokenizer.token_bytes, request.prompt_token_ids)).decode()
    assert text.endswith("<think>\n") == thinks
    assert request.sampling.grammar is None


def test_reasoning_goes_back_into_the_prompt(
    client: Served, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hm.", "reasoning_content": "so so"},
    ]
    ask(client, messages=messages)
    ids = engine.submitted[-1].prompt_token_ids
    assert "so so" in b"".join(map(tokenizer.token_bytes, ids)).decode()


def test_budgets_that_are_none(client: Served) -> None:
    for budget in (-1, 1.5, "7", True):
        kwargs = {"thinking_budget": budget}
        response = client.post(CHAT, json=chat_body(chat_template_kwargs=kwargs))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "chat_template_kwargs.thinking_budget"


def test_harmony(serve: Serve, tokenizer: Tokenizer) -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    with serve(saying(tokenizer, text), reasoning_parser="gpt_oss") as client:
        message = ask(client)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "Yes")
