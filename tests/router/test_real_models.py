"""The parent with real models: answers are those of each model alone, whatever is killed."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.running import running_servers
from mlx_mtp.text.tokenizer import Tokenizer
from tests.embeddings.qwen3 import reference, write_embedding_model
from tests.router.conftest import is_gone
from tests.support.process import CHAT, running
from tests.support.waiting import wait_until

pytestmark = pytest.mark.full

WORDS = ("fox", "lamp", "river", "tower", "clock", "garden")
FLAGS = ("--dtype", "float32", "--calibration-seconds", "0", "--max-model-len", "2048")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The bundled model under three names; two have other files, and so other answers."""
    found = {}
    for name in ("one", "two", "three"):
        found[name] = tmp_path_factory.mktemp("models") / name
        shutil.copytree(BUNDLED_MODEL, found[name])
    for name, temperature in (("two", 0.9), ("three", 1.3)):
        path = found[name] / "generation_config.json"
        fields = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(fields | {"temperature": temperature, "do_sample": True}))
    return found


def body(word: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Tell a story about a {word}."}]
    return {"messages": messages, "max_tokens": 40, "seed": 3, **fields}


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[tuple[str, str], str]:
    """What each model answers when it is served alone."""
    answers = {}
    for name, folder in folders.items():
        with running(str(folder), *FLAGS) as server:
            for word in WORDS:
                answer = server.http.post(CHAT, json=body(word)).json()
                answers[name, word] = text_of(answer)
    assert len(set(answers.values())) > len(WORDS)
    return answers


def children(parent: int) -> list[int]:
    shown = subprocess.run(["pgrep", "-P", str(parent), "-f", "served-model"], capture_output=True)
    return list(map(int, shown.stdout.split()))


@contextlib.contextmanager
def router(folders: dict[str, Path], *flags: str) -> Iterator[Any]:
    named = [f"{name}={folder}" for name, folder in folders.items()]
    # One needs 163 MB at least: there is room for two.
    with running(*named, *FLAGS, "--memory-limit", "400MB", *flags) as server:
        yield server


def test_random_models_with_random_cancels_answer_as_each_does_alone(
    folders: dict[str, Path], alone: dict[tuple[str, str], str]
) -> None:
    with router(folders, "--switch-after", "2") as server:
        most, done = [0], threading.Event()

        def watch() -> None:
            while not done.is_set():
                most[0] = max(most[0], len(children(server.process.pid)))
                time.sleep(0.05)

        watcher = threading.Thread(target=watch)
        watcher.start()

        def ask(number: int) -> int:
            draw = random.Random(number)
            name, word = draw.choice([*folders]), draw.choice(WORDS)
            asked = body(word, model=name)
            if draw.random() < 0.3:
                with server.http.stream("POST", CHAT, json=asked | {"stream": True}) as answer:
                    next(answer.iter_lines())
                return 0
            answer = server.http.post(CHAT, json=asked)
            assert answer.status_code == 200, answer.text
            assert text_of(answer.json()) == alone[name, word]
            return 1

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(ask, range(48))) > 24
        done.set()
        watcher.join()
        assert most[0] == 2
        text = server.http.get("/metrics").text
        loads = re.findall(r'router_loads_total\{model="\w+"\} (\S+)', text)
        assert len(loads) == 3
        assert all(float(count) >= 1 for count in loads)


def test_a_model_that_is_killed_or_stopped_at_any_moment_answers_again(
    folders: dict[str, Path], alone: dict[tuple[str, str], str]
) -> None:
    with router({"one": folders["one"]}, "--keep-alive", "forever") as server:
        pid = server.process.pid

        def asked(**fields: Any) -> httpx.Response:
            return server.http.post(CHAT, json=body("fox", model="one", **fields))

        with ThreadPoolExecutor() as pool:
            loading = pool.submit(asked)
            wait_until(lambda: children(pid))
            os.kill(children(pid)[0], signal.SIGKILL)
            assert loading.result().status_code == 503
            assert text_of(asked().json()) == alone["one", "fox"]
            for moment in ("idle", "decode"):
                if moment == "decode":
                    lines = []
                    stream = asked_stream(server)
                    with stream as answer:
                        for line in answer.iter_lines():
                            lines.append(line)
                            if len(lines) == 3:
                                os.kill(children(pid)[0], signal.SIGSTOP)
                    assert "ended before" in "".join(lines)  # after 30 s
                else:
                    os.kill(children(pid)[0], signal.SIGKILL)
                    wait_until(lambda: not children(pid))
                time.sleep(61)  # Three deaths within a minute would refuse it.
                assert text_of(asked().json()) == alone["one", "fox"]


def asked_stream(server: Any) -> Any:
    fields = {"model": "one", "stream": True, "max_tokens": 1500, "ignore_eos": True}
    return server.http.stream("POST", CHAT, json=body("fox") | fields)


def test_processes_end_with_the_parent_and_after_a_signal(folders: dict[str, Path]) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        with router({"one": folders["one"]}, "--keep-alive", "5m") as server:
            answer = server.http.post(CHAT, json=body("fox", model="one"))
            assert answer.status_code == 200
            (child,) = children(server.process.pid)
            (found,) = (each for each in running_servers() if each.pid == server.process.pid)
            assert (found.url, found.models) == (server.url, ["one"])
            assert child not in {each.pid for each in running_servers()}
            with asked_stream(server) as stream, contextlib.suppress(httpx.HTTPError):
                lines = stream.iter_lines()
                next(lines)
                server.process.send_signal(number)
                rest = "".join(lines)  # SIGTERM lets it finish.
                assert number == signal.SIGKILL or rest.endswith("data: [DONE]")
            server.process.wait(60)
            wait_until(lambda pid=child: is_gone(pid))


def test_a_directory_that_breaks_is_refused_with_the_reason(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folders["one"], broken)
    with router({"good": folders["one"], "bad": broken}) as server:
        wait_until(lambda: "bad" in server.http.get("/v1/models").text)
        wait_until(lambda: server.http.get("/v1/models/bad").json()["size"])
        for path in broken.glob("model*.safetensors"):
            path.write_bytes(b"nothing")
        for _ in range(4):
            answer = server.http.post(CHAT, json=body("fox", model="bad"))
            assert answer.status_code == 503
        assert "again and again" in answer.text
        assert "safetensors" in answer.text
        assert server.http.post(CHAT, json=body("fox", model="good")).status_code == 200


def test_a_model_for_embeddings_beside_one_for_chats(
    folders: dict[str, Path], alone: dict[tuple[str, str], str], tmp_path: Path
) -> None:
    weights = write_embedding_model(tmp_path / "tiny-Embedding")
    ids = Tokenizer.load(tmp_path / "tiny-Embedding").encode("A fox.")
    expected = reference(weights, ids)
    with router({"one": folders["one"], "e": tmp_path / "tiny-Embedding"}) as server:
        for _ in range(2):
            found = server.client.embeddings.create(model="e", input="A fox.").data[0].embedding
            assert np.abs(np.array(found) - expected).max() < 2e-6
            answer = server.http.post(CHAT, json=body("fox", model="one"))
            assert text_of(answer.json()) == alone["one", "fox"]
        cards = {each.id: each.model_dump() for each in server.client.models.list()}
        assert (cards["e"]["dimensions"], cards["e"]["state"]) == (48, "ready")
        answer = server.http.post(CHAT, json=body("fox", model="e"))
        assert answer.status_code == 400
        assert "makes embeddings" in answer.text
