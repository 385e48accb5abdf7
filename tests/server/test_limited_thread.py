"""Templates that never end, and everything else that a client's template could do."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mlx_mtp.server.prompting import run_in_thread
from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import Serve, tokenizer_with
from tests.server.fake_engine import FakeEngine, answer
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


def test_templates_that_a_server_may_meet(serve: Serve, tokenizer: Tokenizer) -> None:
    """An endless one costs its time and no more; one in the sandbox can't leave it."""
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    for begins, template in (("ever", ENDLESS), ("out", escape)):
        condition = "{% if messages[0].content == '" + begins + "' %}" + template + "{% endif %}"
        served = tokenizer_with(condition + tokenizer.template)
        with serve(FakeEngine(answer([300])), tokenizer=served, template_seconds=1.5) as client:
            assert ask(client)
            body = chat_body(messages=[{"role": "user", "content": begins}])
            response = client.post(CHAT, json=body)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "messages"
            assert ("more than 1.5 s" if begins == "ever" else "unsafe") in error["message"]
            assert ask(client)
            # A client brings none of its own.
            for fields in ({"chat_template": ENDLESS}, {"tokenize": False}):
                for more in (fields, {"chat_template_kwargs": fields}):
                    response = client.post(CHAT, json=chat_body(**more))
                    assert response.status_code == 400
                    assert response.json()["error"]["param"].endswith(next(iter(fields)))
    wait_until(has_ended)
