"""Signals, death and restart of a real server process on the bundled model."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.process import MODEL, Server, running, start

STORY = "Write a short story about a fox named Anna who finds a lamp in the forest."


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": STORY}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def ask(server: Server, max_tokens: int) -> httpx.Response:
    url = f"{server.url}/v1/chat/completions"
    return httpx.post(url, json=body(max_tokens), timeout=120)


def events(server: Server, max_tokens: int) -> Iterator[str]:
    url = f"{server.url}/v1/chat/completions"
    wanted = body(max_tokens, stream=True)
    with httpx.stream("POST", url, json=wanted, timeout=120) as answer:
        yield from (line for line in answer.iter_lines() if line)


def wait_until_taken(server: Server, jobs: Sequence[Future[httpx.Response]], beside: int) -> None:
    """Until the server has these requests and some beside them; one that is answered was taken."""
    deadline = time.monotonic() + 60
    while sum(job.done() for job in jobs) + server.metric("num_requests_held") < len(jobs) + beside:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    "sig", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
def test_a_signal_drains_and_the_exit_status_is_0(sig: signal.Signals) -> None:
    """Two rows run and two requests wait: all four are answered in full; the next is refused.

    A stream beside them, which the test leaves when it has seen enough, keeps the server from
    having drained before.
    """
    few = ("--max-num-seqs", "3", "--drain-timeout", "300")
    with running(*few) as server, ThreadPoolExecutor(4) as pool:
        beside = events(server, 20_000)
        next(beside)
        jobs = [pool.submit(ask, server, 150) for _ in range(4)]
        wait_until_taken(server, jobs, beside=1)
        server.process.send_signal(sig)
        while (health := httpx.get(f"{server.url}/health", timeout=30)).status_code == 200:
            time.sleep(0.01)
        assert health.json()["status"] == "draining"
        refused = ask(server, 5)
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) >= 1
        beside.close()
        answers = [job.result() for job in jobs]
        assert [a.status_code for a in answers] == [200] * 4
        texts = {a.json()["choices"][0]["message"]["content"] for a in answers}
        assert len(texts) == 1
        assert {a.json()["usage"]["completion_tokens"] for a in answers} == {150}
        assert server.process.wait(60) == 0


@pytest.mark.full
def test_at_the_limit_of_the_drain_streams_end_with_an_error() -> None:
    with running("--drain-timeout", "0.5") as server:
        lines = events(server, 20_000)
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        *_, error, done = lines
        assert "shutting down" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        assert server.process.wait(60) == 0


@pytest.mark.full
def test_a_second_signal_ends_at_once() -> None:
    with running("--drain-timeout", "1000") as server:
        lines = events(server, 20_000)
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{server.url}/health", timeout=30).status_code == 200:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        assert "shutting down" in [*lines][-2]
        assert server.process.wait(60) == 0


@pytest.mark.full
def test_killed_and_started_again_it_gives_the_same_answer() -> None:
    with running() as server:
        expected = ask(server, 40).json()["choices"]
        port = server.url.rsplit(":", 1)[1]
        lines = events(server, 20_000)
        next(lines)
        server.process.send_signal(signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            list(lines)
        assert server.process.wait(60) == -signal.SIGKILL
    # The address is free at once.
    with running("--port", port) as server:
        assert server.url.endswith(port)
        assert ask(server, 40).json()["choices"] == expected


HANG = """
import time
from mlx_mtp.engine.runner import ModelRunner
run = ModelRunner.run
def hanging(self, plan):
    if any(s.num_prompt == 3 for s in plan.decode):
        time.sleep(7 if not hasattr(self, "hung") else 0)
        self.hung = True
    return run(self, plan)
ModelRunner.run = hanging
"""


@pytest.mark.full
def test_health_tells_a_hang_while_it_lasts_and_recovers() -> None:
    """A step of a known kind takes 7 s."""
    with running("--calibration-seconds", "0", code=HANG) as server:
        for _ in range(3):
            assert ask(server, 30).status_code == 200
        url = f"{server.url}/v1/completions"
        short = {**body(30), "prompt": [5, 6, 7]}
        del short["messages"]
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(httpx.post, url, json=short, timeout=120)
            while (health := httpx.get(f"{server.url}/health", timeout=30)).status_code == 200:
                assert not job.done(), "the hang was not told"
                time.sleep(0.05)
            assert "a decoding step of 1 row" in health.json()["reason"]
            assert ask(server, 5).status_code == 503
            assert job.result().status_code == 200
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
        assert ask(server, 5).status_code == 200


DEATH = """
from mlx_mtp.engine import health
from mlx_mtp.engine.scheduler import Scheduler
# All of it is within a minute, however slow the machine is.
health.RESTART_WINDOW = 3600.0
schedule = Scheduler.schedule
def dying(self):
    if any(s.num_prompt == 3 for s in self._waiting):
        raise RuntimeError("a bug in the scheduler")
    return schedule(self)
Scheduler.schedule = dying
"""


def test_the_engine_dies_and_comes_back_three_times() -> None:
    with running(code=DEATH) as server:
        url = f"{server.url}/v1/completions"
        short = {**body(30), "prompt": [5, 6, 7]}
        del short["messages"]
        expected = ask(server, 30).json()["choices"]
        for number in range(1, 5):
            killed = httpx.post(url, json=short, timeout=120)
            assert killed.status_code == 503
            assert "a bug in the scheduler" in killed.json()["error"]["message"]
            if number <= 3:
                assert ask(server, 30).json()["choices"] == expected
                assert server.metric("engine_restarts_total") == number
        health = httpx.get(f"{server.url}/health", timeout=30)
        assert health.status_code == 503
        assert "a bug in the scheduler" in health.json()["reason"]
        assert ask(server, 30).status_code == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_a_log_that_nobody_reads_does_not_stop_the_server() -> None:
    """A pipe takes some 800 lines of the access log."""
    server = start("--enable-mtp")
    with server.process as process, httpx.Client(base_url=server.url, timeout=60) as client:
        try:
            for _ in range(2000):
                assert client.get("/health").status_code == 200
            assert ask(server, 5).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
