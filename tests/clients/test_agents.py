"""opencode, Claude Code, Codex and Continue, installed from npm, against the server."""

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mlx_mtp.engine.request import Request
from mlx_mtp.text.tokenizer import Tokenizer
from tests.clients import captures
from tests.clients.agents import AGENTS, FOLDER, Agent, run
from tests.clients.npm import installed
from tests.server.conftest import Serve
from tests.support.fake_engine import FakeEngine, FakeInfo, Output, answer
from tests.support.process import running

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

LINE = "echo sum-$((40+2))"
PRINTED = "sum-42"
GOODBYE = "The command printed it."
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def place() -> Path:
    return installed(FOLDER)


def test_all_of_them_at_once_on_the_bundled_model(place: Path, tmp_path: Path) -> None:
    question = "What is the capital of France?"
    # A fixed number of drafts: on a busy machine the policy may choose none.
    drafts = ("--enable-mtp", "--mtp-num-draft-tokens", "2", "--dtype", "float32")
    with running(*drafts) as server, ThreadPoolExecutor(len(AGENTS)) as pool:
        homes = [tmp_path / agent.name for agent in AGENTS]
        ask = partial(run, place=place, url=server.url, question=question)
        outcomes = list(pool.map(lambda agent, home: ask(agent, home=home), AGENTS, homes))
        server.wait_until_empty()
        assert server.metric("spec_decode_num_accepted_tokens_total") > 0
    for agent, outcome in zip(AGENTS, outcomes):
        assert outcome.returncode == 0, f"{agent}: {outcome.stderr[-2000:]}"
        assert outcome.stdout.strip(), f"{agent} told nothing: {outcome.stderr[-2000:]}"


@pytest.mark.parametrize("agent", AGENTS, ids=str)
def test_a_tool_is_run_and_its_result_comes_back(
    agent: Agent, serve: Serve, tokenizer: Tokenizer, place: Path, tmp_path: Path, monkeypatch
) -> None:
    """The agent runs the tool that the model calls, and sends the result back.

    The engine is scripted, as the bundled model does not call these tools.
    """

    def script(request: Request) -> Iterator[Output]:
        prompt = tokenizer.text_of(request.prompt_token_ids)
        text = "A title"
        if PRINTED in prompt:
            text = GOODBYE
        elif re.search(rf'"name": "{agent.tool}"', prompt):
            text = "I run it.\n" + f"<tool_call>\n{json.dumps(agent.call(LINE))}\n</tool_call>"
        return answer(tokenizer.encode(text), sizes=(3,))(request)

    exchanges = captures.recording(monkeypatch)
    with serve(FakeEngine(script, FakeInfo(max_model_len=262_144))) as client:
        url = str(client.base_url)
        outcome = run(agent, place, url, tmp_path / "home", f"Run this: {LINE}")
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    assert GOODBYE in outcome.stdout
    # Claude Code prints this if it was not told the model's context length.
    assert "assumes a context window" not in outcome.stderr
    asked = [(sent, status) for sent, status in exchanges if sent.method == "POST"]
    assert {status for _, status in asked} == {200}
    asyncio.run(captures.keep(agent.name, agent.version, [sent for sent, _ in asked]))


def test_claude_code_goes_on_after_a_screenshot(
    serve: Serve, tokenizer: Tokenizer, place: Path, tmp_path: Path, monkeypatch
) -> None:
    """A picture that Claude Code reads is an image in a tool result; the chat goes on."""
    home = tmp_path / "home"
    picture = home / "project" / "shot.png"
    picture.parent.mkdir(parents=True)
    picture.write_bytes(PIXEL)
    read = {"name": "Read", "arguments": {"file_path": str(picture)}}

    def script(request: Request) -> Iterator[Output]:
        prompt = tokenizer.text_of(request.prompt_token_ids)
        text = "A title"
        if "[image left out" in prompt:
            text = GOODBYE
        elif '"name": "Read"' in prompt:
            text = f"<tool_call>\n{json.dumps(read)}\n</tool_call>"
        return answer(tokenizer.encode(text), sizes=(3,))(request)

    claude = next(agent for agent in AGENTS if agent.name == "claude")
    reads = replace(claude, command=lambda q: ["claude", "-p", q, "--allowedTools", "Read"])
    exchanges = captures.recording(monkeypatch)
    with serve(FakeEngine(script, FakeInfo(max_model_len=262_144))) as client:
        outcome = run(reads, place, str(client.base_url), home, "What is on shot.png?")
    assert outcome.returncode == 0 and GOODBYE in outcome.stdout, outcome.stderr[-2000:]
    asked = [(sent, status) for sent, status in exchanges if sent.method == "POST"]
    assert {status for _, status in asked} == {200}
    bodies = [asyncio.run(sent.body()) for sent, _ in asked]
    assert any(b'"image"' in body for body in bodies)
