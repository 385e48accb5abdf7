"""Templates and tokenizers that never end, take all memory or fail break only their request."""

import asyncio
import errno
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_mtp.config import ServerConfig
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.server.app import create_app
from mlx_mtp.server.http.admission import FairExecutor
from mlx_mtp.text.sandbox import text_worker
from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL, library_tokenizer
from tests.support.fake_engine import FakeEngine, answer
from tests.support.in_process import CHAT, COUNT, GOOD, TEXT, TOKENIZE, in_process
from tests.support.raw_http import error_of
from tests.support.waiting import wait_until
from tests.support.wire_help import chat_body

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# The first message, and what the template then does; Jinja would precompute constants.
TRAPS = {
    "loop": LOOP,
    "power": "{{ 7 ** (10 ** (7 + messages | length)) }}",
    "memory": "{{ 'x' * (10 ** (10 + messages | length)) }}",
}
SECONDS = 1.5


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled tokenizer with traps: each z becomes a thousand, four times in turn."""
    path = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, path)
    file = path / "tokenizer.json"
    read = json.loads(file.read_text("utf-8"))
    grow = {"type": "Replace", "pattern": {"String": "z"}, "content": "z" * 1000}
    read["normalizer"] = {"type": "Sequence", "normalizers": [grow] * 4}
    file.write_text(json.dumps(read), "utf-8")
    traps = "".join(
        f"{{% if messages[0].content == '{word}' %}}{does}{{% endif %}}"
        for word, does in TRAPS.items()
    )
    template = library_tokenizer().chat_template
    (path / "chat_template.jinja").write_text(traps + template, "utf-8")
    return path


@pytest.fixture(scope="module")
def client(hostile: Path) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_worker, "MAX_WORKER_BYTES", 1 << 28)
        patch.setattr(text_worker, "NUM_WORKERS", 1)
        settings = {"text_workers": hostile, "template_seconds": SECONDS}
        with in_process(tokenizer=Tokenizer.load(hostile), **settings) as client:
            yield client


def saying(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, saying("power"), "messages", f"more than {SECONDS:g} s"),
    (CHAT, saying("memory"), "messages", "refuses these messages"),
    (CHAT, saying("zz"), "messages", "tokenizer took too much memory"),
]
MORE: list[tuple[str, dict[str, Any], str, str]] = [
    (TOKENIZE, saying("loop"), "messages", f"more than {SECONDS:g} s"),
    (TEXT, {"prompt": "zz"}, "prompt", "tokenizer took too much memory"),
    (TOKENIZE, {"content": "zz"}, "content", "tokenizer took too much memory"),
]


@pytest.mark.parametrize(
    ("path", "fields", "param", "word"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)],
)
def test_what_a_models_files_do_costs_its_request_alone(
    client: httpx.Client, path: str, fields: dict[str, Any], param: str, word: str
) -> None:
    body = (GOOD[path] if path != TOKENIZE else {}) | fields
    refused = client.post(path, json=body)
    assert word in error_of(refused, path, 400)
    assert refused.json()["error"]["param"] == param
    assert client.post(CHAT, json=GOOD[CHAT]).status_code == 200


def test_a_tokenizer_that_grows_at_the_start_ends_its_process(
    hostile: Path, tmp_path: Path
) -> None:
    """A worker's memory is limited before it loads anything, so it ends even without a parent."""
    shutil.copy(hostile / "tokenizer_config.json", tmp_path)
    text = (hostile / "tokenizer.json").read_text("utf-8").replace("z" * 1000, "a" * 1000)
    (tmp_path / "tokenizer.json").write_text(text.replace('{"String": "z"}', '{"String": "a"}'))
    command = [sys.executable, "-m", "mlx_mtp.text.sandbox.text_worker"]
    header = json.dumps([str(tmp_path), 1 << 28]) + "\n"
    done = subprocess.run(command, input=header, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and not done.stdout


@pytest.mark.usefixtures("one_worker")
def test_a_worker_that_cannot_be_started_is_tried_again_until_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_worker, "_RETRY_SECONDS", 0.05)
    begin = subprocess.Popen

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with in_process(text_workers=BUNDLED_MODEL) as client:
        assert client.post(CHAT, json=GOOD[CHAT]).is_success
        for refusal in (refused, lambda *_, **more: begin([sys.executable, "-c", ""], **more)):
            monkeypatch.setattr(subprocess, "Popen", refusal)
            for helper in client._transport._inner.app.state.context.prompter.workers._helpers:
                helper.kill()
                helper._process.wait()
            while client.get("/health").is_success:
                failed = client.post(CHAT, json=GOOD[CHAT])
                error = failed.json()["error"]
                assert (failed.status_code, error["code"]) == (503, "unavailable")
                assert "can't be started" in error["message"]
                assert failed.headers["Retry-After"]
            assert "can't be started" in client.get("/health").json()["reason"]
            monkeypatch.setattr(subprocess, "Popen", begin)
            wait_until(lambda: client.get("/health").is_success)
            assert client.post(CHAT, json=GOOD[CHAT]).is_success


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 503, "was killed"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 503, "was killed"),
        ("os.kill(os.getpid(), signal.SIGALRM)", 400, "more than"),
        ("os.abort()", 400, "or broke"),
        ("os._exit(1)", 400, "or broke"),
    ],
)
def test_whose_fault_it_is_that_a_worker_ends(
    monkeypatch: pytest.MonkeyPatch, end: str, status: int, words: str
) -> None:
    code = f"""if True:
        import os, resource, signal, sys
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.stdin.readline(), print("null", flush=True), sys.stdin.readline()
        {end}
    """
    begin = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **more: begin([sys.executable, "-c", code], **more)
    )
    with in_process(text_workers=BUNDLED_MODEL) as client:
        failed = client.post(CHAT, json=GOOD[CHAT])
        assert failed.status_code == status
        assert words in failed.json()["error"]["message"]


@pytest.mark.usefixtures("one_worker")
def test_a_worker_that_was_stopped_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_worker, "_SPARE_SECONDS", 0.2)
    monkeypatch.setattr(text_worker, "MAX_ENCODE_SECONDS", SECONDS)
    with in_process(text_workers=BUNDLED_MODEL, template_seconds=SECONDS) as client:
        assert client.post(CHAT, json=GOOD[CHAT]).is_success
        workers = client._transport._inner.app.state.context.prompter.workers
        for helper in workers._helpers:
            helper.make_ready()
            helper._process.send_signal(signal.SIGSTOP)
        assert client.post(CHAT, json=GOOD[CHAT]).is_success


@pytest.mark.usefixtures("one_worker")
def test_prompts_are_those_of_this_process(tokenizer: Tokenizer) -> None:
    chats = [
        saying("hi"),
        saying("é🎉 <|im_end|>" * 20),
        {**saying("a"), "tools": [{"type": "function", "function": {"name": "f"}}]},
    ]
    found = []
    for path in (None, BUNDLED_MODEL):
        engine = FakeEngine(answer([300]))
        with in_process(engine, tokenizer=tokenizer, text_workers=path) as client:
            for chat in chats:
                assert client.post(CHAT, json=GOOD[CHAT] | chat).status_code == 200
            assert client.post(TEXT, json=GOOD[TEXT] | {"prompt": ["a b", "<think>"]}).is_success
            assert client.post(COUNT, json=GOOD[COUNT]).json() == {"input_tokens": 9}
        found.append([request.prompt_token_ids for request in engine.submitted])
    assert found[0] == found[1]


def test_a_tokenizer_that_breaks_is_a_400(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds in the server's process too, and for Rust's panics, which are no `Exception`."""
    panic = type("PanicException", (BaseException,), {})

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer._backend, name)

        def encode_batch_fast(self, *_: Any, **__: Any) -> None:
            raise panic("index out of range")

    with in_process(tokenizer=Tokenizer(library_tokenizer(), "a test's")) as client:
        monkeypatch.setattr(
            client._transport._inner.app.state.context.tokenizer, "_backend", Broken()
        )
        for path in (CHAT, TEXT, TOKENIZE):
            refused = client.post(path, json=GOOD[path])
            assert "can't be encoded: index out of range" in error_of(refused, path, 400)


def test_clients_take_turns_and_those_who_left_are_skipped() -> None:
    async def script() -> None:
        turns, order = FairExecutor(1), []
        began, gate = threading.Event(), threading.Event()

        def work(name: str) -> None:
            began.set()
            assert gate.wait(30)
            order.append(name)

        async def ask(client: str, name: str) -> None:
            await turns.run((client, ""), lambda: work(name))

        jobs = [asyncio.ensure_future(ask("a", f"a{n}")) for n in range(5)]
        jobs += [asyncio.ensure_future(ask("b", "b0"))]
        await asyncio.to_thread(began.wait, 30)  # by now all have asked
        jobs[1].cancel()  # this one waits
        jobs[0].cancel()  # this one goes on without a client
        gate.set()
        found = await asyncio.gather(*jobs, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in found[:2]] == [True, True]
        assert order.index("b0") <= 2
        assert order[0] == "a0" and sorted(order[1:]) == ["a2", "a3", "a4", "b0"]

    asyncio.run(script())


def test_the_first_token_takes_four_thread_switches(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The switches are those in docs/architecture.md, for a chat without a grammar."""
    switches: list[str] = []

    def noted(owner: Any, name: str, what: str) -> None:
        call = getattr(owner, name)

        def noting(*args: Any, **more: Any) -> Any:
            switches.append(what)
            return call(*args, **more)

        monkeypatch.setattr(owner, name, noting)

    async def chat() -> None:
        engine = FakeEngine(answer([300], sizes=[2]))
        app = create_app(engine, tokenizer, ServerConfig(model_name=MODEL), {})
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with app.router.lifespan_context(app), client:
            noted(asyncio.get_running_loop(), "run_in_executor", "to worker")
            noted(engine, "submit", "to engine")
            noted(asyncio.get_running_loop(), "call_soon_threadsafe", "back")
            assert (await client.post(CHAT, json=chat_body())).status_code == 200
            assert switches == ["to worker", "back", "to engine", "back"]

    asyncio.run(chat())
