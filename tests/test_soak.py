"""64 clients at once, many of whom leave: nothing is left over, nothing differs, nothing leaks.

The quick form takes some 20 s. The full one takes `SOAK_SECONDS` from the environment, 180 by
default; 1800 is the promise of docs/reliability.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.harness import MEASURED
from tests.process import MODEL, Server, running

CLIENTS = 64
CHAT = "/v1/chat/completions"
_LONG = " ".join(f"In chapter {i} the fox named Anna finds lamp number {i}." for i in range(60))
QUESTIONS = (
    "Write a short story about a fox named Anna who finds a lamp in the forest.",
    "What is the capital of France?",
    "Sort these words: pear, apple, fig.",
    "Tell me a story about Ben the owl, a map and the river.",
    "List three uses of a rope on a boat, with a sentence about each.",
    f"{_LONG} Tell the story of chapter 7.",
)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "seed": 6, "repetition_penalty": 1.1},
)
Wanted = dict[str, Any]


def wanted(number: int) -> Wanted:
    """One of 18 requests, of 6 to 57 tokens."""
    question = QUESTIONS[number % len(QUESTIONS)]
    sampling = SAMPLING[number // len(QUESTIONS) % len(SAMPLING)]
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "max_tokens": 6 + 3 * number, **sampling}


NUM_WANTED = len(QUESTIONS) * len(SAMPLING)


@dataclass
class Tally:
    """What came of the requests."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


async def whole(client: httpx.AsyncClient, body: Wanted) -> str:
    answer = await client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


async def streamed(client: httpx.AsyncClient, body: Wanted, stop_after: int | None) -> str | None:
    """The text; None for one that was left after some events."""
    text, seen = "", 0
    async with client.stream("POST", CHAT, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return text
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""
            seen += 1
            if stop_after is not None and seen >= stop_after:
                return None
    raise AssertionError("the stream broke off")


async def one(
    client: httpx.AsyncClient, choose: random.Random, expected: list[str], tally: Tally
) -> None:
    """One request, of a random kind."""
    number, kind = choose.randrange(NUM_WANTED), choose.random()
    body = wanted(number)
    if kind < 0.05:
        refused = await client.post(CHAT, json={**body, "temperature": -1})
        assert refused.status_code == 400
        tally.counts["refused"] += 1
        return
    if kind < 0.25:
        try:
            async with asyncio.timeout(choose.uniform(0, 1.5)):
                text = await whole(client, body)
        except TimeoutError:
            tally.counts["left"] += 1
            return
    elif kind < 0.45:
        stop_after = choose.randrange(1, 30)
        text = await streamed(client, body, stop_after)
        if text is None:
            tally.counts["left"] += 1
            return
    elif kind < 0.7:
        text = await whole(client, body)
    else:
        text = await streamed(client, body, None)
    tally.counts["completed"] += 1
    if text != expected[number]:
        tally.wrong.append(f"request {number}: {text!r} instead of {expected[number]!r}")


async def load(server: Server, seconds: float, expected: list[str], seed: int) -> Tally:
    """All clients, until the time is over; what has begun is finished."""
    tally, until = Tally(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=CLIENTS)

    async def client(number: int, http: httpx.AsyncClient) -> None:
        choose = random.Random(1000 * seed + number)
        while time.monotonic() < until:
            await one(http, choose, expected, tally)

    async with (
        httpx.AsyncClient(base_url=server.url, limits=limits, timeout=300) as http,
        asyncio.TaskGroup() as group,
    ):
        for number in range(CLIENTS):
            group.create_task(client(number, http))
    return tally


async def alone(server: Server) -> list[str]:
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as http:
        return [await whole(http, wanted(number)) for number in range(NUM_WANTED)]


@pytest.mark.parametrize(
    ("warm_up", "seconds", "growth"),
    [
        # Too short for the allocators and the prefix cache to come to rest.
        pytest.param(3.0, 4.0, 2.0, id="short"),
        pytest.param(
            60.0,
            float(os.environ.get("SOAK_SECONDS", "180")),
            1.05,
            marks=[pytest.mark.full, pytest.mark.timeout(7200)],
            id="long",
        ),
    ],
)
def test_soak(warm_up: float, seconds: float, growth: float) -> None:
    with running("--enable-mtp", "--dtype", "float32") as server:
        expected = asyncio.run(alone(server))
        warm = asyncio.run(load(server, warm_up, expected, seed=1))
        server.wait_until_empty()
        before = server.resident_bytes
        tally = asyncio.run(load(server, seconds, expected, seed=2))
        server.wait_until_empty()
        after = server.resident_bytes
        MEASURED.append(
            f"soak of {seconds:g} s with {CLIENTS} clients: {dict(tally.counts)}; resident "
            f"{before / 2**20:.0f} MiB before, {after / 2**20:.0f} after"
        )
        assert tally.counts["completed"] > 0
        assert tally.counts["left"] > 0
        assert not [*warm.wrong, *tally.wrong]
        assert after <= growth * before
        assert server.metric("engine_restarts_total") == 0
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        assert asyncio.run(alone(server)) == expected
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
