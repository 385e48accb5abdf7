"""Pictures from real clients: the SDKs, two agents, and Open WebUI's form of an upload."""

import base64
import contextlib
import io
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import anthropic
import httpx
import numpy as np
import ollama
import openai
import pytest
from PIL import Image

from mlx_mtp.engine.request import Request
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.text.tokenizer import Tokenizer
from mlx_mtp.vision.images import ImageSizes, read_image
from tests.clients import captures, test_open_webui
from tests.clients.agents import AGENTS, FOLDER, Agent, run
from tests.clients.npm import installed
from tests.clients.shapes import CHAT
from tests.server.conftest import MODEL, Serve
from tests.support.fake_engine import FakeEngine, FakeInfo, Output, answer
from tests.vision.served import seeing_library_tokenizer

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

# Prepended to the bundled model's template, which accepts only text: images become placeholders.
PLACES = """\
{%- set all = namespace(messages=[]) %}
{%- for m in messages %}
  {%- if m.content is string or not m.content %}{% set all.messages = all.messages + [m] %}
  {%- else %}
    {%- set text %}{% for p in m.content %}
      {%- if p.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
      {%- else %}{{ p.text }}{% endif %}
    {%- endfor %}{% endset %}
    {%- set all.messages = all.messages + [dict(m, content=text)] %}
  {%- endif %}
{%- endfor %}
{%- set messages = all.messages %}
"""
GOODBYE = "It shows noise."
QUESTION = "What is on it?"
Seeing = Callable[[Callable[[Request], str]], AbstractContextManager[str]]


def screenshot() -> bytes:
    noise = np.random.default_rng(1).integers(0, 256, (60, 90, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    return buffer.getvalue()


PNG = screenshot()
DATA = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"


@pytest.fixture(scope="module")
def seeing_tokenizer() -> Tokenizer:
    from transformers import AutoTokenizer

    inner = seeing_library_tokenizer()
    own = AutoTokenizer.from_pretrained(str(BUNDLED_MODEL)).chat_template
    inner.chat_template = PLACES + own
    return Tokenizer(inner, "the test's model")


@pytest.fixture(scope="module")
def sizes(seeing_tokenizer: Tokenizer) -> ImageSizes:
    return ImageSizes(token_id=seeing_tokenizer.added_tokens["<|image_pad|>"])


@pytest.fixture
def seeing(serve: Serve, seeing_tokenizer: Tokenizer, sizes: ImageSizes) -> Seeing:
    """`with seeing(text_of) as url`: a server whose answers are `text_of(request)`."""

    @contextlib.contextmanager
    def made(text_of: Callable[[Request], str]) -> Iterator[str]:
        def script(request: Request) -> Iterator[Output]:
            return answer(seeing_tokenizer.encode(text_of(request)), sizes=(3,))(request)

        info = FakeInfo(max_model_len=262_144, vocab_size=5000, images=sizes)
        with serve(FakeEngine(script, info), tokenizer=seeing_tokenizer) as client:
            yield str(client.base_url)

    return made


def test_sdks_and_open_webui(seeing: Seeing, sizes: ImageSizes, tmp_path: Path) -> None:
    """Every client delivers the same picture, streamed or not, and receives the answer."""
    file = tmp_path / "shot.png"
    file.write_bytes(PNG)
    asked: list[Request] = []

    def text_of(request: Request) -> str:
        asked.append(request)
        return GOODBYE

    text = {"type": "text", "text": QUESTION}
    part = {"type": "image_url", "image_url": {"url": URL}}
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    block = {"type": "image", "source": source}
    items = [
        {"type": "input_text", "text": QUESTION},
        {"type": "input_image", "image_url": URL, "detail": "high"},
    ]
    told: list[str | None] = []
    with seeing(text_of) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            chat = {"model": MODEL, "messages": [{"role": "user", "content": [text, part]}]}
            whole = client.chat.completions.create(**chat)
            told.append(whole.choices[0].message.content)
            with client.chat.completions.stream(**chat) as stream:
                told.append(stream.get_final_completion().choices[0].message.content)
            sent = [{"role": "user", "content": items}]
            told.append(client.responses.create(model=MODEL, input=sent).output_text)
        with anthropic.Anthropic(base_url=url, auth_token="none", max_retries=0) as client:
            chat = {"model": MODEL, "messages": [{"role": "user", "content": [block, text]}]}
            told.append(client.messages.create(**chat, max_tokens=99).content[0].text)
            with client.messages.stream(**chat, max_tokens=99) as stream:
                told.append(stream.get_final_text())
            counted = client.messages.count_tokens(**chat).input_tokens
        own = ollama.Client(host=url)
        with contextlib.closing(own._client):
            message = {"role": "user", "content": QUESTION, "images": [PNG]}
            told.append(own.chat(MODEL, [message]).message.content)
            told.append(own.generate(MODEL, QUESTION, images=[file]).response)
            assert "vision" in own.show(MODEL).capabilities
        body = test_open_webui.chat(QUESTION)
        body["model"] = MODEL
        body["messages"][-1]["content"].append(part)
        headers = test_open_webui.HEADERS
        posted = httpx.post(f"{url}{CHAT}", json=body, headers=headers, timeout=60)
        told.append(test_open_webui.read(posted)["content"])
    assert told == [GOODBYE] * 8 and len(asked) == 8
    expected = read_image(PNG, sizes)
    for request in asked:
        (image,) = request.images.images
        assert image.pixels == expected
    assert whole.usage.prompt_tokens == len(asked[0].prompt_token_ids)
    assert counted == len(asked[3].prompt_token_ids)


def test_claude_code_sees_a_screenshot_of_its_history(
    seeing: Seeing, seeing_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model sees the picture that Claude Code's tool reads, as an image in a tool result."""
    home = tmp_path / "home"
    picture = home / "project" / "shot.png"
    read = {"name": "Read", "arguments": {"file_path": str(picture)}}

    def text_of(request: Request) -> str:
        if request.images is not None:
            return GOODBYE
        prompt = seeing_tokenizer.text_of(request.prompt_token_ids)
        called = f"<tool_call>\n{json.dumps(read)}\n</tool_call>"
        return called if '"name": "Read"' in prompt else "A title"

    (claude,) = [agent for agent in AGENTS if agent.name == "claude"]
    reads = replace(claude, command=lambda q: ["claude", "-p", q, "--allowedTools", "Read"])
    check(reads, seeing, text_of, picture, monkeypatch)


def test_opencode_sends_a_picture(
    seeing: Seeing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "home" / "project" / "shot.png"
    (opencode,) = [agent for agent in AGENTS if agent.name == "opencode"]
    sends = replace(opencode, command=lambda q: ["opencode", "run", q, "--file", str(picture)])

    def text_of(request: Request) -> str:
        return "A title" if request.images is None else GOODBYE

    check(sends, seeing, text_of, picture, monkeypatch)


def check(
    agent: Agent,
    seeing: Seeing,
    text_of: Callable[[Request], str],
    picture: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, home = installed(FOLDER), picture.parents[1]
    picture.parent.mkdir(parents=True)
    picture.write_bytes(PNG)
    exchanges = captures.recording(monkeypatch)
    with seeing(text_of) as url:
        outcome = run(agent, place, url, home, QUESTION)
    assert outcome.returncode == 0 and GOODBYE in outcome.stdout, outcome.stderr[-2000:]
    assert {status for sent, status in exchanges if sent.method == "POST"} == {200}
