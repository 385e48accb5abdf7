"""opencode, Claude Code, Codex and Continue themselves, as npm has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from mlx_mtp.engine.request import Request
from mlx_mtp.server.tokenizer import Tokenizer
from tests.clients import captures
from tests.clients.agents import AGENTS, FOLDER, Agent, run
from tests.clients.npm import installed
from tests.clients.recorder import Exchange, Recorder, recording
from tests.harness import MEASURED
from tests.process import Server
from tests.server.conftest import Serve
from tests.server.fake_engine import FakeEngine, FakeInfo, Output, answer

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

QUESTION = "What is the capital of France?"
LINE = "echo sum-$((40+2))"
PRINTED = "sum-42"
GOODBYE = "The command printed it."
LONG = FakeInfo(max_model_len=262_144)


@pytest.fixture(scope="module")
def place() -> Path:
    return installed(FOLDER)


def generations(recorder: Recorder) -> list[Exchange]:
    """What was asked of the model itself."""
    return [e for e in recorder.exchanges if e.method == "POST"]


def test_all_of_them_at_once_on_the_bundled_model(
    server: Server, place: Path, tmp_path: Path
) -> None:
    def one(agent: Agent) -> tuple[CompletedProcess[str], Recorder]:
        with recording(server.url) as recorder:
            return run(agent, place, recorder.url, tmp_path / agent.name, QUESTION), recorder

    with ThreadPoolExecutor(len(AGENTS)) as pool:
        outcomes = list(pool.map(one, AGENTS))
    for agent, (outcome, recorder) in zip(AGENTS, outcomes):
        assert outcome.returncode == 0, f"{agent}: {outcome.stderr[-2000:]}"
        assert outcome.stdout.strip(), f"{agent} told nothing: {outcome.stderr[-2000:]}"
        asked = generations(recorder)
        assert asked and all(e.status == 200 for e in asked), agent
        MEASURED.append(
            f"{agent} {agent.version}: {len(asked)} requests, "
            f"answered {' '.join(outcome.stdout.split())[:60]!r}"
        )
    server.wait_until_empty()
    assert server.metric("spec_decode_num_accepted_tokens_total") > 0


@pytest.mark.parametrize("agent", AGENTS, ids=str)
def test_a_tool_is_run_and_its_result_comes_back(
    agent: Agent, serve: Serve, tokenizer: Tokenizer, place: Path, tmp_path: Path
) -> None:
    """The engine is scripted, so that there is a call: the bundled model makes none of these."""

    def script(request: Request) -> Iterator[Output]:
        prompt = b"".join(map(tokenizer.token_bytes, request.prompt_token_ids)).decode()
        text = "A title"
        if PRINTED in prompt:
            text = GOODBYE
        elif re.search(rf'"name": "{agent.tool}"', prompt):
            text = "I run it.\n" + f"<tool_call>\n{json.dumps(agent.call(LINE))}\n</tool_call>"
        return answer(tokenizer.encode(text), sizes=(3,))(request)

    with serve(FakeEngine(script, LONG)) as client, recording(str(client.base_url)) as recorder:
        outcome = run(agent, place, recorder.url, tmp_path / "home", f"Run this: {LINE}")
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    assert GOODBYE in outcome.stdout
    # Claude Code says so where it was not told of the model's context.
    assert "assumes a context window" not in outcome.stderr
    asked = generations(recorder)
    assert [e.status for e in asked] == [200] * len(asked)
    captures.keep(agent.name, agent.version, asked)
