"""Reasoning and tools in chats: what the model sees, what clients get, and what is enforced."""

from typing import Any

from mlx_mtp.text.tokenizer import Tokenizer
from tests.support.in_process import in_process
from tests.support.wire_help import CALL, CHAT, WEATHER, ask, chat_body, prompt_of, saying

OTHER = {"type": "function", "function": {"name": "other"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
TEXT = "I add.\n</think>\n\nFour."
HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Y"


def test_what_is_enforced_is_a_grammar(tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "No.")
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    with in_process(engine) as client:

        def grammar(*tools: Any, **fields: Any) -> Any:
            ask(client, tools=tools or [WEATHER, OTHER], **fields)
            return engine.submitted[-1].sampling.grammar

        assert grammar() is None
        assert grammar(tool_choice="auto") is None
        required = grammar(tool_choice="required")
        assert (required.kind, required.free_until) == ("lark", None)
        assert "get_weather" in required.value and "other" in required.value
        assert "other" in prompt_of(engine, tokenizer)
        assert "other" not in grammar(tool_choice=NAMED).value
        assert "other" not in grammar(tool_choice=allowed).value
        assert "other" not in prompt_of(engine, tokenizer)
        assert grammar(tool_choice=NAMED, **THINKING).free_until == "</think>"
        assert "<tool_call>" in grammar(strict).value


def test_the_flags_for_formats(tokenizer: Tokenizer) -> None:
    for settings, text, fields, expected in (
        ({"reasoning_parser": "none"}, f"<think>\n{TEXT}", {}, (None, f"<think>\n{TEXT}")),
        ({"reasoning_parser": "gpt_oss"}, HARMONY, {"tool_choice": "required"}, ("hm", "Y")),
        ({"tool_call_parser": "none"}, CALL, {}, (None, CALL)),
    ):
        with in_process(saying(tokenizer, text), **settings) as client:
            message = ask(client, tools=[WEATHER], tool_choice="none")["choices"][0]["message"]
            assert (message.get("reasoning_content"), message["content"]) == expected
            if settings != {"reasoning_parser": "none"}:
                response = client.post(CHAT, json=chat_body(tools=[WEATHER], **fields))
                assert response.status_code == 400
                param = next(iter(fields), "tools")
                assert response.json()["error"]["param"] == param
