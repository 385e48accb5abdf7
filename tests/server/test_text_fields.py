"""vLLM's fields for an answer's text and token ids: whole and streamed, with any step sizes."""

from collections.abc import Iterator
from typing import Any

import pytest

from mlx_mtp.engine.request import Request
from mlx_mtp.text.tokenizer import Tokenizer
from tests.support.fake_engine import EOS, FakeEngine, Output, answer
from tests.support.in_process import CHAT, TEXT, in_process
from tests.support.wire_help import CALL, WEATHER, ask, events, saying

SAID = "Hi<|im_start|> there, 🎉"
SIZES = [(1,), (2, 1), (99,)]
NO_SKIP, WITH_STOP = {"skip_special_tokens": False}, {"include_stop_str_in_output": True}
SHOWN: list[tuple[dict[str, Any], str]] = [
    ({}, "Hi there, 🎉"),
    (NO_SKIP, SAID),
    (WITH_STOP, "Hi there, 🎉"),  # the end-of-sequence token has no text
    (NO_SKIP | WITH_STOP, SAID + "<|im_end|>"),
    ({"stop": "ther"}, "Hi "),
    (WITH_STOP | {"stop": ["there", "ther"]}, "Hi ther"),
    (WITH_STOP | NO_SKIP | {"stop": "<|im"}, "Hi<|im"),
    ({"stop": ["Hi", ","], "min_tokens": 1}, "Hi there"),
    ({"stop": ["H", "<|", "i t"], "min_tokens": 2}, "H"),  # ends within the third token
]


def text_of(choice: dict[str, Any]) -> str:
    inner = choice.get("message", choice.get("delta", choice))
    return inner.get("content", inner.get("text")) or ""


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("sizes", SIZES)
def test_what_is_shown(tokenizer: Tokenizer, path: str, sizes: tuple[int, ...]) -> None:
    prompt = {} if path == CHAT else {"prompt": "hi"}
    with in_process(saying(tokenizer, SAID, sizes)) as client:
        for fields, text in SHOWN:
            whole = ask(client, path, **prompt, **fields)["choices"][0]
            chunks = events(client, path, **prompt, **fields)
            assert text_of(whole) == text, fields
            assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == text
            assert whole["finish_reason"] == "stop"


def test_calls_are_found_whatever_is_shown(tokenizer: Tokenizer) -> None:
    with in_process(saying(tokenizer, f"<think>so</think>\n\n{CALL}")) as client:
        messages = [
            ask(client, tools=[WEATHER], **fields)["choices"][0]["message"]
            for fields in ({}, NO_SKIP, WITH_STOP)
        ]
    for message in messages:
        assert message["tool_calls"][0]["function"]["name"] == "get_weather"
        assert (message["reasoning_content"], message["content"]) == ("so", None)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("sizes", SIZES)
def test_token_ids(tokenizer: Tokenizer, path: str, sizes: tuple[int, ...]) -> None:
    """The ids of all chunks are the answer's, with those of held back text and special tokens."""

    def script(request: Request) -> Iterator[Output]:
        said = f"{'ab'[request.sampling.choice]}{len(request.prompt_token_ids)} {SAID}"
        return answer(tokenizer.encode(said), sizes)(request)

    engine = FakeEngine(script)
    prompt: dict[str, Any] = {} if path == CHAT else {"prompt": [[5], [6, 7]]}
    for stop, last in ((None, EOS), ("ere,", tokenizer.encode(",")[0])):
        fields = {**prompt, "n": 2, "stop": stop, "return_token_ids": True}
        with in_process(engine := FakeEngine(script)) as client:
            whole, chunks = ask(client, path, **fields), events(client, path, **fields)
            plain = ask(client, path, **prompt), events(client, path, **prompt)
        assert "token_ids" not in str(plain)
        for choice, request in zip(whole["choices"], engine.submitted):
            index, prompt_ids = choice["index"], list(request.prompt_token_ids)
            parts = [p for chunk in chunks for p in chunk["choices"] if p["index"] == index]
            first = next(chunk for chunk in chunks if chunk["choices"][0]["index"] == index)
            ids = choice["token_ids"]
            assert [t for part in parts for t in part.get("token_ids", ())] == ids
            said = f"{'ab'[request.sampling.choice]}{len(prompt_ids)} {SAID}"
            every = [*tokenizer.encode(said), EOS]
            assert ids == every[: len(ids)] and ids[-1] == last
            for place in (whole, first) if path == CHAT else (choice, first["choices"][0]):
                assert place["prompt_token_ids"] == prompt_ids
            assert str(chunks).count("prompt_token_ids") == len(whole["choices"])


def test_bad_words_are_those_of_the_text_that_is_shown(tokenizer: Tokenizer) -> None:
    start, (t,), (h,) = tokenizer.added_tokens["<|im_start|>"], *map(tokenizer.encode, "th")
    for fields, hidden in (({}, True), (NO_SKIP, False)):
        with in_process(engine := FakeEngine(answer([300]))) as client:
            ask(client, bad_words=["th"], **fields)
        words = engine.submitted[0].bad_words
        assert words is not None and words.completed(words.next_tail(b"", t), h)
        tail = words.next_tail(words.next_tail(b"", t), start)
        assert words.completed(tail, h) == hidden
