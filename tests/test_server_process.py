"""A real server process on the bundled model, driven by the openai SDK and by raw HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.process import Server, running

STORY = "Write a short story about a fox named Anna who finds a lamp in the forest."
QUESTIONS = (
    STORY,
    "What is the capital of France?",
    "Sort these words: pear, apple, fig.",
    "Tell me a story about Ben the owl, a map and the river.",
)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    """One with MTP at depth 3 and one without."""
    with running("--enable-mtp", "--mtp-num-draft-tokens", "3") as first, running() as second:
        yield {"on": first, "off": second}


def ask(server: Server, question: str, **options: object) -> str:
    messages = [{"role": "user", "content": question}]
    options = {"max_tokens": 60, "temperature": 0, **options}
    answer = server.client.chat.completions.create(
        model="mlx-mtp-demo", messages=messages, **options
    )
    return answer.choices[0].message.content


def stream(server: Server, question: str, **options: object) -> str:
    messages = [{"role": "user", "content": question}]
    options = {"max_tokens": 60, "temperature": 0, **options}
    chunks = server.client.chat.completions.create(
        model="mlx-mtp-demo", messages=messages, stream=True, **options
    )
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_the_sdk_gets_an_answer_streaming_and_not(servers):
    server = servers["on"]
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    text = ask(server, STORY)
    assert "Anna" in text
    assert stream(server, STORY) == text
    assert [m.id for m in server.client.models.list()] == ["mlx-mtp-demo"]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 5},
        pytest.param({"temperature": 1.3, "top_p": 0.9, "seed": 6}, marks=pytest.mark.full),
    ],
    ids=["greedy", "seeded", "nucleus"],
)
def test_sixteen_at_once_equal_one_at_a_time_without_mtp(servers, options):
    alone = {q: ask(servers["off"], q, **options) for q in QUESTIONS}
    with ThreadPoolExecutor(16) as pool:
        for way in (ask, stream):
            jobs = [pool.submit(way, servers["on"], q, **options) for q in QUESTIONS * 4]
            assert [j.result() for j in jobs] == [alone[q] for q in QUESTIONS * 4]
    assert servers["on"].metric("spec_decode_num_accepted_tokens_total") > 0
    assert servers["off"].metric("spec_decode_num_draft_tokens_total") == 0


def test_a_client_that_goes_away_frees_its_row(servers):
    server = servers["on"]
    body = {
        "model": "mlx-mtp-demo",
        "messages": [{"role": "user", "content": STORY}],
        "max_tokens": 20000,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(8):
            next(lines)
        assert server.metric("num_requests_running") == 1
    server.wait_until_empty()
    body["stream"] = False
    patience = httpx.Timeout(60, read=1.0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=patience)
    server.wait_until_empty()
