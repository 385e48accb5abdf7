"""`--prefix-cache-dir`: real servers, killed and started again."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.process import MODEL, Server, running

SYSTEM = "You are an agent. " + " ".join(f"Rule {i}: be kind to the fox." for i in range(20))
FLAGS = ("--enable-mtp", "--mtp-num-draft-tokens", "2", "--prefix-cache-size", "100MB")
PATIENCE = 60


def chat(server: Server, messages: list[dict[str, str]], **body: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0} | body
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def wait_for_files(server: Server, folder: Path) -> None:
    """Until the server has written what it will."""
    seen = -1
    for _ in range(10 * PATIENCE):
        now = len(list(folder.glob("*.safetensors")))
        if now == seen > 0 and not list(folder.glob("*.tmp")):
            return
        seen = now
        time.sleep(0.5)
    raise AssertionError("nothing was written")


@pytest.mark.full
def test_killed_and_started_again_it_is_warm(tmp_path: Path) -> None:
    """SIGKILL; then every answer is as it was, greedy and sampled, and its prompt was found."""
    folder = tmp_path / "prefixes"
    flags = (*FLAGS, "--prefix-cache-dir", str(folder))
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hi!"}]
    asked: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}, {"cache_salt": "mine"}]
    with running(*flags) as server:
        before = [chat(server, messages, **body) for body in asked]
        assert [cached(answer) > 0 for answer in before] == [False, True, False]
        wait_for_files(server, folder)
        assert server.metric("prefix_cache_files") == len(list(folder.glob("*.safetensors")))
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with running(*flags) as server:
        assert server.metric("prefix_cache_bytes") == 0
        assert server.metric("prefix_cache_file_bytes") > 0
        after = [chat(server, messages, **body) for body in asked]
        for old, new in zip(before, after, strict=True):
            assert cached(new) == new["usage"]["prompt_tokens"] - 1
            assert new["choices"][0]["message"] == old["choices"][0]["message"]
        assert cached(chat(server, messages, cache_salt="other")) == 0
        told = after[0]["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": told}, {"role": "user", "content": "More."}]
        more = chat(server, messages)
        assert cached(more) >= after[0]["usage"]["prompt_tokens"] - 10
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
    # A drain writes what waited; other settings then find nothing, and leave nothing.
    with running(*flags, "--kv-cache-quantization", "8") as server:
        assert server.metric("prefix_cache_files") == 0
        assert cached(chat(server, messages)) == 0
