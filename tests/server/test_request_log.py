"""The log: one line per request with its reason, progress, and never a prompt or a key."""

import json
import logging
import re
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from mlx_mtp import logs
from mlx_mtp.engine.request import PrefillProgress as Prefill
from mlx_mtp.engine.stats import EngineStats
from mlx_mtp.errors import StepError
from mlx_mtp.server.live import ProgressLog
from mlx_mtp.server.routes import ROUTES
from tests.server.conftest import Serve, tokenizer_with
from tests.support.fake_engine import FakeEngine, answer, out
from tests.support.in_process import (
    CHAT,
    COUNT,
    GENERATING,
    GOOD,
    MESSAGES,
    OLLAMA_CHAT,
    RESPONSES,
    in_process,
)

KEY, SECRET = "sk-not-to-be-seen", "a prompt that nobody may read"
ASK = [{"role": "user", "content": SECRET}]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """Returns a function: the lines logged since its last call, as objects of --log-format json."""
    caplog.set_level(logging.DEBUG, "mlx_mtp")

    def taken() -> list[dict[str, Any]]:
        found = [json.loads(logs.JsonFormatter().format(record)) for record in caplog.records]
        caplog.clear()
        return [line for line in found if line["logger"] == "mlx_mtp.server.http.middleware"]

    return taken


@pytest.mark.parametrize("path", GENERATING)
def test_an_answer_ends_with_one_line(path: str, lines: Callable[[], list[dict[str, Any]]]) -> None:
    with in_process(FakeEngine(answer([300] * 5))) as client:
        for stream in (False, True):
            response = client.post(path + "/" * stream, json=GOOD[path] | {"stream": stream})
            (line,) = lines()
            assert line["id"] == response.headers["x-request-id"]
            assert line["id"] in response.text or path.startswith("/api/")
            assert (line["level"], line["method"], line["status"]) == ("info", "POST", 200)
            assert line["client"] == "127.0.0.1" and line["path"].rstrip("/") == path
            few = {"max_tokens": 5} if path == MESSAGES else {}
            assert line["completion_tokens"] == few.get("max_tokens", 6)
            assert line["draft_tokens"] >= line["accepted_tokens"] > 0
            assert line["prompt_tokens"] > line["cached_tokens"] == 0
            assert line["seconds"] >= line["first_token_seconds"] > 0
            assert line["tokens_per_second"] > 0 and "reason" not in line
            tokens = f"{line['prompt_tokens']}+{line['completion_tokens']} tokens"
            message = rf"{re.escape(path)}/?  200 [\d.]+ s, {re.escape(tokens)}, [\d.]+/s, "
            message += rf"{line['accepted_percent']}% accepted"
            assert re.fullmatch(message.replace("  ", " "), line["message"])


def broken(request: Any) -> Iterator[Any]:
    yield out(300)
    yield out(finish="error", error=StepError("the step failed"))


@pytest.mark.parametrize(
    ("method", "path", "status", "reason", "more"),
    [
        ("POST", CHAT, 400, "temperature is -1.0", {"json": GOOD[CHAT] | {"temperature": -1}}),
        ("POST", CHAT, 404, "'other' is not served", {"json": {"model": "other", "messages": ASK}}),
        ("POST", CHAT, 401, "requires its API key", {"headers": {"x-api-key": "no"}}),
        ("POST", CHAT, 400, "JSON", {"content": f'{{"{SECRET}'}),
        ("POST", CHAT, 403, "does not answer to the name", {"headers": {"host": "evil.example"}}),
        ("POST", CHAT, 500, "the step failed", {"json": GOOD[CHAT]}),
        ("POST", CHAT, 200, "the step failed", {"json": GOOD[CHAT] | {"stream": True}}),
        ("GET", f"/nope?key={KEY}", 404, "no route GET /nope", {}),
        ("PUT", CHAT, 405, "Method Not Allowed", {}),
    ],
)
def test_a_failure_says_its_reason(
    method: str,
    path: str,
    status: int,
    reason: str,
    more: dict[str, Any],
    lines: Callable[[], list[dict[str, Any]]],
) -> None:
    with in_process(FakeEngine(broken), api_keys=(KEY,)) as client:
        more = {**more, "headers": {"x-api-key": KEY, **more.get("headers", {})}}
        client.request(method, path, **more)
        (line,) = lines()
        assert line["status"] == status and reason in line["reason"]
        assert line["message"].endswith(f", {line['id']}: {line['reason']}")
        assert line["message"].startswith(f"{method} " if method != "POST" else path)
        assert line["message"].endswith(line["reason"])
        assert (line["level"] == "warning") == ("step failed" in reason)


def test_every_get_has_its_head_and_watchers_are_not_logged(
    lines: Callable[[], list[dict[str, Any]]],
) -> None:
    quiet = "/health", "/metrics", "/page/{name:path}"
    with in_process() as client:
        for methods, path, *_ in ROUTES:
            if "GET" in methods and path != "/live":  # an endless stream
                full, head = client.get(path), client.head(path)
                assert (head.status_code, head.headers.get("content-type")) == (
                    full.status_code,
                    full.headers.get("content-type"),
                )
                assert len(lines()) == (0 if path in quiet else 2)


def test_no_prompt_and_no_key_at_any_level_without_the_flag(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "mlx_mtp")
    headers = {"x-api-key": KEY, "authorization": f"Bearer {KEY}"}

    def ask(client: httpx.Client) -> None:
        for path in GENERATING:
            good = json.dumps(GOOD[path]).replace('"hi"', json.dumps(SECRET))
            for body in (good, good[:-1], good.replace(": ", f': ["{SECRET}", ', 1)):
                for sent in (headers, {"x-api-key": f"{KEY}x"}):
                    client.post(f"{path}?key={KEY}", content=body, headers=sent)

    def shown() -> str:
        text = logs.TextFormatter("%H")
        return "".join(
            text.format(r) + logs.JsonFormatter().format(r)
            for r in caplog.records
            if r.name.startswith(("mlx_mtp", "uvicorn"))
        )

    for script in (answer([300]), broken):
        with in_process(FakeEngine(script), api_keys=(KEY,)) as client:
            ask(client)
    text = shown()
    assert text.count(" 200 ") >= 4 and text.count(" 401 ") >= 12
    assert KEY not in text and SECRET not in text
    with in_process(api_keys=(KEY,), log_prompts=True) as client:
        ask(client)
    assert KEY not in shown() and shown().count(f"the prompt is {SECRET}") >= 1


def test_what_is_no_http_is_logged_too(
    serve: Serve, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    with (
        serve(FakeEngine(answer([300]))) as client,
        socket.create_connection(client.address, timeout=30) as raw,
    ):
        raw.sendall(b"GET / HTTP/9.9 what\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 400 ")
    # A client can read the answer before the line is written, but this server has ended.
    (line,) = lines()
    assert line["status"] == 400 and "not valid HTTP" in line["reason"]


def test_a_line_is_one_line_whatever_a_client_writes() -> None:
    faked = "a\n12:00 INFO faked\x1b[2J\u202e"
    record = logging.makeLogRecord({"name": "mlx_mtp.x", "msg": "%(a)s", "args": {"a": faked}})
    for text in (logs.TextFormatter("%H:%M").format(record), logs.JsonFormatter().format(record)):
        assert "\n" not in text and "\x1b" not in text and "\u202e" not in text
    assert json.loads(text)["a"] == faked
    wrapped = logs.TextFormatter("%H:%M", 40).format(
        logging.makeLogRecord({"name": "uvicorn.error", "msg": "word " * 40})
    )
    assert all(len(line) <= 40 for line in wrapped.split("\n")) and "uvicorn.error" in wrapped


FORGED = "no\n12:00:00 INFO forged\x1b[2J\x9b\u202e\u2028\udc80"


def test_a_traceback_forges_no_line() -> None:
    try:
        raise ValueError(FORGED) from OSError(FORGED)
    except ValueError:
        what = {"name": "mlx_mtp.x", "msg": "failed: %s", "args": (FORGED,), "levelname": "ERROR"}
        record = logging.makeLogRecord({**what, "exc_info": sys.exc_info()})
    for formatter in (logs.TextFormatter("%H:%M:%S"), logs.JsonFormatter()):
        line = formatter.format(record)
        assert line.isprintable() and "test_request_log.py" in line and line.isascii()
    assert json.loads(line)["exception"].endswith(f"ValueError: {FORGED}")
    shown = logs.TextFormatter("%H:%M:%S", 60).format(record).split("\n")
    assert "Traceback (most recent call last):" in map(str.strip, shown)
    assert shown[0][2] == ":" and all(line.startswith(" " * 15) for line in shown[1:])
    assert all(line.isprintable() and len(line) <= 60 for line in shown)
    # transformers has its own handler, and warns with values of a model's config.json.
    record.exc_info = None
    assert logging.Formatter("[transformers] %(message)s").format(record).isprintable()


def test_a_templates_words_reach_client_and_log_as_text(
    caplog: pytest.LogCaptureFixture, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    template = f"{{{{ raise_exception({FORGED!a}) }}}}"
    with in_process(tokenizer=tokenizer_with(template)) as client:
        for path in (CHAT, RESPONSES, MESSAGES, COUNT, OLLAMA_CHAT):
            for stream in {False, path != COUNT}:
                response = client.post(path, json=GOOD[path] | ({"stream": True} if stream else {}))
                assert response.status_code == 400, path
                assert "INFO forged" in json.dumps(response.json())
                assert all(record.exc_info is None for record in caplog.records)
                (line,) = lines()
                assert line["status"] == 400 and "INFO forged" in line["reason"]


def test_progress_every_ten_seconds_while_there_is_work() -> None:
    progress = ProgressLog(EngineStats(), 0.0)
    busy = EngineStats(
        num_requests_running=2,
        num_requests_waiting=1,
        kv_usage=0.5,
        prompt_tokens=1000,
        generation_tokens=50,
        num_draft_tokens=40,
        num_accepted_tokens=30,
    )

    def told(stats: EngineStats, now: float) -> list[str]:
        return [text % fields for text, fields in progress.lines(stats, now)]

    assert told(busy, 9.0) == []
    assert told(busy, 10.0) == ["2 running, 1 waiting, 100+5.0 tokens/s, 75% accepted, KV 50%"]
    assert ", 0+0.0 tokens/s" in told(busy, 21.0)[0] and told(busy, 22.0) == []
    assert told(EngineStats(prompt_tokens=1000, generation_tokens=50), 40.0) == []


def test_a_long_prefill_is_told_every_five_seconds_and_a_short_one_never() -> None:
    progress = ProgressLog(EngineStats(), 0.0)
    found = {
        now: [fields for _, fields in progress.lines(stats, float(now))]
        for now in range(1, 9)
        for stats in [
            EngineStats(
                prefills={"a": Prefill(8000, 0, 500 * now, 1.5), f"b{now}": Prefill(2, 0, 1, now)}
            )
        ]
    }
    assert [now for now, told in found.items() if told] == [7]
    told = {"id": "a", "total": 8000, "done": 3500, "percent": 43.75, "seconds": 5.5}
    assert found[7] == [told]
