"""Chat completions that are stored if the client asks for it, and responses."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from mlx_mtp.server.api import stored
from mlx_mtp.server.api.schema import MAX_MESSAGES
from mlx_mtp.server.api.stored import Store, StoredAnswer
from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Serve
from tests.support.fake_engine import FakeEngine, FakeInfo, answer, endless
from tests.support.in_process import RESPONSES, in_process
from tests.support.wire_help import (
    CALL,
    CHAT,
    WEATHER,
    ask,
    chat_body,
    events,
    joined,
    prompt_of,
    saying,
)

SAID = "Hello."


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    with in_process(saying(tokenizer, SAID), max_stored_completions=4) as client:
        yield client


@pytest.fixture
def client(server: httpx.Client) -> Iterator[httpx.Client]:
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


def test_a_stored_completion_is_what_was_answered(client: httpx.Client) -> None:
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


def test_a_stream_is_stored_as_it_was_told(tokenizer: Tokenizer) -> None:
    with in_process(saying(tokenizer, f"See.\n{CALL}")) as client:
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


def test_labels_change_and_the_rest_stays(client: httpx.Client) -> None:
    made = ask(client, store=True, metadata={"a": "1"})
    path = f"{CHAT}/{made['id']}"
    for new in ({"b": "2", "c": "3"}, {}):
        kept = client.post(path, json={"metadata": new}).json()
        assert kept == client.get(path).json() == made | {"metadata": new}
    assert client.post(path, json={"metadata": None}).json()["metadata"] == {}
    told = error(client.post(path, json={"model": "other"}), 400)
    assert (told["param"], told["code"]) == ("model", "unsupported_parameter")
    assert error(client.post(path, json={"metadata": {"a": 1}}), 400)["param"] == "metadata.a"


def test_pages(client: httpx.Client) -> None:
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


def test_bad_queries(client: httpx.Client) -> None:
    for name, value in (
        *(("limit", limit) for limit in (0, 101, "many")),
        *(("order", "up"), ("after", "chatcmpl-1"), ("before", "chatcmpl-1"), ("metadata", "x")),
    ):
        assert error(client.get(CHAT, params={name: value}), 400)["param"] == name


def test_the_oldest_make_room_counted_in_bytes_too() -> None:
    kept = Store(max_count=3, max_bytes=10)

    def after(name: str, size: int) -> list[str]:
        kept.keep(StoredAnswer(name, "m", {}, b"x" * (size - 1), (("i", b"y"),)))
        return [chat.id for chat in kept.all()]

    assert after("a", 4) == ["a"]
    assert after("b", 6) == ["a", "b"]
    assert after("c", 1) == ["b", "c"]
    # A relabelled answer counts once, and keeps its place.
    assert after("b", 9) == ["b", "c"]
    # Answers and labels that are too large evict nothing; a label doesn't evict its own answer.
    assert after("d", 11) == after("b", 11) == ["b", "c"]
    assert after("b", 10) == ["b"]
    assert after("e", 10) == ["e"]
    kept.delete("e")
    assert [after(name, 2) for name in "fghi"][-1] == ["g", "h", "i"]


def test_a_chat_that_is_deleted_while_it_is_labelled_stays_deleted(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(text: bytes) -> Any:
        time.sleep(0.3)
        return json.loads(text)

    path = f"{CHAT}/{ask(client, store=True)['id']}"
    monkeypatch.setattr(stored, "json", SimpleNamespace(loads=loads))
    label = threading.Thread(target=client.post, args=(path,), kwargs={"json": {"metadata": {}}})
    label.start()
    time.sleep(0.1)
    assert client.delete(path).json()["deleted"]
    label.join()
    error(client.get(path), 404)


def test_what_may_be_large_is_joined_and_packed_off_the_event_loop(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop: dict[str, list[bool]] = {"_page": [], "_make_stored": []}

    def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            on_loop[name].append(asyncio._get_running_loop() is not None)
            return work(*args)

        return run

    for name in on_loop:
        monkeypatch.setattr(stored, name, watched(name, getattr(stored, name)))
    chat, response = ask(client, store=True), respond(client)
    events(client, store=True)
    listed(client)
    for path in (f"{CHAT}/{chat['id']}/messages", f"{RESPONSES}/{response['id']}/input_items"):
        assert len(client.get(path).json()["data"]) == 1
    assert on_loop == {"_page": [False] * 3, "_make_stored": [False] * 3}


def test_the_key_guards_what_is_stored() -> None:
    with in_process(api_keys=("first", "second")) as client:
        one, other = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))
        made = client.post(CHAT, json=chat_body(store=True), headers=one).json()
        for path in (CHAT, f"{CHAT}/{made['id']}", f"{CHAT}/{made['id']}/messages"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers=one).status_code == 200
        assert client.get(CHAT, headers=other).json()["data"] == []
        path = f"{CHAT}/{made['id']}"
        error(client.get(path, headers=other), 404)
        error(client.delete(path, headers=other), 404)
        # The key is the same however it is sent.
        assert client.get(path, headers={"x-api-key": "first"}).json()["id"] == made["id"]


FUNCTION = {"type": "function", **WEATHER["function"]}
THOUGHT, SPOKEN = "I need Rome.", "See."
TOLD = f"<think>\n{THOUGHT}\n</think>\n\n{SPOKEN}\n{CALL}"


def respond(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    return ask(client, RESPONSES, **{"input": "hi", "tools": [FUNCTION], **fields})


@pytest.mark.parametrize("fields", [{}, {"reasoning": {"summary": "auto"}}, {"stream": True}])
def test_a_response_is_continued_as_if_all_of_it_were_sent_again(
    tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    """Two turns continue with the model's reasoning, text and call, and the call's result."""
    engine = saying(tokenizer, TOLD)
    with in_process(engine) as client:

        def made(given: Any, **more: Any) -> dict[str, Any]:
            asked = {"input": given, "tools": [FUNCTION], **fields, **more}
            if "stream" in fields:
                return events(client, RESPONSES, **asked)[-1]["response"]
            return ask(client, RESPONSES, **asked)

        said = {"role": "user", "content": "Weather?"}
        first = made([said], instructions="Be brief.")
        *_, call = first["output"]
        kinds = ["message", "reasoning", "message", "function_call", "function_call_output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny."}
        second = made([result], previous_response_id=first["id"])
        continued = prompt_of(engine, tokenizer)
        sent_again = [said, *first["output"], result]
        made(sent_again, store=False)
        assert continued == prompt_of(engine, tokenizer)
        assert SPOKEN in continued and "Sunny." in continued and "Be brief." not in continued
        third = made("And now?", previous_response_id=second["id"], instructions="Be long.")
        continued = prompt_of(engine, tokenizer)
        made([*sent_again, *second["output"], {"role": "user", "content": "And now?"}],
             instructions="Be long.")  # fmt: skip
        assert continued == prompt_of(engine, tokenizer)
        assert (third["store"], third["previous_response_id"]) == (True, second["id"])
        # Deleting an older response takes nothing from those that continued it.
        assert client.delete(f"{RESPONSES}/{first['id']}").json()["deleted"]
        path = f"{RESPONSES}/{third['id']}/input_items"
        listed = client.get(path, params={"order": "asc", "limit": 100}).json()["data"]
        assert [item["type"] for item in listed] == [*kinds, *kinds[1:-1], "message"]
        for item in listed:
            TypeAdapter(ResponseItem).validate_python(item, strict=True)
        assert listed[0]["content"] == [{"type": "input_text", "text": "Weather?"}]
        assert names(client.get(path, params={"limit": 1}).json()) == [listed[-1]["id"]]
        made("And then?", previous_response_id=third["id"])
        assert prompt_of(engine, tokenizer).count(SPOKEN) == 3


def test_a_stored_response_is_what_was_answered(client: httpx.Client) -> None:
    made, unasked = respond(client, metadata={"a": "b"}), respond(client, store=False)
    assert (made["store"], unasked["store"]) == (True, False)
    path = f"{RESPONSES}/{made['id']}"
    assert client.get(path).json() == made
    assert made["id"] not in names(listed(client))  # the list has only chats
    chat = ask(client, store=True)
    error(client.get(f"{RESPONSES}/{chat['id']}"), 404)
    error(client.get(f"{CHAT}/{made['id']}"), 404)
    told = error(client.get(path, params={"stream": "true"}), 400)
    assert told["param"] == "stream"
    gone = {"id": made["id"], "object": "response", "deleted": True}
    assert client.delete(path).json() == gone
    for name in (made["id"], unasked["id"]):
        for method, suffix in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
            told = error(client.request(method, f"{RESPONSES}/{name}{suffix}"), 404)
            assert "store: false" in told["message"]
        body = {"model": MODEL, "input": "hi", "previous_response_id": name}
        told = error(client.post(RESPONSES, json=body), 400)
        assert told["code"] == "previous_response_not_found"
        assert told["param"] == "previous_response_id"


def test_a_server_that_keeps_nothing_answers_all_the_same() -> None:
    with in_process(max_stored_completions=0) as client:
        body = {"model": MODEL, "input": "hi"}
        made = client.post(RESPONSES, json=body).json()
        assert made["store"] is False
        error(client.get(f"{RESPONSES}/{made['id']}"), 404)
        assert error(client.post(RESPONSES, json=body | {"store": True}), 400)["param"] == "store"


def test_a_chat_that_is_continued_is_bounded_as_one_that_is_sent() -> None:
    engine = FakeEngine(answer([300]), FakeInfo(max_model_len=1 << 20))
    with in_process(engine) as client:
        many = [{"role": "user", "content": ""}] * (MAX_MESSAGES // 2)
        body = {"model": MODEL, "input": many}
        made = client.post(RESPONSES, json=body).json()
        body["previous_response_id"] = made["id"]
        assert "4097 items" in error(client.post(RESPONSES, json=body), 400)["message"]


def test_responses_that_continue_each_other_are_bounded_in_bytes() -> None:
    """All that led to an answer counts in its size; one that is too large is not stored."""
    share, engine = 20_000, FakeEngine(answer([300]), FakeInfo(max_model_len=1 << 20))
    with in_process(engine, max_held_bytes=8 * share) as client:
        body: dict[str, Any] = {"model": MODEL, "input": "x" * 5000}
        made = []
        for _ in range(4):
            made.append(client.post(RESPONSES, json=body).json())
            body["previous_response_id"] = made[-1]["id"]
            kept = [client.get(f"{RESPONSES}/{each['id']}") for each in made]
            paths = [f"{RESPONSES}/{each['id']}/input_items" for each in made]
            inputs = [client.get(path, params={"limit": 100}) for path in paths]
            assert kept[-1].is_success == made[-1]["store"]
            # A list has some text around its items.
            sizes = [len(each.content) - 200 for each in (*kept, *inputs) if each.is_success]
            assert sum(sizes) <= share
        assert [each["store"] for each in made] == [True, True, True, False]
        told = error(client.post(RESPONSES, json=body), 400)
        assert told["code"] == "previous_response_not_found" and "too large" in told["message"]
        count = len(engine.submitted)
        body |= {"previous_response_id": made[2]["id"], "store": True}
        chat = {"messages": [{"role": "user", "content": "x" * share}], "store": True}
        for path, asked in ((RESPONSES, body), (CHAT, {"model": MODEL} | chat)):
            told = error(client.post(path, json=asked), 400)
            assert told["param"] == "store" and "at most 20000" in told["message"]
        assert len(engine.submitted) == count
        kept_chat = client.post(CHAT, json=chat_body(store=True)).json()["id"]
        big = {"metadata": {str(n): "y" * 512 for n in range(64)}}
        assert error(client.post(f"{CHAT}/{kept_chat}", json=big), 400)["param"] == "metadata"
        assert client.get(f"{CHAT}/{kept_chat}").json()["metadata"] == {}
