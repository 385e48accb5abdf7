"""`echo`: a completion begins with its prompt; and the logprobs of prompts, in both forms."""

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlx_mtp.server.generation.inputs import MAX_PROMPT_LOGPROBS
from mlx_mtp.text.tokenizer import Tokenizer
from tests.support.fake_engine import EOS, FakeEngine, FakeInfo, answer
from tests.support.in_process import CHAT, HI, TEXT, in_process
from tests.support.wire_help import ask, events

SAID = " said 🎉"
# The last one has a combining accent, which the tokenizer composes with its letter.
PROMPTS = ("Once upon", "<|im_start|>a 🎉 b<|im_end|>", "cafe\u0301")


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(answer(tokenizer.encode(SAID)), FakeInfo(max_model_len=1 << 16))


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[httpx.Client]:
    with in_process(engine) as client:
        yield client


def choices_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the choices that the chunks of a stream add up to."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = found.setdefault(choice["index"], {"text": "", "logprobs": {}})
            whole["text"] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                whole["logprobs"].setdefault(name, []).extend(values)
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_each_choice_begins_with_its_prompt(
    client: httpx.Client, tokenizer: Tokenizer, n: int, as_ids: bool
) -> None:
    """This holds with and without logprobs, and in streams; stop strings apply to answers only."""
    ids = [list(tokenizer.encode(text)) for text in PROMPTS]
    texts = [b"".join(map(tokenizer.token_bytes, each)).decode() for each in ids]
    assert texts[:2] == list(PROMPTS[:2])
    fields = {"prompt": ids if as_ids else PROMPTS, "echo": True, "n": n, "stop": "Once"}
    for more in ({}, {"logprobs": 1}, {"logprobs": 1, "max_tokens": 0}):
        end = "" if "max_tokens" in more else SAID
        shown = [text + end for text in (texts if as_ids else PROMPTS) for _ in range(n)]
        body = ask(client, TEXT, **fields, **more)
        chunks = events(client, TEXT, **fields, **more)
        assert [choice["text"] for choice in body["choices"]] == shown
        assert [choice["text"] for choice in choices_of(chunks)] == shown
        answered = (len(tokenizer.encode(SAID)) + 1) * len(shown) if end else 0
        assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert body["usage"]["completion_tokens"] == answered
        assert {c["finish_reason"] for c in body["choices"]} == {"stop" if end else "length"}
        for whole, streamed in zip(body["choices"], choices_of(chunks), strict=True):
            assert "prompt_logprobs" not in whole
            assert (whole["logprobs"] or {}) == streamed["logprobs"]


def test_the_legacy_form_of_logprobs(client: httpx.Client, tokenizer: Tokenizer) -> None:
    """The first logprob is null; each token has its offset; the last token ended the answer."""
    for text, most in itertools.product(PROMPTS, (0, 2)):
        prompt, said = tokenizer.encode(text), tokenizer.encode(SAID)
        (choice,) = ask(client, TEXT, prompt=text, echo=True, logprobs=most)["choices"]
        found = choice["logprobs"]
        names = [tokenizer.token_text(token) for token in (*prompt, *said, EOS)]
        assert found["tokens"] == names
        count = len(prompt) - 1
        assert found["token_logprobs"] == [None, *[-0.5] * count, *[-0.25] * (len(said) + 1)]
        assert found["top_logprobs"][0] is None
        for token, name, top in zip(prompt[1:], names[1:], found["top_logprobs"][1:]):
            likelier = tokenizer.token_text(token - 1)
            assert top == ({likelier: -0.25} if most else {}) | {name: -0.5}
        places = zip(names, found["text_offset"], strict=True)
        plain = [(name, at) for name, at in places if not name.startswith("bytes:")][:-1]
        if text.isascii() or "<" in text:
            assert all(choice["text"][at:].startswith(name) for name, at in plain)
        assert found["text_offset"] == sorted(found["text_offset"])
        assert found["text_offset"][-1] == len(choice["text"])


def test_vllms_form_of_prompt_logprobs(
    client: httpx.Client, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    """Each choice of a completion has prompt logprobs, computed once per prompt; so has a chat."""

    def expected(token_ids: tuple[int, ...], most: int) -> list[Any]:
        found: list[Any] = [None]
        for token in token_ids[1:]:
            ranked = [(token, -0.5, 2), (token - 1, -0.25, 1), (token, -0.5, 2), (token - 2, -1, 3)]
            found.append(
                {
                    str(each): {
                        "logprob": value,
                        "rank": rank,
                        "decoded_token": tokenizer.token_text(each),
                    }
                    for each, value, rank in ranked[: most + 1]
                }
            )
        return found

    for most, count in ((0, {"n": 2}), (1, {"best_of": 2}), (3, {"n": 2, "best_of": 2})):
        engine.submitted.clear()
        prompts = [tokenizer.encode("Once upon a"), tokenizer.encode("x")]
        body = ask(client, TEXT, prompt=prompts, **count, prompt_logprobs=most)
        wanted = [expected(prompt, most) for prompt in prompts for _ in range(2)]
        assert [choice["prompt_logprobs"] for choice in body["choices"]] == wanted
        assert [choice["logprobs"] for choice in body["choices"]] == [None] * 4
        asked = [request.sampling.prompt_logprobs for request in engine.submitted]
        assert asked == [most, None] * 2
        engine.submitted.clear()
        body = ask(client, CHAT, n=2, prompt_logprobs=most)
        assert body["prompt_logprobs"] == expected(engine.submitted[0].prompt_token_ids, most)
    # Both forms at once, of different lengths.
    fields = {"prompt": "Once upon", "echo": True, "logprobs": 1, "prompt_logprobs": 3}
    (choice,) = ask(client, TEXT, **fields)["choices"]
    assert choice["prompt_logprobs"] == expected(tokenizer.encode("Once upon"), 3)
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} == {1, 2}


def test_what_is_too_much_or_makes_no_sense(client: httpx.Client) -> None:
    many = {"prompt": [[5] * 5000] * 2, "max_tokens": 0}
    for path, fields, param, word in (
        (TEXT, {"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
        (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs", "at least 0"),
        (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream: false"),
        (TEXT, {"max_tokens": 0}, "max_tokens", "at least 1"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "at least 1"),
        (TEXT, {**many, "prompt_logprobs": 20}, "prompt_logprobs", str(MAX_PROMPT_LOGPROBS)),
        (TEXT, {**many, "echo": True, "logprobs": 20}, "prompt_logprobs", "210000"),
    ):
        smallest = {"messages": HI} if path == CHAT else {"prompt": "hi"}
        response = client.post(path, json={"model": "test/model", **smallest, **fields})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert word in error["message"]
    # Prompts of this size are accepted without logprobs; a chat can ask for its prompt alone.
    assert ask(client, TEXT, **many, echo=True)["usage"]["completion_tokens"] == 0
    assert ask(client, CHAT, prompt_logprobs=0, max_tokens=0)["usage"]["completion_tokens"] == 0
