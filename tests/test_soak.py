"""Many clients at once, some of whom leave: nothing is left over, nothing differs, nothing leaks.

An idle server answers each request before the load and after it. Each answer under load equals that
answer, and the text of an unfinished one is its beginning. The full form takes `SOAK_SECONDS` from
the environment. Its server is limited to 256 open files, some clients never read, and once a minute
a prompt ends the engine's thread.

Resident memory is sampled each second under load, after a first minute of load that does not count.
The plateau is the median of the second quarter of the time; the median of the last quarter is at
most 5% higher.
"""

import asyncio
import itertools
import json
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from tests.support.harness import MEASURED
from tests.support.process import CHAT, MODEL, STORY, Server, running, with_files, with_log
from tests.support.raw_http import request_bytes
from tests.support.waiting import wait_until
from tests.test_reliability_process import DEATH, WHOLE
from tests.test_server_process import WEATHER

_LONG = " ".join(f"In chapter {i} the fox named Anna finds lamp number {i}." for i in range(60))
QUESTIONS = (STORY, "What is the capital of France?", "Sort these words: pear, apple, fig.")
QUESTIONS += ("Tell me a story about Ben the owl.", "List uses of a rope.", f"{_LONG} Tell of 7.")
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "seed": 6, "repetition_penalty": 1.1},
)
_SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
FORMS: tuple[dict[str, Any], ...] = (
    {"guided_regex": "[a-z]{3,9}( [a-z]{3,9}){2,6}"},
    {"guided_json": {**_SCHEMA, "required": ["name", "age"]}},
    {"tools": [WEATHER], "tool_choice": "required"},
)
DEPTHS: tuple[dict[str, Any], ...] = ({}, *({"mtp": {"num_draft_tokens": k}} for k in (0, 4)))
# A request is a question, its sampling, and the form of the answer: 6 to 57 tokens, or 40.
KINDS = [
    *(
        (q, s, {"max_tokens": 6 + 3 * n})
        for n, (s, q) in enumerate(itertools.product(SAMPLING, QUESTIONS))
    ),
    *((STORY, s, {"max_tokens": 40, **form}) for s in SAMPLING[:2] for form in FORMS),
]
SECONDS_BETWEEN_DEATHS = 60.0
# Gauges that can change on an idle server: what is kept for later, and what is learned.
KEPT = ("mlx_mtp:prefix_cache_", "mlx_mtp:spec_decode_", "process_")


class KilledError(Exception):
    """The engine's thread ended during an answer."""


def wanted(number: int, **fields: Any) -> dict[str, Any]:
    """Returns the request with this number."""
    question, sampling, form = KINDS[number]
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, **sampling, **form, **fields}


def text_of(message: dict[str, Any]) -> str:
    """Returns the text of a message or delta, and the arguments of its calls."""
    calls = message.get("tool_calls") or ()
    arguments = [call["function"].get("arguments") or "" for call in calls]
    return "".join([message.get("content") or "", *arguments])


def check(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        assert "a bug in the scheduler" in answer["error"]["message"], answer
        raise KilledError
    return answer


async def whole(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    answer = await http.post(CHAT, json=body)
    return text_of(check(answer.json())["choices"][0]["message"])


async def streamed(
    http: httpx.AsyncClient, body: dict[str, Any], said: list[str], stop_after: int | None
) -> str | None:
    """Returns the text, which is added to `said`; None if the stream was left after some events."""
    async with http.stream("POST", CHAT, json={**body, "stream": True}) as events:
        if events.status_code != 200:
            check(json.loads(await events.aread()))
        async for line in events.aiter_lines():
            if line == "data: [DONE]":
                return "".join(said)
            if line.startswith("data: "):
                event = check(json.loads(line.removeprefix("data: ")))
                said += [text_of(choice["delta"]) for choice in event["choices"]]
                if stop_after is not None and len(said) >= stop_after:
                    return None
    raise AssertionError("the stream broke off")


async def one(http: httpx.AsyncClient, expected: dict[int, str], choose: random.Random) -> str:
    """Make a request of a random kind; returns the outcome."""
    number, kind = choose.choice([*expected]), choose.random()
    if kind < 0.05:
        refused = await http.post(CHAT, json={**wanted(number), "temperature": -1})
        assert refused.status_code == 400
        return "refused"
    body, said = wanted(number, **choose.choice(DEPTHS)), list[str]()
    stop_after = choose.randrange(1, 30) if 0.2 < kind < 0.5 else None
    try:
        async with asyncio.timeout(choose.uniform(0, 1.5) if kind < 0.25 else None):
            if kind < 0.9:
                text = await streamed(http, body, said, stop_after)
            else:
                text = await whole(http, body)
    except TimeoutError:
        text = None
    except KilledError:
        return "killed"
    finally:
        assert expected[number].startswith("".join(said)), f"request {number}: {said}"
    assert text in (None, expected[number]), f"request {number}: {text}"
    return "left" if text is None else "completed"


async def never_read(server: Server, choose: random.Random, until: float) -> None:
    """Ask for long answers and never read them."""
    more = {"logprobs": True, "top_logprobs": 20, "stream": True, "max_tokens": 1500, **WHOLE}
    sent = request_bytes("POST", CHAT, body=json.dumps({**wanted(0), **more}).encode())
    url = httpx.URL(server.url)
    while (left := until - time.monotonic()) > 0:
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect((url.host, url.port))
            raw.sendall(sent)
            # The server closes the connection after a minute.
            await asyncio.sleep(min(left, choose.uniform(1, 90)))


async def kill(http: httpx.AsyncClient, until: float) -> int:
    """End the engine's thread each minute; returns how often it ended."""
    count, due = 0, time.monotonic() + SECONDS_BETWEEN_DEATHS / 2
    while due < until:
        await asyncio.sleep(due - time.monotonic())
        answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": [5, 6, 7]})
        assert answer.status_code == 503, answer.text
        count, due = count + 1, due + SECONDS_BETWEEN_DEATHS
    return count


async def load(
    server: Server, clients: int, expected: dict[int, str], seconds: float, seed: int, hostile: bool
) -> tuple[Counter[str], list[int]]:
    """Run all clients until the time is over; requests that have begun are finished.

    Returns the outcomes, and samples of the server's resident memory.
    """
    until = time.monotonic() + seconds
    counts, resident = Counter[str](), list[int]()

    async def client(choose: random.Random) -> None:
        while time.monotonic() < until:
            counts[await one(http, expected, choose)] += 1

    async def watch() -> None:
        while time.monotonic() < until:
            resident.append(await asyncio.to_thread(lambda: server.resident_bytes))
            await asyncio.sleep(min(1.0, seconds / 8))

    async def deaths() -> None:
        counts["deaths"] += await kill(http, until)

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with (
        httpx.AsyncClient(base_url=server.url, limits=limits, timeout=300) as http,
        asyncio.TaskGroup() as group,
    ):
        for number in range(clients):
            group.create_task(client(random.Random(1000 * seed + number)))
        group.create_task(watch())
        if hostile:
            group.create_task(deaths())
            for number in range(4):
                group.create_task(never_read(server, random.Random(number), until))
    return counts, resident


async def alone(server: Server, numbers: Sequence[int]) -> dict[int, str]:
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as http:
        own = {**DEPTHS[1], "cache_salt": "alone"}
        return {number: await whole(http, wanted(number, **own)) for number in numbers}


def open_files(server: Server) -> int:
    """Returns the number of the server's open files; 0 if the system does not tell."""
    folder = Path(f"/proc/{server.process.pid}/fd")
    return len(os.listdir(folder)) if folder.exists() else 0


def idle_gauges(server: Server) -> dict[str, float]:
    return {name: n for name, n in server.gauges().items() if not name.startswith(KEPT)}


def soak(
    server: Server,
    clients: int,
    numbers: Sequence[int],
    warm_up: float,
    seconds: float,
    hostile: bool = False,
) -> tuple[float, int]:
    """Returns the memory in the last quarter divided by the plateau, and the engine's deaths.

    `hostile` adds clients that never read, and one that kills the engine's thread.
    """
    expected = asyncio.run(alone(server, numbers))
    before, _ = asyncio.run(load(server, clients, expected, warm_up, 1, hostile))
    restarts = server.metric("engine_restarts_total")
    server.wait_until_empty()
    files, gauges = min(open_files(server) for _ in range(10)), idle_gauges(server)
    counts, resident = asyncio.run(load(server, clients, expected, seconds, 2, hostile))
    quarter = max(1, len(resident) // 4)
    plateau, last = median(resident[quarter : 2 * quarter]), median(resident[-quarter:])
    MEASURED.append(
        f"soak of {seconds:g} s, {clients} clients: {dict(counts)}; resident "
        f"{plateau / 2**20:.0f} MiB in the second quarter, {last / 2**20:.0f} in the last"
    )
    wait_until(lambda: idle_gauges(server) == gauges)
    wait_until(lambda: open_files(server) <= files)
    assert counts["completed"] > 0 and counts["left"] > 0
    assert server.metric("engine_restarts_total") == restarts + counts["deaths"]
    assert server.metric("spec_decode_num_accepted_tokens_total") > 0
    assert server.metric("prefix_cache_hits_total") > 0
    assert server.http.get("/health").status_code == 200
    assert asyncio.run(alone(server, numbers)) == expected
    return last / plateau, before["deaths"] + counts["deaths"]


def test_a_short_soak(mtp_server: Server) -> None:
    soak(mtp_server, clients=16, numbers=range(0, len(KINDS), 5), warm_up=0.0, seconds=1.0)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_soak(tmp_path: Path) -> None:
    # The caches have to be full soon, so that any later growth is a fault.
    flags = ("--enable-mtp", "--dtype", "float32", "--max-num-seqs", "64")
    flags += ("--draft-answers-size", "1MiB", "--prefix-cache-size", "32MiB")
    log, seconds = tmp_path / "log", float(os.environ.get("SOAK_SECONDS", "180"))
    with running(*flags, code=with_log(log) + with_files(256) + DEATH) as server:
        numbers = range(len(KINDS))
        growth, deaths = soak(server, 64, numbers, warm_up=60.0, seconds=seconds, hostile=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    text = log.read_text()
    assert text.count("Traceback") == text.count("The engine died") == deaths, text[-5000:]
    assert growth <= 1.05
