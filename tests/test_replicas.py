"""docs/scale.md's configuration of nginx, in front of two servers of the bundled model."""

import contextlib
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.process import CHAT, MODEL, free_ports, running
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx"),
]
DOCS = Path(__file__).parent.parent / "docs" / "scale.md"
CONVERSATIONS, TURNS = 12, 4
_PATHS = "client_body proxy fastcgi uwsgi scgi"


@contextlib.contextmanager
def nginx(folder: Path, port: int, *servers: int) -> Iterator[str]:
    (told,) = re.findall(r"```nginx\n(.*?)```", DOCS.read_text(), re.DOTALL)
    addresses = iter(servers)
    told, count = re.subn(
        r"server [\d.]+:8000", lambda _: f"server 127.0.0.1:{next(addresses)}", told
    )
    assert count == len(servers)
    told, count = re.subn("listen 80;", f"listen 127.0.0.1:{port};", told)
    assert count == 1
    paths = "".join(f"{name}_temp_path {folder / name};\n" for name in _PATHS.split())
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; pid {folder / 'pid'}; error_log {folder / 'errors'};\n"
        f"events {{}}\nhttp {{ access_log off;\n{paths}{told}}}\n"
    )
    with subprocess.Popen(["nginx", "-c", str(config), "-e", str(folder / "errors")]) as process:
        try:
            wait_until(lambda: _answers(port))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def converse(url: str, number: int, at_turn: Callable[[int], object] = lambda _: None) -> list[int]:
    """Returns each turn's cached tokens, minus the previous turn's prompt tokens."""
    messages, more, before = [], [], 0
    with httpx.Client(base_url=url, timeout=120) as client:
        for turn in range(TURNS):
            at_turn(turn)
            text = f"Question {turn} of visitor {number}: what is house {number * 7 + turn} like?"
            messages.append({"role": "user", "content": text})
            body = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0}
            answer = client.post(CHAT, json=body, headers={"X-Session-Id": str(number)})
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            more.append(usage["prompt_tokens_details"]["cached_tokens"] - before)
            before = usage["prompt_tokens"]
            messages.append(answer.json()["choices"][0]["message"])
    return more


def test_conversations_stay_on_a_server_and_outlive_one_that_drains_and_one_that_is_killed(
    tmp_path,
):
    port, *servers = free_ports(3)
    flags = [("--port", str(each)) for each in servers]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        other = stack.enter_context(running(*flags[1]))
        url = stack.enter_context(nginx(tmp_path, port, *servers))

        def converse_while(happens: Callable[[int], None], number: int) -> None:
            calls = [lambda _: None] * (CONVERSATIONS - 1) + [happens]
            asked = [pool.submit(converse, url, number + n, at) for n, at in enumerate(calls)]
            assert all(len(each.result()) == TURNS for each in asked)

        with running(*flags[0]) as first:
            found = list(pool.map(lambda n: converse(url, n), range(CONVERSATIONS)))
            # A turn finds the whole prompt of the previous turn, which the other server lacks.
            assert all(more >= 0 for turns in found for more in turns[1:])
            assert first.metric("generation_tokens_total") * other.metric("generation_tokens_total")

            def drain(turn: int) -> None:
                if turn == 1:
                    first.process.send_signal(signal.SIGTERM)

            converse_while(drain, 100)
            assert first.process.wait(timeout=60) == 0
        first = stack.enter_context(running(*flags[0]))
        sessions = iter(range(1000, 10_000))

        def is_asked() -> bool:
            converse(url, next(sessions))
            return first.metric("generation_tokens_total") > 0

        wait_until(is_asked)

        def kill(turn: int) -> None:
            if turn == 1:
                other.process.kill()

        converse_while(kill, 300)
