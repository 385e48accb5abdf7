"""Signals, death and restart of a real server process on the bundled model."""

import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mlx_mtp.engine.health import HANG_SECONDS
from tests.support.process import CHAT, MODEL, STORY, Server, running
from tests.support.waiting import wait_until

MESSAGES = [{"role": "user", "content": STORY}]
WHOLE: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def ask(server: Server, max_tokens: int) -> httpx.Response:
    return server.post(CHAT, messages=MESSAGES, max_tokens=max_tokens, **WHOLE)


def ask_with_three_tokens(server: Server) -> httpx.Response:
    """Send the prompt that the broken servers below recognize."""
    return server.post("/v1/completions", prompt=[5, 6, 7], max_tokens=30, **WHOLE)


def events(server: Server) -> Iterator[str]:
    """Yields the lines of a stream that ends only when it is stopped."""
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20_000, "stream": True, **WHOLE}
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=120) as answer:
        yield from (line for line in answer.iter_lines() if line)


def wait_until_unhealthy(server: Server) -> dict[str, str]:
    while (health := server.http.get("/health")).status_code == 200:
        time.sleep(0.01)
    assert health.status_code == 503
    return health.json()


def wait_until_taken(server: Server, jobs: Sequence[Future[httpx.Response]], beside: int) -> None:
    """Wait until the server has these requests and `beside` others; answered ones count too."""

    def taken() -> float:
        return sum(job.done() for job in jobs) + server.metric("num_requests_held")

    wait_until(lambda: taken() >= len(jobs) + beside)


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Reset signals for processes started here, which would ignore them under nohup or after &."""
    numbers = signal.SIGHUP, signal.SIGQUIT
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    ("sig", "read_log"),
    [
        (signal.SIGTERM, False),
        *(
            pytest.param(each, True, marks=pytest.mark.full)
            for each in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        ),
    ],
)
def test_a_signal_drains_and_the_exit_status_is_0(sig: signal.Signals, read_log: bool) -> None:
    """Two rows run and two requests wait: all four are answered in full; the next is refused.

    A stream beside them keeps the drain from ending too early. Other signals change nothing.
    """
    few = ("--max-num-seqs", "3", "--drain-timeout", "300", "--calibration-seconds", "0")
    with running(*few, read_log=read_log) as server, ThreadPoolExecutor(4) as pool:
        for _ in range(300):
            # A pipe holds about 64 KiB: the log has each path twice, so these requests fill it.
            assert server.http.get("/" + "x" * 120).status_code == 404
        beside = events(server)
        next(beside)
        jobs = [pool.submit(ask, server, 60) for _ in range(4)]
        wait_until_taken(server, jobs, beside=1)
        for other in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGSTOP, signal.SIGCONT):
            server.process.send_signal(other)
        server.process.send_signal(sig)
        assert wait_until_unhealthy(server)["status"] == "draining"
        refused = ask(server, 5)
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) >= 1
        beside.close()
        answers = [job.result() for job in jobs]
        assert [a.status_code for a in answers] == [200] * 4
        assert len({a.json()["choices"][0]["message"]["content"] for a in answers}) == 1
        assert {a.json()["usage"]["completion_tokens"] for a in answers} == {60}
        assert server.process.wait(60) == 0


@pytest.mark.full
def test_killed_and_started_again_it_gives_the_same_answer() -> None:
    with running() as server:
        expected = ask(server, 40).json()["choices"]
        port = server.url.rsplit(":", 1)[1]
        lines = events(server)
        next(lines)
        server.process.send_signal(signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            list(lines)
        assert server.process.wait(60) == -signal.SIGKILL
    # The address is free immediately.
    with running("--port", port) as server:
        assert server.url.endswith(port)
        assert ask(server, 40).json()["choices"] == expected


@pytest.mark.full
def test_a_process_that_was_stopped_did_not_hang() -> None:
    with running("--calibration-seconds", "0") as server:
        lines = events(server)
        for _ in range(50):  # the first two steps of a kind can take any time
            next(lines)
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(HANG_SECONDS + 2)
        server.process.send_signal(signal.SIGCONT)
        for _ in range(50):
            assert server.http.get("/health").status_code == 200
        assert next(lines)
        lines.close()


HANG = """
import time
from mlx_mtp.engine.runner import ModelRunner
run = ModelRunner.run
def hanging(self, plan):
    if any(row.sequence.num_prompt == 3 for row in plan.decode):
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
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(ask_with_three_tokens, server)
            assert "a decoding step of 1 row" in wait_until_unhealthy(server)["reason"]
            assert ask(server, 5).status_code == 503
            assert job.result().status_code == 200
        assert server.http.get("/health").status_code == 200
        assert ask(server, 5).status_code == 200


# A prompt of three tokens ends the engine's thread.
DEATH = """
from mlx_mtp import backend
backend.prepare()  # Before anything imports mlx.
from mlx_mtp.engine.scheduler import Scheduler
schedule = Scheduler.schedule
def dying(self):
    if any(s.num_prompt == 3 for s in self._waiting):
        raise RuntimeError("a bug in the scheduler")
    return schedule(self)
Scheduler.schedule = dying
"""
# The restart window covers the whole test, however slow the machine is.
LONG_MINUTE = "from mlx_mtp.engine import health; health.RESTART_WINDOW = 3600.0"


def test_the_engine_dies_and_comes_back_three_times(mtp_server: Server) -> None:
    with running("--no-enable-mtp", "--dtype", "float32", code=f"{LONG_MINUTE}\n{DEATH}") as server:
        expected = ask(server, 20).json()["choices"]
        # This server has no MTP, and gives the same answer.
        assert 'source="mtp"' not in server.http.get("/metrics").text
        assert ask(mtp_server, 20).json()["choices"] == expected
        for number in range(1, 5):
            killed = ask_with_three_tokens(server)
            assert killed.status_code == 503
            assert "a bug in the scheduler" in killed.json()["error"]["message"]
            if number <= 3:
                assert ask(server, 20).json()["choices"] == expected
                assert server.metric("engine_restarts_total") == number
        assert "a bug in the scheduler" in wait_until_unhealthy(server)["reason"]
        assert ask(server, 30).status_code == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
