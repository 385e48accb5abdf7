"""Templates that never end, and everything else that a client's template could do."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from mlx_mtp.config import ServerConfig
from mlx_mtp.server.prompting import run_in_thread
from mlx_mtp.server.serve import create_app
from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve, tokenizer_with
from tests.server.fake_engine import FakeEngine, answer
from tests.server.raw_http import error_of
from tests.server.test_reliability import wait_until
from tests.server.wire_help import CHAT, ask, chat_body

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def run(first: Callable[[], Any], seconds: float, rest: Callable[[Any], Any] = lambda x: x) -> Any:
    return asyncio.run(run_in_thread(first, rest, seconds))


def has_ended() -> bool:
    return all(thread.name != "limited" for thread in threading.enumerate())


def test_the_result_and_the_errors_come_back() -> None:
    assert run(lambda: 3, 10, lambda found: found + 1) == 4
    with pytest.raises(KeyError, match="x"):
        run(lambda: {}["x"], 10)


def test_the_first_part_is_ended_and_the_rest_has_time() -> None:
    def endless() -> None:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.001)

    with pytest.raises(TimeoutError):
        run(endless, 0.05)
    wait_until(has_ended)
    assert run(lambda: 3, 0.05, lambda found: time.sleep(0.2) or found) == 3


def test_a_template_that_never_ends_costs_its_time_and_no_more(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    condition = "{% if messages[0].content == 'ever' %}" + ENDLESS + "{% endif %}"
    served = tokenizer_with(condition + tokenizer.template)
    with serve(FakeEngine(answer([300])), tokenizer=served, template_seconds=1.5) as client:
        response = client.post(CHAT, json=chat_body(messages=[{"role": "user", "content": "ever"}]))
        assert "more than 1.5 s" in error_of(response, CHAT, 400)
        assert response.json()["error"]["param"] == "messages"
        assert ask(client)
    wait_until(has_ended)


def test_the_first_token_takes_four_thread_switches(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/architecture.md counts them, for a chat without a grammar."""
    switches: list[str] = []

    def noted(owner: Any, name: str, what: Callable[[Any], str]) -> None:
        call = getattr(owner, name)

        def noting(*args: Any, **more: Any) -> Any:
            switches.append(what(args))
            return call(*args, **more)

        monkeypatch.setattr(owner, name, noting)

    async def chat() -> None:
        engine = FakeEngine(answer([300], sizes=[2]))
        app = create_app(engine, tokenizer, ServerConfig(model_name=MODEL), {})
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with app.router.lifespan_context(app), client:
            noted(threading.Thread, "start", lambda args: f"to {args[0].name}")
            noted(engine, "submit", lambda _: "to engine")
            noted(asyncio.get_running_loop(), "call_soon_threadsafe", lambda _: "back")
            assert (await client.post(CHAT, json=chat_body())).status_code == 200
            assert switches == ["to limited", "back", "to engine", "back"]

    asyncio.run(chat())
