"""`--prefix-cache-dir`: real servers, killed and started again."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.process import Server, running
from tests.test_server_process import ask, cached, turns

FLAGS = ("--enable-mtp", "--mtp-num-draft-tokens", "2", "--prefix-cache-size", "100MB")


@pytest.mark.full
def test_killed_and_started_again_it_is_warm(tmp_path: Path):
    """SIGKILL; then every answer is as it was, greedy and sampled, and its prompt was found."""

    def chat(server: Server, *texts: str, **fields: Any) -> dict[str, Any]:
        fields = {"max_tokens": 16, "temperature": 0} | fields
        return ask(server, messages=turns(*texts), **fields)

    folder = tmp_path / "prefixes"
    flags = (*FLAGS, "--prefix-cache-dir", str(folder))
    asked: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}, {"cache_salt": "mine"}]
    with running(*flags) as server:
        before = [chat(server, "Hi!", **fields) for fields in asked]
        assert [cached(answer) > 0 for answer in before] == [False, True, False]
        seen, now = -1, 0
        while seen != now or not now:  # It writes as long as there is something to write.
            time.sleep(0.5)
            seen, now = now, server.metric("prefix_cache_files")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with running(*flags) as server:
        assert server.metric("prefix_cache_bytes") == 0
        assert server.metric("prefix_cache_file_bytes") > 0
        after = [chat(server, "Hi!", **fields) for fields in asked]
        for old, new in zip(before, after, strict=True):
            assert cached(new) == new["usage"]["prompt_tokens"] - 1
            assert new["choices"][0]["message"] == old["choices"][0]["message"]
        assert cached(chat(server, "Hi!", cache_salt="other")) == 0
        more = chat(server, "Hi!", after[0]["choices"][0]["message"]["content"], "More.")
        assert cached(more) >= after[0]["usage"]["prompt_tokens"] - 10
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    # A drain writes what waited; other settings then find nothing, and leave nothing.
    with running(*flags, "--kv-cache-quantization", "8") as server:
        assert server.metric("prefix_cache_files") == 0
        assert cached(chat(server, "Hi!")) == 0
