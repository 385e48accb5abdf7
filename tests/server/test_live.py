"""`/live`: its messages, and what watching leaves behind; traces in streams."""

import asyncio
import gc
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from rich.console import Console

from mlx_mtp import progress
from mlx_mtp.cli import main as cli
from mlx_mtp.cli import top
from mlx_mtp.engine.request import Request
from mlx_mtp.server import live
from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import Serve, Served
from tests.server.test_stream import text_of
from tests.support.fake_engine import EOS, FakeEngine, Output, endless, out
from tests.support.in_process import in_process
from tests.support.waiting import wait_until
from tests.support.wire_help import CHAT, chat_body, events

SECRET = "a rather secret prompt"


def messages(client: httpx.Client, **headers: str) -> Iterator[dict[str, object]]:
    with client.stream("GET", "/live", headers=headers) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


def streamed(client: Served, **headers: str) -> Iterator[str]:
    """Yields the lines of a chat's stream."""
    body = chat_body(stream=True, messages=[{"role": "user", "content": SECRET}])
    with client.stream("POST", CHAT, json=body, headers=headers) as response:
        yield from filter(None, response.iter_lines())


@pytest.mark.parametrize("by_row", [True, False])
def test_a_row_is_seen_without_its_text_and_cancelled_by_those_who_have_its_key(
    serve: Serve, tokenizer: Tokenizer, by_row: bool
) -> None:
    (token,) = tokenizer.encode(" fox")
    keys = [{"authorization": f"Bearer {key}"} for key in ("one", "two")]
    with serve(FakeEngine(endless(token)), api_keys=("one", "two")) as client:
        assert client.get("/live").status_code == 401
        answer, seen = streamed(client, **keys[0]), messages(client, **keys[1])
        answer_id = json.loads(next(answer).removeprefix("data: "))["id"]
        first = next(seen)
        assert len(first["history"]) >= 1
        for state in seen:
            (row,) = state["rows"]
            assert "history" not in state
            if row["tokens"] > 5 and row["state"] == "decoding":
                break
        shown = json.dumps([first, state])
        assert "fox" not in shown and SECRET not in shown and "authorization" not in shown
        path = f"/live/{row['id'] if by_row else answer_id}"
        assert client.delete(path).status_code == 401
        assert client.delete(path, headers=keys[1]).status_code == 403
        assert client.delete("/live/other", headers=keys[1]).status_code == 404
        assert client.delete(path, headers=keys[0]).json()["cancelled"] is True
        *_, error, done = answer
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_cancelled"
        assert done == "data: [DONE]"
        state = next(each for each in seen if not each["rows"])
        assert ["/live/{name}", "403", 1] in state["failures"]
        seen.close()


def test_an_hour_of_messages_leaves_nothing_behind(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "SECONDS", 0)
    with serve(FakeEngine(endless(300))) as client:
        watched: live.Live = client.server.config.app.state.live
        seen, other = messages(client), messages(client)
        sizes = []
        for _ in range(2):
            for _ in range(500):
                next(seen)
            next(other)
            gc.collect()
            sizes.append(len(gc.get_objects()))
        assert sizes[1] - sizes[0] < 200
        assert watched._num_watchers == 2
        monkeypatch.setattr(live, "MOST_WATCHERS", 2)
        refused = client.get("/live")
        assert refused.status_code == 429 and refused.headers["retry-after"]
        assert "2 watchers" in refused.json()["error"]["message"]
        assert cli.main(["top", str(client.base_url)], {}) == 2
        assert "as many watchers as it takes" in capsys.readouterr().err
        seen.close()
        # A watcher that leaves does not end the others.
        assert next(other)["server"]["state"] == "ready"
        client.server._limiter.drain(30)
        *_, last = other
        assert last["server"]["state"] == "stopping"


def test_no_more_watch_than_may_however_many_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_WATCHERS", 3)

    async def ask(app: FastAPI, method: str, stays: bool, statuses: list[int]) -> None:
        async def receive() -> dict[str, str]:
            await asyncio.sleep(3600 if stays else 0)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers = [(b"host", b"localhost")]
        scope = {"type": "http", "method": method, "path": "/live", "headers": headers}
        await app(scope | {"query_string": b"", "client": ("127.0.0.1", 1)}, receive, send)

    async def burst(app: FastAPI) -> None:
        watched: live.Live = app.state.live
        for _ in range(3):  # places are given back: each burst gets as many
            # These clients leave before their first message.
            await asyncio.gather(*(ask(app, "GET", False, []) for _ in range(3)))
            assert watched._num_watchers == 0
            statuses: list[int] = []
            tasks = [asyncio.create_task(ask(app, "GET", True, statuses)) for _ in range(9)]
            while len(statuses) < len(tasks):
                await asyncio.sleep(0.001)
            assert sorted(statuses) == [200] * 3 + [429] * 6
            await ask(app, "HEAD", True, statuses)
            assert statuses.pop() == 429
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await ask(app, "HEAD", True, statuses)
            assert statuses.pop() == 200 and watched._num_watchers == 0

    with in_process() as client:
        bridge: Any = client._transport
        bridge._portal.call(burst, bridge._inner.app)


def test_a_trace_in_a_stream_tells_what_the_text_is_made_of(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("A fox 🦊, äöü and stop it here")

    def script(request: Request) -> Iterator[Output]:
        for start in range(0, len(ids), 3):
            window = ids[start : start + 3]
            more = {"drafts": (*window[:2], 300, 301)} if request.options.trace else {}
            more |= {"num_draft_tokens": 4, "num_accepted_tokens": 2, "draft_source": "mtp"}
            yield out(*window, **more)
        yield out(
            EOS, finish="stop", num_draft_tokens=4, drafts=() if request.options.trace else None
        )

    with in_process(FakeEngine(script)) as client:
        plain = events(client, mtp={"trace": False}, stop="here")
        assert not any("mtp" in choice for chunk in plain for choice in chunk["choices"])
        chunks = events(client, mtp={"trace": True}, n=2, stop="here")
        for index in range(2):
            choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            steps = [step for c in choices for step in c.get("mtp", {}).get("trace", ())]
            told = "".join(token["text"] for step in steps for token in step["tokens"])
            # The trace has all sampled tokens; the text ends before the stop string.
            assert told.partition("here")[0] == text_of(chunks, index) == text_of(plain)
            for step in steps[:-1]:
                accepted = step["num_accepted"]
                assert [d["id"] for d in step["drafts"][:accepted]] == [
                    t["id"] for t in step["tokens"][:accepted]
                ]
                assert {d["source"] for d in step["drafts"]} == {"mtp"}
        refused = client.post(CHAT, json=chat_body(mtp={"trace": True}))
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "mtp.trace"


def test_the_page_is_for_browsers() -> None:
    browser = {"accept": "text/html,*/*;q=0.8"}
    with in_process(api_keys=("k",)) as client:
        del client.headers["accept"]
        for headers in ({"accept": "*/*"}, {}):
            assert client.get("/", headers=headers).json() == {"name": "mlx-mtp"}
        root = client.get("/", headers=browser)
        assert (root.status_code, root.headers["content-type"][:9]) == (200, "text/html")
        policy = root.headers["content-security-policy"]
        assert "'unsafe" not in policy and "http" not in policy
        again = client.get("/", headers={**browser, "if-none-match": root.headers["etag"]})
        assert again.status_code == 304 and not again.content
        assert client.get("/page/app.js").status_code == 200
        assert client.get("/clients").status_code == 401
        for path in ("/page/%2e%2e/page.py", "/page/vendor", "/page/"):
            assert client.get(path).status_code == 404
    with in_process(page=False) as client:
        assert client.get("/", headers=browser).json() == {"name": "mlx-mtp"}
        assert client.get("/page/app.js").status_code == 404


def test_top_shows_the_same_in_a_terminal_and_as_lines(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "SECONDS", 0.01)
    named = {"model_name": "[bold]\x1b[31mm", "any_model_name": True}
    with serve(FakeEngine(endless(300)), api_keys=("k",), **named) as client:
        url, key = str(client.base_url), {"authorization": "Bearer k"}
        answer, seen = streamed(client, **key), messages(client, **key)
        next(answer)
        first, state = next(seen), next(each for each in seen if each["rows"][0]["tokens"])
        many = {
            name: {"tried": [9] * n, "accepted": [8] * n} for name, n in (("mtp", 8), ("copy", 16))
        }
        state["drafts"]["sources"] = many
        console = Console(record=True, width=100)
        console.print(top._screen(state, first))
        shown = console.export_text()
        assert r"[bold]\x1b[31mm, mlx-mtp" in shown and "decoding" in shown and "Memory" in shown
        assert f"copy    {' '.join(['89%'] * 16)}\n" in shown
        assert "weights" in shown and "fixes the number" in shown and "places taken" in shown
        state["server"] |= {"context": 0, "states": {"a": "on disk"}}
        console.print(top._screen(state, first))
        told = console.export_text()
        assert "a (on disk)" in told and "no model is in memory" in told and "Memory" not in told
        client.delete(f"/live/{state['rows'][0]['id']}", headers=key)
        list(answer)
        assert cli.main(["top", url], {}) == 2
        assert "requires its API key" in capsys.readouterr().err
        with ThreadPoolExecutor(1) as pool:
            watching, told = pool.submit(cli.main, ["top", url, "--api-key", "k"], {}), []

            def has_rates() -> bool:
                told.append(capsys.readouterr().out)
                return "ready: 0 running, 0 waiting; answers" in "".join(told)

            wait_until(has_rates)
            client.server._limiter.drain(30)
            assert watching.result() == 0
    assert cli.main(["top", "http://127.0.0.1:1"], {}) == 2
    assert "No server answers" in capsys.readouterr().err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_long_work_is_a_bar_in_a_terminal_and_lines_elsewhere(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.0)
    with progress.Bar(desc="Loading", total=4 * 10**9, mininterval=0) as bar:
        for _ in range(4):
            bar.update(10**9)
    shown = capsys.readouterr().err
    assert ("\r" in shown) == is_terminal
    if not is_terminal:
        assert re.search(r"Loading: 75%, 3\.00G of 4\.00G, [\d.]+[kMGT]B/s, 00:00 left\n", shown)
