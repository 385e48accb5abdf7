"""`connect`, `top`, `chat`, `bench` with servers that answer anything: at most a line of error."""

import contextlib
import copy
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console

from mlx_mtp.bench.client import HttpServer
from mlx_mtp.bench.measure import Asking
from mlx_mtp.chat.session import Session, served_models
from mlx_mtp.cli import top
from mlx_mtp.cli.main import main
from mlx_mtp.console import clean
from mlx_mtp.errors import BenchError, UsageError
from tests.server.conftest import Serve
from tests.server.test_live import messages, streamed
from tests.support.fake_engine import FakeEngine, endless
from tests.support.foreign_values import STEERING, odd_versions, steers

CARDS = {"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}
BODIES = (b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"[1" + b"0" * 5000 + b"]", b"<html>")
CHUNK = {
    "choices": [
        {
            "delta": {
                "content": "a",
                "reasoning_content": "b",
                "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
            },
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 7, "completion_tokens": 4},
    "timings": {
        "draft_n": 4,
        "draft_n_accepted": 3,
        "draft_sources": {"mtp": {"draft_n": [4], "draft_n_accepted": [3]}},
    },
}
PLAN = {"weights": 4e9, "head": 1e8, "requests": 1e9, "prefix cache": 2e9}
CHOICE = {"num_rows": 1, "cost": 1.5, "num_tokens": 3.0, "drafts": {"mtp": 2, "copy": 0}}


def bodies(document: Any) -> Iterator[bytes]:
    yield from BODIES
    for each in (document, *odd_versions(document)):
        yield json.dumps(each).encode()


def check(shown: str, *, status: int | None = None) -> None:
    assert not steers(shown), repr(shown)
    if status is not None:
        assert status in (0, 2)
        assert (shown.count("\n") == 1 and shown.startswith("mlx-mtp: ")) == (status == 2), shown


def test_connect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for body in bodies(CARDS):
        answer = httpx.Response(200, content=body, request=httpx.Request("GET", "http://x"))
        monkeypatch.setattr(httpx, "get", lambda *_, answer=answer, **__: answer)
        found.append(main(["connect", "llm"], {}))
        shown = capsys.readouterr()
        check(shown.err if found[-1] else shown.out)
        assert shown.err.count("\n") == (found[-1] == 2), shown.err
    assert 0 < found.count(0) < len(found)
    assert main(["connect", "llm", "http://["], {}) == 2 and "address" in capsys.readouterr().err


def test_a_name_leaves_neither_comment_nor_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = {"id": "m\nrm -rf ~ #", "max_model_len": 4096}
    answer = httpx.Response(200, json={"data": [card]}, request=httpx.Request("GET", "http://x"))
    monkeypatch.setattr(httpx, "get", lambda *_, **__: answer)
    assert main(["connect", "cline"], {}) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "--served-model-name" in shown.err


@pytest.fixture(scope="module")
def state(serve: Serve) -> dict[str, Any]:
    """Returns a message of /live with values in all of its parts."""
    with serve(FakeEngine(endless(300))) as client:
        answer = streamed(client)
        next(answer)
        found: Any = next(each for each in messages(client) if each["rows"])
        answer.close()
    found["drafts"] = {"sources": {"mtp": {"tried": [9], "accepted": [8]}}, "choice": CHOICE}
    found["memory"]["plan"] = PLAN
    found["rejected"] = {"queue": 1}
    found["failures"] = [["/v1/models", 404, 2]]
    found["prefixes"]["evicted"] = {"room": 3}
    found.pop("history", None)
    return found


@pytest.mark.parametrize("is_terminal", [True, False])
def test_top(
    is_terminal: bool,
    state: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    later = copy.deepcopy(state)
    later["totals"]["time"] += 1.0
    monkeypatch.setattr(httpx, "Client", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(top, "_LINE_MESSAGES", 1)
    monkeypatch.setenv("FORCE_COLOR" if is_terminal else "NO_COLOR", "1")
    found = []
    values = (None, 10**400, STEERING) if is_terminal else (STEERING,)
    for version in [later, *odd_versions(state, values)]:
        monkeypatch.setattr(top, "_states", lambda _, version=version: iter([state, version]))
        found.append(main(["top"], {}))
        shown = capsys.readouterr()
        check(shown.out)
        check(shown.err, status=found[-1])
    assert found[0] == 0 and 0 < found.count(0) < len(found)
    assert ("\x1b[?1049h" in shown.out) == is_terminal


def test_top_where_no_server_of_ours_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = {"content-type": "text/event-stream"}
    for body in BODIES:
        answer = httpx.Response(200, content=b"data: " + body + b"\n\n", headers=kind)
        monkeypatch.setattr(httpx.HTTPTransport, "handle_request", lambda *_, answer=answer: answer)
        assert main(["top"], {}) == 2
        shown = capsys.readouterr().err
        check(shown, status=2)
        assert "differs" in shown
    for url in ("http://[", "ftp://x", "http://\udcff"):
        with contextlib.suppress(SystemExit):
            assert main(["top", url], {}) == 2
        assert capsys.readouterr().err.count("\n") == 1


def client_for(answer: httpx.Response) -> httpx.Client:
    return httpx.Client(base_url="http://x/v1", transport=httpx.MockTransport(lambda _: answer))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_chat(is_terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(force_terminal=is_terminal, width=80)
    for body in bodies(CHUNK):
        stream = b"data: " + body + b"\n\ndata: [DONE]\n\n"
        with client_for(httpx.Response(200, content=stream)) as client:
            session = Session(client, console, "m", {})
            session.ask("hi")
            # The next question can be sent: the chat is valid UTF-8.
            json.dumps(session.messages, ensure_ascii=False).encode()
    for body in bodies({"error": {"message": "it is too long"}}):
        with client_for(httpx.Response(400, content=body)) as client:
            Session(client, console, "m", {}).ask("hi")
    shown = capsys.readouterr()
    check(shown.out + shown.err)
    assert "no chat completion" in shown.out and r"\x1b]52;c;eA==\x07\x9b2J" in shown.out
    assert "The server answered 400: it is too long." in shown.out


def test_models_of_chat_and_bench() -> None:
    asking = Asking(max_tokens=1, temperature=0.0, ignore_eos=False)
    bench = HttpServer("http://x", asking)
    names = []
    for body in bodies(CARDS):
        answer = httpx.Response(200, content=body, request=httpx.Request("GET", "http://x"))
        with client_for(answer) as client, contextlib.suppress(UsageError):
            names += served_models(client)
        transport = httpx.MockTransport(lambda _, body=body: httpx.Response(200, content=body))
        bench._client = httpx.AsyncClient(transport=transport)
        with contextlib.suppress(BenchError):
            names.append(bench._runner.run(bench._first_model()))
    bench.__exit__()
    assert "m" in names and all(isinstance(name, str) for name in names)


def test_what_a_model_writes_in_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    """Character references and links in Markdown don't steer the terminal, even in pieces."""
    said = f"{STEERING} &#x202e;x &#27;]0; <http:a%1b]52;c;x%07> [click](file:///etc/passwd 'x')"
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    for reasoning in (False, True):
        chunks = [{"choices": [{"delta": {"content": piece}}]} for piece in said]
        if reasoning:
            chunks = [{"choices": [{"delta": {"reasoning_content": piece}}]} for piece in said]
        stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        with client_for(httpx.Response(200, text=stream)) as client:
            Session(client, console, "m", {}).ask("hi")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    check(shown)
    assert "file:///etc/passwd" in shown and clean(STEERING).split("\n")[0] in shown
