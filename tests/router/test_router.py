"""The parent of several models, with fake processes."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from mlx_mtp.router import fleet as fleet_module
from mlx_mtp.router.child import Child
from mlx_mtp.safe_path import command_of
from mlx_mtp.server.adopted import PARENT
from mlx_mtp.server.http.access import digest_of
from tests.router.conftest import Routed, routed
from tests.support.raw_http import error_of, exchange, request_bytes
from tests.support.waiting import wait_until

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA = "/v1/messages", "/api/chat"
GENERATING = (CHAT, TEXT, RESPONSES, MESSAGES, OLLAMA)


def live_state(live: httpx.Response) -> dict[str, Any]:
    """Returns the first message of /live."""
    return dict(json.loads(next(live.iter_lines()).removeprefix("data: ")))


@pytest.fixture(scope="module")
def plain() -> Iterator[Routed]:
    """A router for tests that leave models loaded and don't depend on which are loaded."""
    with routed("a", "b") as client:
        yield client


def test_what_a_client_sends_and_gets_passes_through_unchanged(plain: Routed) -> None:
    with contextlib.nullcontext(plain) as client:
        headers = {"User-Agent": "me", "X-MLX-MTP-Client": "forged/1.2.3.4/0", "x-other": "1"}
        answer = client.post(f"{CHAT}?q=%20x", json={"model": "b", "n": 2}, headers=headers)
        seen = answer.json()
        assert answer.headers["x-request-id"] == "id-b"
        assert (seen["model"], seen["path"]) == ("b", f"{CHAT}?q=%20x")
        assert seen["body"] == {"model": "b", "n": 2}
        assert (seen["headers"]["user-agent"], seen["headers"]["x-other"]) == ("me", "1")
        assert seen["headers"]["host"] == client.base_url.netloc.decode()
        assert seen["headers"]["x-mlx-mtp-client"].startswith("/127.0.0.1/")
        # by another name, without a name, and with the tag that Ollama's clients add
        for name, served in (("B", "b"), ("", "a"), ("a:latest", "a")):
            assert client.chat(name).json()["model"] == served
        assert client.chat("b", status=418).status_code == 418
        unknown = client.chat("c")
        assert "'a', 'b'" in error_of(unknown, CHAT, 404)
        assert error_of(client.post(CHAT, content=b"{"), CHAT, 400)


def test_a_stream_comes_as_it_is_sent_and_its_end_reaches_the_process(plain: Routed) -> None:
    with contextlib.nullcontext(plain) as client:
        text = client.chat("a", stream=True, chunks=50).text
        assert text.count("data: {") == 51
        assert text.endswith("data: [DONE]\n\n")
        short = json.dumps({"model": "a", "stream": True, "chunks": 50}).encode()
        old = request_bytes("POST", CHAT, body=short).replace(b"HTTP/1.1", b"HTTP/1.0")
        assert exchange(client, old).body.count(b"data: {") == 51  # although HTTP/1.0 has no chunks
        body = {"model": "a", "stream": True, "chunks": 1000, "pause": 0.05}
        with client.stream("POST", CHAT, json=body) as answer:
            pieces = answer.iter_text()
            for number in range(3):  # long before the end is sent
                assert next(pieces).count("data: ") == 1, number
            assert client.states()["a"] == "busy"
        wait_until(lambda: client.states()["a"] == "ready")

        def cancelled() -> bool:
            return 'fake_cancelled{model="a"} 1' in client.get("/metrics").text

        wait_until(cancelled)


def test_a_slow_reader_holds_up_the_process_and_not_the_parent(plain: Routed) -> None:
    body = {"model": "a", "stream": True, "chunks": 1000, "size": 20_000}
    client = plain
    with client.stream("POST", CHAT, json=body) as answer:
        pieces = answer.iter_raw()
        first = next(pieces)
        assert client.chat("a").status_code == 200
        assert "fake_open" in client.get("/metrics").text
        rest = first + b"".join(pieces)
        assert rest.count(b'"number"') == 1000


def test_the_least_recently_asked_idle_model_makes_room() -> None:
    with routed("a", "b", "c") as client:
        assert set(client.states().values()) == {"on disk"}
        for name in ("a", "b", "a", "c"):
            assert client.chat(name).json()["model"] == name
        assert client.states() == {"a": "ready", "b": "on disk", "c": "ready"}
        assert [client.count("loads", name) for name in "abc"] == [1, 1, 1]
        assert [client.count("unloads", name) for name in "abc"] == [0, 1, 0]
        shown = {each["name"]: each for each in client.get("/api/ps").json()["models"]}
        assert {name: each["size_vram"] for name, each in shown.items()} == {"a": 1, "c": 1}
        assert [each["name"] for each in client.get("/api/tags").json()["models"]] == [
            "a",
            "b",
            "c",
        ]


def test_a_busy_model_is_never_ended_but_drains_for_one_that_waits_long() -> None:
    with routed("a", "b", limit=1, switch_after=0.2) as client, ThreadPoolExecutor() as pool:

        def ask(name: str, pause: float) -> tuple[str, float]:
            answer = client.chat(name, pause=pause)
            return answer.json()["model"], time.monotonic()

        assert ask("a", 0.0)
        first = pool.submit(ask, "a", 0.8)
        wait_until(lambda: client.states()["a"] == "busy")
        other = pool.submit(ask, "b", 0.0)
        wait_until(lambda: client.model("a").draining)
        late = pool.submit(ask, "a", 0.0)
        assert [each.result()[0] for each in (first, other, late)] == ["a", "b", "a"]
        assert first.result()[1] < other.result()[1] < late.result()[1]
        assert (client.count("loads", "a"), client.count("loads", "b")) == (2, 1)


def test_too_many_or_too_long_waiting_requests_are_refused_with_numbers() -> None:
    long = {"model": "a", "stream": True, "chunks": 10_000, "pause": 0.1}
    with ThreadPoolExecutor() as pool, routed("a", "b", limit=1, max_queue=1) as client:
        with client.stream("POST", CHAT, json=long):
            waits = pool.submit(client.chat, "b")
            wait_until(lambda: bool(client.model("b").waiting))
            with client.stream("GET", "/live") as live:
                assert live_state(live)["waiting"] == 1
            refused = client.chat("b")
            assert "is full: 1 of 1" in error_of(refused, CHAT, 503)
            assert refused.headers["retry-after"] == "2"
            fleet = client.fleet
            fleet.config, fleet._max_queue = replace(fleet.config, model_timeout=0.3), 2
            assert "within 0.3 seconds" in error_of(client.chat("b"), CHAT, 504)
            fleet.config = replace(fleet.config, model_timeout=60.0)
        assert waits.result().json()["model"] == "b"
    with routed("a", "b", needs={"b": 2}, limit=2, pinned="a") as client:
        wait_until(lambda: client.states()["a"] == "ready")
        assert "needs 2 bytes" in error_of(client.chat("b"), CHAT, 503)


def test_idle_models_leave_after_their_time_and_by_ollamas_field() -> None:
    with routed("a", "b", "c", keep_alive=0.0, pinned="c") as client:
        client.chat("a")
        wait_until(lambda: client.states() == {"a": "on disk", "b": "on disk", "c": "ready"})
        hi = [{"role": "user", "content": "hi"}]
        body = {"model": "b", "messages": hi, "stream": False, "keep_alive": -1}
        assert client.post(OLLAMA, json=body).json()["model"] == "b"
        assert client.states()["b"] == "ready"
        gone = client.post("/api/generate", json={"model": "b", "keep_alive": 0}).json()
        assert (gone["done_reason"], gone["done"]) == ("unload", True)
        wait_until(lambda: client.states()["b"] == "on disk")
        wrong = client.post(OLLAMA, json=body | {"keep_alive": "soon"})
        assert "'soon' is not a time" in error_of(wrong, OLLAMA, 400)


def test_a_stream_that_waits_for_a_load_gets_signs_of_life_and_errors_of_its_api(
    log: pytest.LogCaptureFixture,
) -> None:
    def waited(client: Routed, path: str, **fields: Any) -> httpx.Response:
        return client.post(path, json={"model": "slow", "stream": True} | fields)

    settings = {"keep_alive_seconds": 0.1}
    loading = {"slow": "0.5", "also": "0.5"}
    with routed(*loading, how=loading, settings=settings) as client, ThreadPoolExecutor() as pool:
        refused = pool.submit(waited, client, CHAT, model="also", status=400)
        text = waited(client, CHAT).text
        assert text.startswith(": keep-alive\n\n")
        assert text.endswith("data: [DONE]\n\n")
        assert refused.result().status_code == 200
        assert '\n\ndata: {"error": {"message": "as asked"' in refused.result().text
    late: dict[str, Any] = {"how": {"slow": "30"}, "model_timeout": 1.0}
    with routed("slow", settings=settings, **late) as client, ThreadPoolExecutor() as pool:
        answers = pool.map(lambda path: waited(client, path).text, GENERATING)
        for path, text in zip(GENERATING, answers):
            last = text.rstrip("\n").split("\n")
            if path == OLLAMA:
                assert "'slow'" in json.loads(last[-1])["error"]
                continue
            assert last[0] == ": keep-alive"
            is_plain = path in (CHAT, TEXT)
            assert last[-1] == "data: [DONE]" if is_plain else last[-2] == "event: error"
            fields = json.loads(last[-3 if is_plain else -1].removeprefix("data: "))
            if path == RESPONSES:
                assert (fields["type"], fields["sequence_number"]) == ("error", 0)
            else:
                fields = fields["error"]
            assert "'slow'" in fields["message"]
        wait_until(lambda: "slow: its process was ended by signal 9" in log.text)
    assert "Unknown child process" not in log.text


def test_a_model_that_breaks_again_and_again_is_refused_with_its_last_words() -> None:
    with routed("bad", "good", how={"bad": "fail"}) as client:
        for path in GENERATING[:3]:
            answer = client.post(path, json={"model": "bad"})
            message = error_of(answer, path, 503)
            assert "could not be loaded" in message
            assert "bad is broken" in message
        for path in GENERATING:
            answer = client.post(path, json={"model": "bad", "stream": True})
            message = error_of(answer, path, 503)
            assert "again and again" in message
            assert "bad is broken" in message
            assert 0 < int(answer.headers["retry-after"]) <= 60
        assert client.count("loads", "bad") == 3
        assert client.chat("good").status_code == 200


def test_when_a_process_dies_its_requests_end_with_an_error_and_the_next_starts_it(
    log: pytest.LogCaptureFixture,
) -> None:
    with routed("a") as client:
        assert "ended before its answer" in error_of(client.chat("a", die=0), CHAT, 503)
        url = str(client.base_url)
        fields: dict[str, Any] = {"model": "a", "messages": [{"role": "user", "content": "x"}]}
        dying = {"chunks": 5, "die": 2}
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as of_openai,
            pytest.raises(openai.APIError, match="ended before"),
        ):
            list(of_openai.chat.completions.create(**fields, stream=True, extra_body=dying))
        with (
            anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as of_anthropic,
            pytest.raises(anthropic.APIError, match="ended before"),
        ):
            list(
                of_anthropic.messages.create(
                    **fields, max_tokens=5, stream=True, extra_body={**dying, "chunks": 4}
                )
            )
        wait_until(lambda: client.states() == {"a": "on disk"})
        lost = [each for each in log.records if "ended before its answer" in each.getMessage()]
        assert [each.levelname for each in lost] == ["WARNING"] * 3
        for line, path in zip(lost[1:], (CHAT, MESSAGES)):  # streams that had begun
            assert line.getMessage().startswith(f"{path} 200 ")
            assert "id-a: The process of the model 'a'" in line.getMessage()
        # After three deaths within a minute the model is refused.
        assert client.chat("a").status_code == 503
        assert client.count("deaths", "a") == 3


@pytest.mark.full
def test_a_process_that_hangs_while_it_loads_or_is_idle_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "HEALTH_SECONDS", 1.0)
    slow = {"slow": "600"}
    with routed("slow", "a", how=slow, model_timeout=3.0) as client, ThreadPoolExecutor() as pool:
        loading = pool.submit(client.chat, "slow")
        wait_until(lambda: client.model("slow").child)
        child: Any = client.model("slow").child
        os.kill(child._process.pid, signal.SIGSTOP)
        assert loading.result().status_code in (503, 504)
        wait_until(lambda: client.states()["slow"] == "on disk")
        first = pid_of(client, "a")
        os.kill(first, signal.SIGSTOP)  # while it is idle
        wait_until(lambda: client.states()["a"] == "on disk")
        assert pid_of(client, "a") != first
        assert (client.count("deaths", "slow"), client.count("deaths", "a")) == (1, 1)


def pid_of(client: Routed, name: str) -> int:
    return int(client.chat(name).json()["pid"])


@pytest.mark.full
def test_requests_wait_for_the_next_process_while_one_that_hangs_is_being_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed, kill = threading.Event(), Child.kill

    def kill_late(child: Child) -> None:
        killed.set()
        asyncio.get_running_loop().call_later(0.3, kill, child)

    monkeypatch.setattr(fleet_module, "HEALTH_SECONDS", 1.0)
    with routed("a") as client, ThreadPoolExecutor() as pool:
        first = pid_of(client, "a")
        os.kill(first, signal.SIGKILL)  # while it is idle
        wait_until(lambda: client.states() == {"a": "on disk"})
        second = pid_of(client, "a")
        monkeypatch.setattr(Child, "kill", kill_late)
        stopped = pool.submit(client.chat, "a", hang=True)
        wait_until(lambda: client.states() == {"a": "busy"})
        os.kill(second, signal.SIGSTOP)
        assert killed.wait(30)
        assert len({first, second, pid_of(client, "a")}) == 3
        assert "ended before its answer" in error_of(stopped.result(), CHAT, 503)
        assert (client.count("deaths", "a"), client.count("loads", "a")) == (2, 3)


def test_clients_are_told_apart_by_key_and_the_processes_get_no_key() -> None:
    keys = ("one", "two")
    with routed("a", settings={"api_keys": keys}) as client:
        assert error_of(client.chat("a"), CHAT, 401)
        assert client.count("loads", "a") == 0
        for key in keys:
            headers = {"Authorization": f"Bearer {key}"}
            seen = client.post(CHAT, json={"model": "a"}, headers=headers).json()["headers"]
            digest, address, seconds = seen["x-mlx-mtp-client"].split("/")
            assert (digest, address) == (digest_of(key.encode()).hex(), "127.0.0.1")
            assert 0 <= float(seconds) < 60
            assert "authorization" not in seen
        assert client.get("/health").json() == {"status": "ok"}
    foreign = {"Origin": "https://evil.example"}
    with routed("a") as client:
        assert client.post(CHAT, json={"model": "a"}, headers=foreign).status_code == 403
        assert client.post(CHAT, json={}, headers={"Host": "evil.example"}).status_code == 403


def test_views_of_all_models() -> None:
    with routed("a", "b") as client:
        shown = client.post("/api/show", json={"model": "b"}).json()
        assert shown["model_info"]["fake.context_length"] == 1000
        assert set(client.states().values()) == {"on disk"}  # Nothing was loaded for it.
        assert client.get("/v1/responses/resp_a").status_code == 404
        assert client.get(CHAT).json()["data"] == []
        for name in "ab":
            client.chat(name)
        assert client.get("/v1/responses/resp_b").json()["model"] == "b"
        assert "give one of a, b" in error_of(client.get(CHAT), CHAT, 400)
        text = client.get("/metrics").text
        assert text.count("# HELP fake_open") == 1
        assert {f'fake_open{{model="{name}"}}' in text for name in "ab"} == {True}
        assert 'mlx_mtp:router_loads_total{model="a"} 1.0' in text
        assert client.get("/v1/models/B").json()["id"] == "B"
        assert client.get("/v1/models/c").status_code == 404
        assert client.get("/api/version").json()["version"]
        assert client.get("/clients").status_code == 200
        with client.stream("GET", "/live") as live:
            first = live_state(live)
        assert first["server"]["states"] == {"a": "ready", "b": "ready"}
        assert first["totals"]["generation_tokens"] == 0


def test_what_a_model_does_not_do_is_refused_without_loading_it() -> None:
    with routed("a", "e", embeds="e") as client:
        wait_until(lambda: "able" in client.model("e").plan)
        assert "makes embeddings" in error_of(client.chat("e"), CHAT, 400)
        for path in ("/v1/embeddings", "/api/embed"):
            refused = client.post(path, json={"model": "a", "input": "x"})
            assert "makes no embeddings" in error_of(refused, path, 400)
        assert set(client.states().values()) == {"on disk"}
        seen = client.post("/api/embed", json={"model": "e", "input": "x", "keep_alive": 0}).json()
        assert (seen["model"], seen["path"]) == ("e", "/api/embed")
        cards = client.get("/v1/models").json()["data"]
        assert [card.get("embeddings", False) for card in cards] == [False, True]
        assert client.post("/api/show", json={"model": "e"}).json()["capabilities"] == ["embedding"]


def test_the_parent_drains_and_then_ends_what_is_open() -> None:
    with routed("a", settings={"drain_timeout": 0.5}) as client, ThreadPoolExecutor() as pool:
        pid = pid_of(client, "a")
        short = pool.submit(client.chat, "a", pause=0.3)
        long = pool.submit(client.chat, "a", stream=True, chunks=1000, pause=0.1)
        wait_until(lambda: client.model("a").busy == 2)
        client.server.handle_exit(signal.SIGTERM, None)
        assert error_of(client.chat("a"), CHAT, 503) == "The server is shutting down."
        assert short.result().status_code == 200
        assert '{"error":' in long.result().text.replace('"error": ', '"error":')
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_watches_its_parent_before_it_does_anything_else(tmp_path: Path) -> None:
    """The parent's end closes standard input; here it is closed from the start."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "1"))
        done = subprocess.run(
            [*command_of("mlx_mtp"), "serve", "--no-such-flag"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=[listening.fileno()],
            env={**os.environ, PARENT: f"{listening.fileno()} 0"},
            cwd=tmp_path.parent,
            timeout=60,
        )
    # It ended before it parsed its command line, and removed the socket's directory.
    assert (done.returncode, done.stderr) == (1, b"")
    assert not tmp_path.exists()


@pytest.mark.full
def test_random_models_and_cancels_lose_nothing() -> None:
    with routed("a", "b", "c", switch_after=0.2) as client, ThreadPoolExecutor(16) as pool:
        most, done = [0], threading.Event()

        def watch() -> None:
            while not done.is_set():
                counts = sum(each.share for each in client.fleet.models)
                most[0] = max(most[0], counts)
                time.sleep(0.001)

        watcher = threading.Thread(target=watch)
        watcher.start()

        def ask(number: int) -> bool:
            name = "abc"[number * 7 % 3]
            body = {"model": name, "stream": True, "chunks": 5, "pause": 0.01, "id": number}
            with client.stream("POST", CHAT, json=body) as answer:
                lines = answer.iter_lines()
                seen = json.loads(next(lines).removeprefix("data: "))
                assert (seen["model"], seen["body"]["id"]) == (name, number)
                return number % 5 == 0 or "data: [DONE]" in list(lines)

        assert all(pool.map(ask, range(60)))
        done.set()
        watcher.join()
        assert most[0] == 2
        wait_until(lambda: not any(each.busy for each in client.fleet.models))
        assert not any(each.waiting for each in client.fleet.models)


def test_the_parent_loads_nothing_heavy() -> None:
    code = (
        "import sys\nimport mlx_mtp.router.app, mlx_mtp.cli.serve_command\n"
        "heavy = ('mlx', 'mlx_lm', 'numpy', 'transformers', 'tokenizers', 'llguidance')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/2.0\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (request_bytes("POST", CHAT, {"Content-Length": "5", "Transfer-Encoding": "chunked"}), 400),
        (request_bytes("POST", CHAT, {"X": "y" * 20_000}), 431),
        (request_bytes("POST", CHAT, {"Content-Length": "3000"}), 413),
        (request_bytes("POST", CHAT, {"Content-Length": "300"}), 408),
        (request_bytes("POST", CHAT, {"Content-Encoding": "gzip"}, b"{}"), 415),
        (request_bytes("POST", CHAT, body=b'{"model": 5}'), 400),
        (request_bytes("POST", CHAT, body=b"[" * 1000), 400),
        (request_bytes("POST", CHAT, body=b'{"model":"a","model":"b"}'), 400),
        (request_bytes("DELETE", CHAT), 405),
        (request_bytes("GET", "/v1/nowhere"), 404),
    ],
)
def test_what_is_no_request_reaches_no_process(hostile: Routed, sent: bytes, status: int) -> None:
    assert exchange(hostile, sent).status == status
    assert hostile.states() == {"a": "on disk"}


@pytest.fixture(scope="module")
def hostile() -> Iterator[Routed]:
    with routed("a", settings={"body_timeout": 0.3, "max_body_bytes": 2000}) as client:
        yield client


def test_clients_that_stall_or_close_their_half_hold_nothing_up() -> None:
    settings = {"stall_timeout": 0.5, "max_connections": 20}
    with routed("a", settings=settings) as client:
        body = json.dumps({"model": "a", "pause": 0.3}).encode()
        assert exchange(client, request_bytes("POST", CHAT, body=body), end=True).status == 200
        flood = json.dumps({"model": "a", "stream": True, "chunks": 100_000, "size": 10_000})
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect(client.address)
            raw.sendall(request_bytes("POST", CHAT, body=flood.encode()))
            wait_until(lambda: client.states()["a"] == "busy")
            assert client.chat("a").status_code == 200
            wait_until(lambda: client.states()["a"] == "ready")  # The stalled client was cut off.
