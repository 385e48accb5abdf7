"""Many clients at once, some of whom leave: nothing is left over, nothing differs, nothing leaks.

The full form takes `SOAK_SECONDS` from the environment; 1800 is docs/reliability.md's promise.
"""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.harness import MEASURED
from tests.process import CHAT, MODEL, STORY, Server, running

_LONG = " ".join(f"In chapter {i} the fox named Anna finds lamp number {i}." for i in range(60))
QUESTIONS = (STORY, "What is the capital of France?", "Sort these words: pear, apple, fig.")
QUESTIONS += ("Tell me a story about Ben the owl.", "List uses of a rope.", f"{_LONG} Tell of 7.")
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "seed": 6, "repetition_penalty": 1.1},
)
DEPTHS: tuple[dict[str, Any], ...] = ({}, *({"mtp": {"num_draft_tokens": k}} for k in (0, 4)))


def wanted(number: int, **fields: Any) -> dict[str, Any]:
    """One of 18 requests, of 6 to 57 tokens."""
    question = QUESTIONS[number % len(QUESTIONS)]
    sampling = SAMPLING[number // len(QUESTIONS) % len(SAMPLING)]
    fields["messages"] = [{"role": "user", "content": question}]
    return {"model": MODEL, "max_tokens": 6 + 3 * number, **sampling, **fields}


async def whole(http: httpx.AsyncClient, body: dict[str, Any]) -> str | None:
    answer = await http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


async def streamed(
    http: httpx.AsyncClient, body: dict[str, Any], stop_after: int | None
) -> str | None:
    """The text; None for a stream that was left after some events."""
    text, seen = "", 0
    async with http.stream("POST", CHAT, json={**body, "stream": True}) as events:
        assert events.status_code == 200
        async for line in events.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                text += "".join(c["delta"].get("content") or "" for c in event["choices"])
                seen += 1
            if seen == stop_after:
                return None
    raise AssertionError("the stream broke off")


async def one(http: httpx.AsyncClient, expected: dict[int, str | None], choose: Any) -> str:
    """Make a request of a random kind; what came of it."""
    number, kind = choose.choice([*expected]), choose.random()
    if kind < 0.05:
        refused = await http.post(CHAT, json={**wanted(number), "temperature": -1})
        assert refused.status_code == 400
        return "refused"
    body = wanted(number, **choose.choice(DEPTHS))
    stop_after = choose.randrange(1, 30) if kind < 0.45 else None
    try:
        async with asyncio.timeout(choose.uniform(0, 1.5) if kind < 0.25 else None):
            if 0.25 <= kind < 0.7:
                text = await streamed(http, body, stop_after)
            else:
                text = await whole(http, body)
    except TimeoutError:
        text = None
    assert text in (None, expected[number]), f"request {number}"
    return "left" if text is None else "completed"


async def load(
    server: Server, clients: int, expected: dict[int, str | None], seconds: float, seed: int
) -> Counter[str]:
    """All clients, until the time is over; what has begun is finished. What came of it."""
    until = time.monotonic() + seconds
    counts = Counter[str]()

    async def client(number: int) -> None:
        choose = random.Random(1000 * seed + number)
        while time.monotonic() < until:
            counts[await one(http, expected, choose)] += 1

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with (
        httpx.AsyncClient(base_url=server.url, limits=limits, timeout=300) as http,
        asyncio.TaskGroup() as group,
    ):
        for number in range(clients):
            group.create_task(client(number))
    return counts


async def alone(server: Server, numbers: Sequence[int]) -> dict[int, str | None]:
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as http:
        own = {**DEPTHS[1], "cache_salt": "alone"}
        return {number: await whole(http, wanted(number, **own)) for number in numbers}


def settled(server: Server) -> int:
    """Its memory when an idle server has given back what its last steps held."""
    samples = []
    for _ in range(10):
        time.sleep(0.5)
        samples.append(server.resident_bytes)
    return min(samples)


def soak(
    server: Server, clients: int, numbers: Sequence[int], warm_up: float, seconds: float
) -> float:
    """The server's memory after it, as a share of that after the warm-up."""
    restarts = server.metric("engine_restarts_total")
    expected = asyncio.run(alone(server, numbers))
    asyncio.run(load(server, clients, expected, warm_up, seed=1))
    server.wait_until_empty()
    before = settled(server)
    counts = asyncio.run(load(server, clients, expected, seconds, seed=2))
    server.wait_until_empty()
    after = settled(server)
    grown = f"{before / 2**20:.0f} MiB before, {after / 2**20:.0f} after"
    MEASURED.append(f"soak of {seconds:g} s, {clients} clients: {dict(counts)}; resident {grown}")
    assert counts["completed"] > 0 and counts["left"] > 0
    assert server.metric("engine_restarts_total") == restarts
    assert server.metric("spec_decode_num_accepted_tokens_total") > 0
    assert server.http.get("/health").status_code == 200
    assert asyncio.run(alone(server, numbers)) == expected
    return after / before


def test_a_short_soak(mtp_server: Server) -> None:
    soak(mtp_server, clients=16, numbers=range(0, 18, 5), warm_up=0.0, seconds=1.0)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_soak() -> None:
    # What is kept of answers has to be full soon, so that what grows after that is a fault.
    flags = ("--enable-mtp", "--dtype", "float32", "--draft-answers-size", "1MiB")
    with running(*flags) as server:
        seconds = float(os.environ.get("SOAK_SECONDS", "180"))
        growth = soak(server, clients=64, numbers=range(18), warm_up=60.0, seconds=seconds)
        assert growth <= 1.05
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
