"""The parent with real models: answers equal each model's own, whatever is killed."""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import ollama
import openai
import pytest
from mlx_lm.convert import convert as mlx_lm_convert

from mlx_mtp.running import running_servers
from mlx_mtp.text.tokenizer import Tokenizer
from tests.conftest import DEMO, DENSE_DEMO
from tests.embeddings.qwen3 import reference, write_embedding_model
from tests.router.conftest import is_gone
from tests.support.process import CHAT, running
from tests.support.waiting import wait_until

# A busy machine takes a minute to load a model.
pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

WORDS = ("fox", "lamp", "river", "tower")
SDKS = ("openai", "anthropic", "ollama")
FAILURES = (openai.APIError, anthropic.APIError, ollama.ResponseError, httpx.HTTPError)
FLAGS = ("--dtype", "float32", "--calibration-seconds", "0", "--max-model-len", "2048")
# duration and clients of the test with random cancels
SECONDS = float(os.environ.get("DRILL_SECONDS", "60"))
NUM_CLIENTS = 32


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of the bundled model, its 8-bit form, and its dense sibling."""
    root = tmp_path_factory.mktemp("models")
    found = {name: root / name for name in ("one", "two", "three")}
    shutil.copytree(DEMO, found["one"])
    mlx_lm_convert(str(DEMO), str(found["two"]), quantize=True, q_bits=8, q_group_size=32)
    shutil.copytree(DENSE_DEMO, found["three"])
    return found


def body(word: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Tell a story about a {word}."}]
    return {"messages": messages, "max_tokens": 40, "seed": 3, **fields}


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


class Clients:
    """A client of each SDK, with its own connections; each thread has one `Clients`."""

    def __init__(self, url: str) -> None:
        given: dict[str, Any] = {"api_key": "x", "max_retries": 0, "timeout": 600}
        self.openai = openai.OpenAI(base_url=f"{url}/v1", **given)
        self.anthropic = anthropic.Anthropic(base_url=url, **given)
        self.ollama = ollama.Client(url, timeout=600)

    def close(self) -> None:
        for each in (self.openai, self.anthropic, self.ollama._client):
            each.close()

    def pieces(self, sdk: str, model: str, word: str, *, streams: bool) -> Iterator[str]:
        """Yields the parts of an answer's text as they arrive."""
        asked = body(word, model=model)
        if sdk == "openai":
            made: Any = self.openai.chat.completions.create(**asked, stream=streams)
            if not streams:
                yield made.choices[0].message.content
            for chunk in made if streams else ():
                yield (chunk.choices[0].delta.content or "") if chunk.choices else ""
        elif sdk == "anthropic":
            seed = {"seed": asked.pop("seed")}
            made = self.anthropic.messages.create(**asked, stream=streams, extra_body=seed)
            yield "" if streams else made.content[0].text
            for event in made if streams else ():
                yield getattr(getattr(event, "delta", None), "text", "")
        else:
            options = {"seed": 3, "num_predict": asked["max_tokens"]}
            made = self.ollama.chat(model, asked["messages"], options=options, stream=streams)
            for part in made if streams else [made]:
                yield part.message.content


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[tuple[str, str], str]:
    """Each model's answers when it is served alone; they are the same for all SDKs."""
    answers = {}
    for name, folder in folders.items():
        with running(str(folder), *FLAGS) as server, contextlib.closing(Clients(server.url)) as of:
            for word in WORDS:
                texts = {"".join(of.pieces(each, name, word, streams=False)) for each in SDKS}
                (answers[name, word],) = texts
    assert len(set(answers.values())) > 2 * len(WORDS)
    return answers


def children(parent: int) -> list[int]:
    shown = subprocess.run(["pgrep", "-P", str(parent), "-f", "served-model"], capture_output=True)
    return list(map(int, shown.stdout.split()))


@contextlib.contextmanager
def router(folders: dict[str, Path], *flags: str) -> Iterator[Any]:
    named = [f"{name}={folder}" for name, folder in folders.items()]
    # Each needs at least 163 MB: two fit.
    with running(*named, *FLAGS, "--memory-limit", "400MB", *flags) as server:
        server.http.timeout = httpx.Timeout(600)  # A busy machine loads models slowly.
        yield server


@contextlib.contextmanager
def watched(parent: int) -> Iterator[set[int]]:
    """Yields a set that collects the numbers of models' processes seen during the block."""
    seen, done = set[int](), threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.add(len(children(parent)))
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join()


def test_clients_of_three_sdks_at_random_models_with_random_cancels(
    folders: dict[str, Path], alone: dict[tuple[str, str], str]
) -> None:
    """Each finished answer is that of the model alone; at most two models run at a time."""
    with router(folders, "--switch-after", "2") as server, watched(server.process.pid) as seen:
        end, count = time.monotonic() + SECONDS, Counter[str]()

        def work(number: int) -> None:
            draw, clients = random.Random(number), Clients(server.url)
            while time.monotonic() < end:
                name, word, sdk = map(draw.choice, ([*folders], WORDS, SDKS))
                streams = draw.random() < 0.5
                pieces = clients.pieces(sdk, name, word, streams=streams)
                try:
                    if streams and draw.random() < 0.5:
                        next(pieces)
                        pieces.close()  # Some SDKs close the connection only with `clients`.
                        clients.close()
                        clients = Clients(server.url)
                        count["cancelled"] += 1
                    else:
                        assert "".join(pieces) == alone[name, word], (name, word, sdk)
                        count["finished"] += 1
                except FAILURES as error:
                    # An error without a status came within a stream, or the request was lost.
                    status = getattr(error, "status_code", None)
                    count[f"{status or repr(error)}"] += 1
            clients.close()

        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            for done in [pool.submit(work, number) for number in range(NUM_CLIENTS)]:
                done.result()
        text = server.http.get("/metrics").text
        for event in ("loads", "unloads", "deaths"):
            found = re.findall(rf'router_{event}_total\{{model="\w+"\}} (\S+)', text)
            assert len(found) == 3
            count[event] = int(sum(map(float, found)))
        print(f"{SECONDS:g} s: {dict(count)}")
        assert count["loads"] >= 3
        assert count["deaths"] == 0
        assert count["finished"] > 0 and count["cancelled"] > 0
        known = {"finished", "cancelled", "loads", "unloads", "deaths", "503"}
        assert count.keys() <= known

        def is_idle() -> bool:
            cards = server.http.get("/v1/models").json()["data"]
            return {card["state"] for card in cards} <= {"ready", "on disk"}

        wait_until(is_idle)  # No cancelled request keeps a model busy.
    assert max(seen) == 2


def test_a_model_that_is_killed_or_stopped_at_any_moment_answers_again(
    folders: dict[str, Path], alone: dict[tuple[str, str], str]
) -> None:
    with router({"one": folders["one"]}, "--keep-alive", "forever") as server:
        pid = server.process.pid

        def asked(word: str = "fox", **fields: Any) -> httpx.Response:
            return server.http.post(CHAT, json=body(word, model="one", **fields))

        def state() -> str:
            return str(server.http.get("/v1/models").json()["data"][0]["state"])

        with ThreadPoolExecutor() as pool:
            loading = pool.submit(asked)
            wait_until(lambda: children(pid))
            os.kill(children(pid)[0], signal.SIGKILL)
            assert loading.result().status_code == 503
            assert text_of(asked().json()) == alone["one", "fox"]
            os.kill(children(pid)[0], signal.SIGKILL)  # while it is idle
            wait_until(lambda: not children(pid))
            time.sleep(61)  # Three deaths within a minute would refuse it.
            assert text_of(asked().json()) == alone["one", "fox"]
            prefill = pool.submit(asked, "fox " * 1500)
            wait_until(lambda: state() == "busy")
            os.kill(children(pid)[0], signal.SIGKILL)
            assert prefill.result().status_code == 503
            assert text_of(asked().json()) == alone["one", "fox"]
            lines = []
            with asked_stream(server) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    if len(lines) == 3:
                        os.kill(children(pid)[0], signal.SIGSTOP)
            assert "ended before" in "".join(lines)  # after 30 s
            # The process may not have ended yet: the request waits for the next one.
            assert text_of(asked().json()) == alone["one", "fox"]


def test_a_full_disk_stops_no_model(
    folders: dict[str, Path], alone: dict[tuple[str, str], str], tmp_path: Path
) -> None:
    """Neither the prefix cache nor the log can write more than 16 bytes to a file."""
    # Not 0: Python looks for a temporary directory by writing 4 bytes.
    full = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))"
    named = [f"{name}={folder}" for name, folder in folders.items()]
    flags = ("--memory-limit", "400MB", "--prefix-cache-dir", str(tmp_path / "prefixes"))
    with running(*named, *FLAGS, *flags, "--log-file", str(tmp_path / "log"), code=full) as server:
        server.http.timeout = httpx.Timeout(600)
        for name in ("one", "two", "three", "one"):
            answer = server.http.post(CHAT, json=body("fox", model=name))
            assert text_of(answer.json()) == alone[name, "fox"]


def asked_stream(server: Any) -> Any:
    fields = {"model": "one", "stream": True, "max_tokens": 1500, "ignore_eos": True}
    return server.http.stream("POST", CHAT, json=body("fox") | fields)


@pytest.mark.parametrize("moment", ["start", "load", "idle", "prefill", "decode"])
def test_a_process_ends_within_seconds_when_the_parent_is_killed(
    folders: dict[str, Path], moment: str
) -> None:
    with (
        router({"one": folders["one"]}, "--keep-alive", "5m") as server,
        ThreadPoolExecutor() as pool,
    ):

        def ask(text: str = "fox", **fields: Any) -> None:
            with contextlib.suppress(httpx.HTTPError):
                server.http.post(CHAT, json=body(text, model="one", **fields))

        if moment in ("idle", "prefill", "decode"):
            ask()
        if moment == "decode":
            pool.submit(ask, max_tokens=1500, ignore_eos=True)
        elif moment != "idle":
            pool.submit(ask, "fox " * 1500)
        wait_until(lambda: children(server.process.pid))
        (child,) = children(server.process.pid)
        time.sleep(0.0 if moment == "start" else 1.0)
        server.process.kill()
        # It should take at most 5 s; a busy machine needs longer.
        wait_until(lambda: is_gone(child), seconds=15.0)


def test_a_server_is_announced_and_a_signal_lets_it_finish(folders: dict[str, Path]) -> None:
    with router({"one": folders["one"]}, "--keep-alive", "5m") as server:
        assert server.http.post(CHAT, json=body("fox", model="one")).status_code == 200
        (child,) = children(server.process.pid)
        (found,) = (each for each in running_servers() if each.pid == server.process.pid)
        assert (found.url, found.models) == (server.url, ["one"])
        assert child not in {each.pid for each in running_servers()}
        with asked_stream(server) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.terminate()
            assert "".join(lines).endswith("data: [DONE]")
        server.process.wait(60)
        wait_until(lambda: is_gone(child))


def test_a_directory_that_breaks_is_refused_with_the_reason(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folders["one"], broken)
    with router({"good": folders["one"], "bad": broken}) as server:
        wait_until(lambda: "bad" in server.http.get("/v1/models").text)
        wait_until(lambda: server.http.get("/v1/models/bad").json().get("size"))
        for path in broken.glob("model*.safetensors"):
            path.write_bytes(b"nothing")
        for _ in range(4):
            answer = server.http.post(CHAT, json=body("fox", model="bad"))
            assert answer.status_code == 503
        assert "again and again" in answer.text
        assert "broken/model" in answer.text  # the file that the process named
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
