"""Chat completions that are kept because the client asked for it."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlx_mtp.server.openai.stored import StoredChat, StoredChats
from mlx_mtp.server.tokenizer import Tokenizer
from tests.server.conftest import Serve, Served
from tests.server.fake_engine import FakeEngine, answer, endless
from tests.server.wire_help import CALL, CHAT, WEATHER, ask, chat_body, events, joined, saying

SAID = "Hello."


@pytest.fixture(scope="module")
def server(serve: Serve, tokenizer: Tokenizer) -> Iterator[Served]:
    with serve(saying(tokenizer, SAID), max_stored_completions=4) as client:
        yield client


@pytest.fixture
def client(server: Served) -> Iterator[Served]:
    yield server
    for name in names(listed(server, limit=100)):
        assert server.delete(f"{CHAT}/{name}").json()["deleted"]


def listed(client: httpx.Client, **query: Any) -> dict[str, Any]:
    response = client.get(CHAT, params=query)
    assert response.status_code == 200, response.text
    return response.json()


def names(page: dict[str, Any]) -> list[str]:
    return [item["id"] for item in page["data"]]


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_a_stored_completion_is_what_was_answered(client: Served) -> None:
    unasked = ask(client, store=False)
    assert "store: true" in error(client.get(f"{CHAT}/{unasked['id']}"), 404)["message"]
    empty = {"object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False}
    assert listed(client) == empty
    labels = {"who": "me"}
    made = ask(client, store=True, metadata=labels, n=2)
    path = f"{CHAT}/{made['id']}"
    assert client.get(path).json() == made | {"metadata": labels}
    messages = client.get(f"{path}/messages").json()
    (message,) = messages["data"]
    assert message == {"id": f"{made['id']}-0", "role": "user", "content": "hi"}
    assert messages["first_id"] == messages["last_id"] == message["id"]
    gone = {"object": "chat.completion.deleted", "id": made["id"], "deleted": True}
    assert client.delete(path).json() == gone
    error(client.post(path, json={"metadata": {}}), 404)
    for method, suffix in (("GET", ""), ("DELETE", ""), ("GET", "/messages")):
        error(client.request(method, path + suffix), 404)


def test_a_stream_is_stored_as_it_was_told(serve: Serve, tokenizer: Tokenizer) -> None:
    with serve(saying(tokenizer, f"See.\n{CALL}")) as client:
        chunks = events(client, store=True, tools=[WEATHER], stream_options={"include_usage": True})
        kept = client.get(f"{CHAT}/{chunks[0]['id']}").json()
    told, (choice,) = joined(chunks), kept["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == told["content"]
    assert choice["finish_reason"] == told["finish_reason"] == "tool_calls"
    assert {"id": call["id"], **call["function"]} == told["tool_calls"][0]
    assert (kept["object"], kept["usage"]) == ("chat.completion", chunks[-1]["usage"])


def test_a_stream_that_is_left_is_not_stored(serve: Serve) -> None:
    engine = FakeEngine(endless(300))
    with serve(engine) as client:
        with client.stream("POST", CHAT, json=chat_body(store=True, stream=True)) as response:
            next(response.iter_lines())
        assert engine.wait_for(lambda: not engine.running)
        assert listed(client)["data"] == []


def test_labels_change_and_the_rest_stays(client: Served) -> None:
    made = ask(client, store=True, metadata={"a": "1"})
    path = f"{CHAT}/{made['id']}"
    for new in ({"b": "2", "c": "3"}, {}):
        kept = client.post(path, json={"metadata": new}).json()
        assert kept == client.get(path).json() == made | {"metadata": new}
    assert client.post(path, json={"metadata": None}).json()["metadata"] == {}
    told = error(client.post(path, json={"model": "other"}), 400)
    assert (told["param"], told["code"]) == ("model", "unsupported_parameter")
    assert error(client.post(path, json={"metadata": {"a": 1}}), 400)["param"] == "metadata.a"


def test_pages(client: Served) -> None:
    made = [ask(client, store=True, metadata={"n": str(n)})["id"] for n in range(4)]
    assert names(listed(client)) == made
    assert names(listed(client, order="desc")) == made[::-1]
    first = listed(client, limit=3)
    assert (first["first_id"], first["last_id"], first["has_more"]) == (made[0], made[2], True)
    rest = listed(client, limit=3, after=first["last_id"])
    assert (names(rest), rest["has_more"]) == (made[3:], False)
    assert names(listed(client, order="desc", after=made[1])) == made[:1]
    assert names(listed(client, **{"metadata[n]": "2"})) == [made[2]]
    assert names(listed(client, model="other")) == []


def test_bad_queries(client: Served) -> None:
    for name, value in (
        *(("limit", limit) for limit in (0, 101, "many")),
        *(("order", "up"), ("after", "chatcmpl-1"), ("before", "chatcmpl-1"), ("metadata", "x")),
    ):
        assert error(client.get(CHAT, params={name: value}), 400)["param"] == name


def test_the_oldest_make_room_counted_in_bytes_too() -> None:
    kept = StoredChats(max_count=3, max_bytes=10)

    def after(name: str, size: int) -> list[str]:
        kept.keep(StoredChat(name, "m", {}, b"x" * (size - 1), (b"y",)))
        return [chat.id for chat in kept.all()]

    assert after("a", 4) == ["a"]
    assert after("b", 6) == ["a", "b"]
    assert after("c", 1) == ["b", "c"]
    # What has been relabelled counts once, and keeps its place.
    assert after("b", 9) == ["b", "c"]
    assert after("d", 20) == ["d"]
    assert after("e", 10) == ["e"]
    kept.delete("e")
    assert [after(name, 2) for name in "fghi"][-1] == ["g", "h", "i"]


def test_the_key_guards_what_is_stored(serve: Serve, tokenizer: Tokenizer) -> None:
    keys = ("first", "second")
    with serve(FakeEngine(answer(tokenizer.encode(SAID))), api_keys=keys) as client:
        one, other = ({"Authorization": f"Bearer {key}"} for key in keys)
        made = client.post(CHAT, json=chat_body(store=True), headers=one).json()
        for path in (CHAT, f"{CHAT}/{made['id']}", f"{CHAT}/{made['id']}/messages"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers=one).status_code == 200
        assert client.get(CHAT, headers=other).json()["data"] == []
        path = f"{CHAT}/{made['id']}"
        error(client.get(path, headers=other), 404)
        error(client.delete(path, headers=other), 404)
        # However the key is sent.
        assert client.get(path, headers={"x-api-key": "first"}).json()["id"] == made["id"]
