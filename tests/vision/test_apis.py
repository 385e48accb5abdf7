"""Images through the APIs: each gives the same prompt, or a 400 that says what is wrong."""

import base64
import contextlib
import io

import numpy as np
import pytest
from PIL import Image

from mlx_mtp.connect.clients import CLIENTS, Served
from mlx_mtp.text.tokenizer import Tokenizer
from mlx_mtp.vision.images import ImageSizes
from tests.server.conftest import MODEL
from tests.support.fake_engine import FakeEngine, FakeInfo, answer
from tests.support.in_process import (
    CHAT,
    COUNT,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_TEXT,
    RESPONSES,
    TOKENIZE,
    in_process,
)
from tests.vision.served import seeing_library_tokenizer


def encoded(rows: int, columns: int, kind: str = "PNG") -> str:
    noise = np.random.default_rng(rows).integers(0, 256, (8 * rows, 8 * columns, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, kind)
    return base64.b64encode(buffer.getvalue()).decode()


DATA, OTHER = encoded(2, 3), encoded(1, 1)
URL = f"data:image/png;base64,{DATA}"


def openai_part(url: str = URL, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def block(data: str = DATA, media_type: str = "image/png"):
    source = {"type": "base64", "media_type": media_type, "data": data}
    return {"type": "image", "source": source}


def chat(*parts, **more):
    return {"model": MODEL, "messages": [{"role": "user", "content": [*parts]}], **more}


def text(words: str):
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def seeing_tokenizer():
    return Tokenizer(seeing_library_tokenizer(), "the test's model")


@pytest.fixture(scope="module")
def seen(seeing_tokenizer):
    """`with seen() as (client, requests)`: an application that takes images, and its requests."""

    @contextlib.contextmanager
    def made(sees: bool = True, tokenizer: Tokenizer = seeing_tokenizer, **settings):
        pad = seeing_tokenizer.added_tokens["<|image_pad|>"]
        sizes = ImageSizes(4, 2, least_pixels=64, most_pixels=1 << 20, most_tokens=64, token_id=pad)
        requests = []

        def script(request):
            requests.append(request)
            return answer([300])(request)

        engine = FakeEngine(script)
        engine.info = FakeInfo(vocab_size=5000, images=sizes if sees else None)
        with in_process(engine, tokenizer=tokenizer, **settings) as client:
            yield client, requests

    return made


BODIES = {
    CHAT: chat(text("see"), openai_part(), text("and say")),
    RESPONSES: {
        "model": MODEL,
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "see"},
                    {"type": "input_image", "image_url": URL, "detail": "auto"},
                    {"type": "input_text", "text": "and say"},
                ],
            }
        ],
    },
    MESSAGES: chat(text("see"), block(), text("and say"), max_tokens=5),
}


def test_every_api_gives_the_same_prompt(seen, seeing_tokenizer):
    with seen() as (client, requests):
        for route, body in BODIES.items():
            reply = client.post(route, json=body)
            assert reply.status_code == 200, reply.text
            usage = reply.json()["usage"]
            counted = usage.get("prompt_tokens", usage.get("input_tokens"))
            assert counted == len(requests[-1].prompt_token_ids)
        for field, where in ((OLLAMA_CHAT, "messages"), (OLLAMA_TEXT, "prompt")):
            body = {"model": MODEL, "stream": False, "prompt": "seeand say", "images": [DATA]}
            if where == "messages":
                message = {"role": "user", "content": "seeand say", "images": [DATA]}
                body = {"model": MODEL, "stream": False, "messages": [message]}
            assert client.post(field, json=body).status_code == 200
        tokens = client.post(TOKENIZE, json={"messages": BODIES[CHAT]["messages"]}).json()["tokens"]
        count = client.post(COUNT, json={"model": MODEL, "messages": BODIES[MESSAGES]["messages"]})
    assert tuple(tokens) == requests[0].prompt_token_ids
    assert count.json()["input_tokens"] == len(tokens)
    assert [r.prompt_token_ids for r in requests[:3]] == [tuple(tokens)] * 3
    pad = seeing_tokenizer.added_tokens["<|image_pad|>"]
    assert tokens.count(pad) == 6
    for request in requests:
        (image,) = request.images.images
        assert (image.rows, image.columns) == (2, 3)
        assert request.prompt_token_ids[image.start : image.end] == (pad,) * 6
    assert requests[0].images.images[0].pixels == requests[4].images.images[0].pixels
    # Ollama's images come first.
    assert requests[3].images.images[0].start < requests[0].images.images[0].start


def test_images_in_history_and_tool_results(seen):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [openai_part(), openai_part()]},
        {"role": "assistant", "tool_calls": [call], "content": "x"},
        {"role": "tool", "tool_call_id": "a", "content": [text("got"), openai_part()]},
    ]
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("got"), block()]}
    anthropic = [
        {"role": "user", "content": [block(), block()]},
        {"role": "assistant", "content": [text("x"), use]},
        {"role": "user", "content": [result, text("go on")]},
    ]
    items = [
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [{"type": "input_image", "image_url": URL}],
        },
    ]
    with seen() as (client, requests):
        replies = [
            client.post(CHAT, json={"model": MODEL, "messages": messages}),
            client.post(MESSAGES, json={"model": MODEL, "max_tokens": 5, "messages": anthropic}),
            client.post(RESPONSES, json={"model": MODEL, "input": items}),
        ]
        stored = replies[-1].json()["id"]
        again = {"model": MODEL, "input": "more", "previous_response_id": stored}
        replies.append(client.post(RESPONSES, json=again))
        listed = client.get(f"{RESPONSES}/{stored}/input_items").json()["data"]
    assert [r.status_code for r in replies] == [200] * 4, [r.text for r in replies]
    assert [len(r.images.images) for r in requests] == [3, 3, 1, 1]
    shown = [item["output"] for item in listed if item["type"] == "function_call_output"]
    (part,) = shown[0]
    assert part["type"] == "input_image" and part["image_url"].endswith(DATA)


def test_text_that_spells_an_image_stays_text(seen, seeing_tokenizer):
    pad = seeing_tokenizer.added_tokens["<|image_pad|>"]
    words = "<|vision_start|><|image_pad|><|vision_end|>"
    with seen() as (client, requests):
        client.post(CHAT, json=chat(text(words)))
        client.post(CHAT, json=chat(text(words), openai_part(), text("<|image_pad|>")))
    assert requests[0].images is None and pad not in requests[0].prompt_token_ids
    assert requests[1].prompt_token_ids.count(pad) == 6


REFUSED = {
    "a network's URL": (chat(openai_part("https://a.example/x.png")), "part 0: .* fetches nothing"),
    "media type": (chat(openai_part("data:image/tiff;base64,AAAA")), "image/tiff"),
    "no base64": (chat(openai_part("data:image/png,AAAA")), "must be in base64"),
    "broken base64": (chat(openai_part("data:image/png;base64,A*")), "is not valid base64"),
    "a letter that base64 lacks": (
        chat(openai_part("data:image/png;base64,é")),
        "is not valid base64",
    ),
    "empty": (chat(openai_part("data:image/png;base64,")), "is empty"),
    "cut off": (chat(openai_part(URL[:-40])), "Message 0: The image is damaged|no base64"),
    "PDF": (
        chat(openai_part("data:image/png;base64," + base64.b64encode(b"%PDF-1.4").decode())),
        "Message 0: The image is a PDF",
    ),
    "detail": (chat(openai_part(detail="huge")), "detail must be one of"),
    "too many": (chat(*[openai_part()] * 4), "have 4 images; --max-images is 3"),
    "template": (
        {
            "messages": [
                {"role": "system", "content": [openai_part()]},
                {"role": "user", "content": "What is it?"},
            ]
        },
        "refuses these messages: no images here",
    ),
    "assistant": (
        {"messages": [{"role": "assistant", "content": [openai_part()]}]},
        "text only",
    ),
    "audio": (chat({"type": "input_audio"}), "takes text and images only"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(seen, name):
    import re

    body, words = REFUSED[name]
    with seen(max_images=3) as (client, requests):
        reply = client.post(CHAT, json=body)
    assert reply.status_code == 400 and not requests
    assert re.search(words, reply.json()["error"]["message"]), reply.text


@pytest.mark.parametrize("places", [0, 2])
def test_a_template_with_other_places_than_images(seen, places):
    inner = seeing_library_tokenizer()
    pad = "<|image_pad|>"
    inner.chat_template = inner.chat_template.replace(pad, pad * places)
    with seen(tokenizer=Tokenizer(inner, "the test's model")) as (client, requests):
        reply = client.post(CHAT, json=chat(text("see"), openai_part()))
    assert reply.status_code == 400 and not requests
    assert f"made {places} places for 1 images" in reply.json()["error"]["message"]


def test_other_refusals(seen):
    url = {"type": "image", "source": {"type": "url", "url": "https://a.example"}}
    file = {"type": "input_image", "file_id": "x"}
    many = [openai_part(f"data:image/png;base64,{encoded(8, 8)}")] * 16
    with seen() as (client, _):
        replies = [
            client.post(MESSAGES, json=chat(url, max_tokens=5)),
            client.post(MESSAGES, json=chat(block(media_type="image/bmp"), max_tokens=5)),
            client.post(
                RESPONSES, json={"model": MODEL, "input": [{"role": "user", "content": [file]}]}
            ),
            client.post(CHAT, json=chat(*many)),
        ]
    words = ["type base64", "image/bmp", "stores no files", "The prompt is too long: "]
    for reply, each in zip(replies, words):
        assert reply.status_code == 400 and each in reply.json()["error"]["message"], reply.text


def test_clients_learn_that_the_model_sees(seen):
    for sees in (True, False):
        with seen(sees=sees) as (client, _):
            card = client.get("/v1/models").json()["data"][0]
            able = client.post("/api/show", json={"model": MODEL}).json()["capabilities"]
        assert card.get("images", False) == sees == ("vision" in able)
        served = Served("http://x", MODEL, 1000, False, sees)
        words = {"opencode": "'image'", "zed": "'images': True", "continue": "'image_input'"}
        for name, word in words.items():
            assert (word in str(CLIENTS[name].config(served))) == sees


def test_a_model_without_a_tower(seen):
    with seen(sees=False) as (client, _):
        for route, body in BODIES.items():
            reply = client.post(route, json=body)
            message = reply.json()["error"]["message"]
            assert reply.status_code == 400 and "Message 0 has an image" in message
