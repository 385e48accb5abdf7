"""Long bodies and answers are read, encoded and written in pieces, and clients take turns."""

import json
import socket
from typing import Any

import pytest

from mlx_mtp.server.http.admission import SMALL, FairExecutor
from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import Serve
from tests.support.fake_engine import FakeEngine, answer
from tests.support.in_process import CHAT, DETOKENIZE, GOOD, HI, TOKENIZE, in_process
from tests.support.raw_http import request_bytes
from tests.support.waiting import wait_until

LONG = "a b " * (SMALL // 4 + 1)
SCHEMA = {"type": "object", "properties": {"a": {"description": LONG}}}
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "f", "arguments": json.dumps({"a": LONG})},
}
CALLED = [*HI, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FEW_IDS, MANY_IDS = [300] * 100, [300] * (SMALL // 8 + 1)
CASES: list[tuple[str, dict[str, Any], set[str]]] = [
    (CHAT, {}, set()),
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}, {"parsing", "encoding"}),
    (CHAT, {"tools": [TOOL]}, {"parsing", "encoding"}),
    (
        CHAT,
        {"messages": [*CALLED, {"role": "tool", "tool_call_id": "1", "content": "1"}]},
        {"parsing", "encoding"},
    ),
    (CHAT, {"messages": HI, "metadata": {"a": "b"}, "user": LONG}, {"parsing", "encoding"}),
    (TOKENIZE, {"prompt": LONG}, {"parsing", "encoding", "packing"}),
    (DETOKENIZE, {"tokens": FEW_IDS}, set()),
    (DETOKENIZE, {"tokens": MANY_IDS}, {"packing"}),
]


@pytest.mark.parametrize(("path", "fields", "turns"), CASES)
def test_what_is_long_takes_turns(
    monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], turns: set[str]
) -> None:
    run, taken = FairExecutor.run, []

    async def noted(self: FairExecutor, *args: Any) -> Any:
        taken.append(self)
        return await run(self, *args)

    monkeypatch.setattr(FairExecutor, "run", noted)
    with in_process(max_body_bytes=8 << 20) as client:
        client.post(path, json=GOOD[path] | fields)
        context = client._transport._inner.app.state.context
        limiter = context.limiter
        names = {
            "parsing": limiter.parsing,
            "packing": limiter.packing,
            "encoding": context.prompter.executor,
        }
        assert {name for name, each in names.items() if each in taken} == turns


def test_nothing_is_written_for_a_client_that_left_while_it_waited(
    serve: Serve, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_of, asked = Tokenizer.token_bytes, []

    def noted(self: Tokenizer, token: int) -> bytes:
        asked.append(token)
        return bytes_of(self, token)

    monkeypatch.setattr(Tokenizer, "token_bytes", noted)
    with serve(FakeEngine(answer([300]))) as client:
        context = client.server.context
        packing = context.limiter.packing
        packing._free = 0  # another client's work takes the turn
        body = json.dumps({"tokens": MANY_IDS}).encode()
        with socket.create_connection(client.address, timeout=30) as raw:
            raw.sendall(request_bytes("POST", DETOKENIZE, body=body))
            wait_until(lambda: packing._queue.size)
            (waiting,) = packing._queue
        wait_until(waiting.begins.cancelled)
        context.dispatcher._loop.call_soon_threadsafe(packing._next)
        assert client.post(DETOKENIZE, json={"tokens": [301]}).is_success
    assert asked == [301]
