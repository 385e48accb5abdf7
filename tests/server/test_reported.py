"""Problems with templates and parameters that users of such servers reported, with variations."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
import pytest

from mlx_mtp.engine.request import Request
from mlx_mtp.errors import UsageError
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.text.tokenizer import Tokenizer
from tests.server.conftest import library_tokenizer, tokenizer_with
from tests.support.fake_engine import FakeEngine, FakeInfo, answer
from tests.support.in_process import (
    CHAT,
    COUNT,
    GOOD,
    HI,
    IGNORED,
    MESSAGES,
    OLLAMA_CHAT,
    RESPONSES,
    TEXT,
    TOKENIZE,
    in_process,
)
from tests.support.templates import (
    CODER,
    NO_VARIABLES,
    Q35,
    Q36,
    Q38,
    TEMPLATES,
    TWO_EFFORTS,
    XML,
)
from tests.support.wire_help import CALL, WEATHER, ask, events, joined, saying

Fields = dict[str, Any]
LEFT = object()  # the rest of the context
CHATS = (CHAT, RESPONSES, MESSAGES, OLLAMA_CHAT)
OWN = "the bundled model's"


class Asked:
    """An application for each template, and the requests that reach its engine."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._made = cache(self._make)
        self._stack = stack

    def _make(self, name: str) -> tuple[httpx.Client, FakeEngine, Tokenizer]:
        template = TEMPLATES.get(name)
        tokenizer = (
            tokenizer_with(template) if template else Tokenizer(library_tokenizer(), "the test's")
        )
        engine = FakeEngine(answer([300]))
        return (
            self._stack.enter_context(in_process(engine, tokenizer=tokenizer)),
            engine,
            tokenizer,
        )

    def post(self, template: str, path: str, fields: Fields) -> httpx.Response:
        return self._made(template)[0].post(path, json=GOOD[path] | fields)

    def latest(self, template: str) -> tuple[Request, str]:
        """Returns the last request to the engine, and its prompt as text."""
        _, engine, tokenizer = self._made(template)
        request = engine.submitted[-1]
        return request, tokenizer.text_of(request.prompt_token_ids)


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    with contextlib.ExitStack() as stack:
        yield Asked(stack)


@dataclass(frozen=True)
class Case:
    """A request, and the expected results."""

    row: int  # number of the report
    path: str
    fields: Fields
    template: str = OWN
    ignored: str = ""  # names in the header of ignored parameters
    shows: tuple[str, ...] = ()  # parts of the prompt
    hides: tuple[str, ...] = ()
    sampling: Fields = field(default_factory=dict)  # parameters that reach the sampler
    status: int = 200

    def __str__(self) -> str:
        return f"{self.row} {self.path} {self.template} {json.dumps(self.fields)[:60]}"


def user(content: Any) -> Fields:
    return {"role": "user", "content": content}


def said(content: Any) -> Fields:
    return {"role": "assistant", "content": content}


def kwargs(**values: Any) -> Fields:
    return {"chat_template_kwargs": values}


def efforts(path: str, effort: str) -> Fields:
    """Returns the fields that ask for a reasoning effort in an API."""
    return {
        CHAT: {"reasoning_effort": effort},
        RESPONSES: {"reasoning": {"effort": effort}},
        MESSAGES: {"output_config": {"effort": effort}, "thinking": {"type": "enabled"}},
        OLLAMA_CHAT: {"think": effort},
    }[path]


SYSTEM = {"role": "system", "content": "Be brief."}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iV"}}
SEEN = {"type": "input_image", "image_url": "data:image/png;base64,iVBO"}
LEFT_OUT = "[image left out: this model reads text only]"
RESULT = {"type": "tool_result", "tool_use_id": "t"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c"}
LARK = 'start: "a"'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
HISTORY = [
    user("Patch it."),
    {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
    {"type": "custom_tool_call_output", "call_id": "c", "output": "Done patching."},
    {"type": "local_shell_call", "call_id": "d", "action": {"command": ["ls"]}, "status": "x"},
    {"type": "local_shell_call_output", "call_id": "d", "output": "a.txt"},
    {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "mlx"}},
    user("Go on."),
]
SEARCHED = [
    user("Search."),
    said(
        [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "mlx"}},
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s",
                "content": [{"type": "web_search_result", "title": "T", "encrypted_content": "e"}],
            },
            {"type": "text", "text": "Found."},
        ]
    ),
    user("Go on."),
]
VENDORS = ("custom", "local_shell", "tool_search", "web_search", "image_generation")
LIMITS = {CHAT: "max_tokens", TEXT: "max_tokens", RESPONSES: "max_output_tokens"}
LIMITS |= {MESSAGES: "max_tokens"}
EFFORTS = [
    *((Q38, asked, taken) for asked, taken in (("minimal", "low"), ("max", "xhigh"))),
    *((Q38, effort, effort) for effort in ("low", "medium", "high", "xhigh")),
    *((TWO_EFFORTS, asked, taken) for asked, taken in (("xhigh", "high"), ("minimal", "low"))),
]
CASES = [
    # An effort becomes the nearest one that the template takes.
    *(
        Case(10, path, efforts(path, effort), template, shows=(f"<|im_start|>effort {taken}<",))
        for template, effort, taken in EFFORTS
        for path in CHATS
        if (path, effort) != (MESSAGES, "minimal")
    ),
    Case(10, CHAT, kwargs(reasoning_effort="max"), Q38, shows=("effort xhigh",)),
    Case(10, CHAT, {"reasoning_effort": "none"}, Q38, shows=("<think>\n\n</think>",)),
    Case(10, CHAT, {"reasoning_effort": "max"}, Q35),  # takes no effort
    Case(10, CHAT, kwargs(reasoning_effort="huge"), Q38, status=400),  # not an effort
    # Variables that the template lacks are ignored and named, on every route; the others work.
    *(
        Case(row, path, kwargs(**{key: True}), name, ignored=f"chat_template_kwargs.{key}")
        for row, name, key in (
            (11, CODER, "preserve_thinking"),
            (11, NO_VARIABLES, "enable_thinking"),
            (11, OWN, "preserve_thinking"),
        )
        for path in (*CHATS, COUNT)
    ),
    Case(
        11,
        TOKENIZE,
        {"messages": HI, "prompt": None} | kwargs(x=1),
        ignored="chat_template_kwargs.x",
    ),
    *(
        Case(12, path, kwargs(enable_thinking=False), Q35, shows=("<think>\n\n</think>",))
        for path in CHATS
    ),
    *(
        Case(
            12,
            path,
            kwargs(enable_thinking=True, thinking_budget=9),
            Q35,
            sampling={"grammar": GrammarSpec("free", "", "</think>", 9)},
        )
        for path in CHATS
    ),
    *(Case(12, path, kwargs(thinking_budget=-1), status=400) for path in CHATS),
    # Without a user's message the last system text becomes one.
    Case(14, CHAT, {"messages": [SYSTEM]}, Q35, shows=("<|im_start|>user\nBe brief.",)),
    Case(14, CHAT, {"messages": [SYSTEM, said("Yes?")]}, Q35, shows=("user\nBe brief.", "Yes?")),
    Case(
        14,
        CHAT,
        {"messages": [SYSTEM, {"role": "developer", "content": "Begin."}]},
        Q35,
        shows=("system\nBe brief.<", "user\nBegin.<"),
    ),
    Case(14, RESPONSES, {"input": [], "instructions": "Begin."}, Q35, shows=("user\nBegin.<",)),
    Case(14, OLLAMA_CHAT, {"messages": [SYSTEM]}, Q35, shows=("user\nBe brief.<",)),
    # A limit beyond the rest of the context is cut; only a prompt that is too long is an error.
    *(
        Case(16, path, {name: limit}, sampling={"max_tokens": LEFT})
        for path, name in LIMITS.items()
        for limit in (131_072, -1, -2)
        if (path, limit > 0) != (MESSAGES, False)
    ),
    *(
        Case(16, OLLAMA_CHAT, {"options": {"num_predict": limit}}, sampling={"max_tokens": LEFT})
        for limit in (131_072, -1, -2)
    ),
    Case(16, CHAT, {"max_completion_tokens": 131_072}, sampling={"max_tokens": LEFT}),
    Case(16, CHAT, {"max_tokens": 3}, sampling={"max_tokens": 3}),
    # Two names for the same parameter are accepted if their values agree.
    *(
        Case(17, path, fields, sampling={"grammar": GrammarSpec(*spec)})
        for path in (CHAT, TEXT)
        for fields, spec in (
            ({"guided_grammar": LARK, "structured_outputs": {"grammar": LARK}}, ("lark", LARK)),
            ({"guided_regex": "a+", "structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
            (
                {"guided_choice": ["a"], "structured_outputs": {"choice": ["a"]}},
                ("choice", '["a"]'),
            ),
            ({"guided_json": SCHEMA, "json_schema": SCHEMA}, ("json_schema", json.dumps(SCHEMA))),
            # Open WebUI's fields.
            ({"format": "json"}, ("json_object",)),
            ({"format": SCHEMA}, ("json_schema", json.dumps(SCHEMA))),
            ({"format": "json", "response_format": {"type": "json_object"}}, ("json_object",)),
        )
    ),
    Case(17, CHAT, {"guided_regex": "a", "structured_outputs": {"regex": "b"}}, status=400),
    Case(18, CHAT, {"format": ""}, sampling={"grammar": None}),
    Case(18, CHAT, {"format": "xml"}, status=400),
    *(
        Case(18, path, {"stop": stop}, ignored="stop")
        for path in (CHAT, TEXT)
        for stop in ("", [""])
    ),
    Case(18, MESSAGES, {"stop_sequences": ["", "b"]}, ignored="stop_sequences"),
    # Tools that only vendors' servers run, and their items in the history.
    *(
        Case(19, RESPONSES, {"tools": [{"type": kind, "name": "x"}]}, ignored=f"tools[].{kind}")
        for kind in VENDORS
    ),
    Case(
        19,
        MESSAGES,
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        ignored="tools[].web_search_20250305",
    ),
    Case(19, MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, status=400),
    Case(
        19,
        RESPONSES,
        {"input": HISTORY},
        shows=("apply_patch", "*** Begin", "Done patching.", '["ls"]', "a.txt", '"query": "mlx"'),
    ),
    Case(
        19,
        MESSAGES,
        {"messages": SEARCHED},
        shows=('"query": "mlx"', '"T"', "Found."),
        hides=('"e"',),
    ),
    Case(19, RESPONSES, {"input": []}, status=400),
    # Images in the history become a text; in the last message they are an error.
    *(
        Case(20, CHAT, {"messages": chat}, ignored="content[].image_url", shows=(LEFT_OUT, "Look."))
        for chat in (
            [user([{"type": "text", "text": "Look."}, IMAGE]), said("Yes."), *HI],
            [user("Look."), said("I read."), {"role": "tool", "content": [IMAGE]}],
            [{"role": "system", "content": [IMAGE]}, user("Look.")],
        )
    ),
    Case(
        20,
        MESSAGES,
        {"messages": [user("Look."), said([USE]), user([{**RESULT, "content": [PICTURE]}])]},
        ignored="content[].image",
        shows=(f"<tool_response>\n{LEFT_OUT}",),
    ),
    Case(
        20,
        MESSAGES,
        {"messages": [user([PICTURE]), said("A cat."), user("Look.")]},
        ignored="content[].image",
        shows=(f"user\n{LEFT_OUT}<",),
    ),
    Case(
        20,
        MESSAGES,
        {"messages": [user([{"type": "document", "source": {}}]), said("Well."), *HI]},
        ignored="content[].document",
        shows=("[file left out",),
    ),
    Case(
        20,
        RESPONSES,
        {"input": [user([SEEN]), said("A cat."), user("Look.")]},
        ignored="content[].input_image",
        shows=(LEFT_OUT,),
    ),
    Case(
        20,
        RESPONSES,
        {"input": [user("Look."), CALLED, {**OUTPUT, "output": [SEEN]}]},
        ignored="content[].input_image",
        shows=(f"<tool_response>\n{LEFT_OUT}",),
    ),
    Case(
        20,
        OLLAMA_CHAT,
        {"messages": [{**user("Look."), "images": ["iV"]}, said("A cat."), *HI]},
        ignored="messages[].images",
        shows=(f"Look.\n{LEFT_OUT}",),
    ),
    Case(20, CHAT, {"messages": [*HI, said("Yes?"), user([IMAGE])]}, status=400),
    Case(20, CHAT, {"messages": [user([IMAGE]), said("It")]}, status=400),
    Case(20, MESSAGES, {"messages": [user([PICTURE])]}, status=400),
    Case(20, RESPONSES, {"input": [user([SEEN])]}, status=400),
    Case(20, OLLAMA_CHAT, {"messages": [{**user("Look."), "images": ["iV"]}]}, status=400),
    # Other names of the thinking budget.
    *(
        Case(
            21,
            CHAT,
            {name: 9, "enable_thinking": True},
            sampling={"grammar": GrammarSpec("free", "", "</think>", 9)},
        )
        for name in ("thinking_budget_tokens", "thinking_token_budget")
    ),
    Case(
        21,
        CHAT,
        {"thinking_budget_tokens": -1, "enable_thinking": True},
        sampling={"grammar": None},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reported(asked: Asked, case: Case) -> None:
    response = asked.post(case.template, case.path, case.fields)
    assert response.status_code == case.status, response.text
    if case.status == 400:
        return
    assert response.headers.get(IGNORED, "") == case.ignored
    if case.path in (COUNT, TOKENIZE):
        return
    request, prompt = asked.latest(case.template)
    for text in case.shows:
        assert text in prompt
    for text in case.hides:
        assert text not in prompt
    left = request.sampling.max_tokens + len(request.prompt_token_ids)
    for name, value in case.sampling.items():
        if value is LEFT:
            assert left == FakeInfo.max_model_len
        else:
            assert getattr(request.sampling, name) == value


CITY = {"city": "Rome"}
# Steps of two turns: a question, an answer, or a thought with a call and its result.
STEPS: list[tuple[str, ...] | str] = [
    "How is Rome?",
    ("I ask for it.", "get_weather", '{"city": "Rome"}', "Sunny."),
    ("", "list_files", "{}", "a.txt"),
    "Sunny, and there is a file.",
    "And now?",
    ("Once more.", "get_weather", '{"city": "Rome"}', "Rain."),
    "It rains.",
    "Thanks. Why?",
]
LISTED = {"name": "list_files", "description": "Lists them."}
TOOLS = [WEATHER["function"], LISTED]


def conversation(path: str) -> Fields:
    """Returns the steps as a chat of 12 messages with two tools, in the form of an API."""
    chat: list[Fields] = [SYSTEM]
    for number, step in enumerate(STEPS):
        if isinstance(step, str):
            chat.append((said if chat[-1]["role"] == "tool" else user)(step))
            continue
        thought, name, arguments, result = step
        call = {"id": f"c{number}", "function": {"name": name, "arguments": arguments}}
        chat.append(said("") | {"reasoning_content": thought, "tool_calls": [call]})
        chat.append({"role": "tool", "tool_call_id": f"c{number}", "content": result})
    assert len(chat) == 12
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    if path == CHAT:
        return {"messages": chat, "tools": tools}
    if path == OLLAMA_CHAT:
        for message in chat:
            message |= {"thinking": message.pop("reasoning_content", None)}
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return {"messages": chat, "tools": tools}
    if path == RESPONSES:
        items = [item for message in chat for item in _items(message)]
        return {"input": items, "tools": [{"type": "function", **tool} for tool in TOOLS]}
    nothing = {"type": "object", "properties": {}}
    return {
        "system": SYSTEM["content"],
        "messages": [_blocks(message) for message in chat[1:]],
        "tools": [
            {"name": t["name"], "description": t["description"]}
            | {"input_schema": t.get("parameters", nothing)}
            for t in TOOLS
        ],
    }


def _items(message: Fields) -> Iterator[Fields]:
    if message["role"] == "tool":
        call_id = message["tool_call_id"]
        yield {"type": "function_call_output", "call_id": call_id, "output": message["content"]}
        return
    if thought := message.get("reasoning_content"):
        yield {"type": "reasoning", "summary": [{"type": "summary_text", "text": thought}]}
    if message["content"]:
        yield {"role": message["role"], "content": message["content"]}
    for call in message.get("tool_calls", []):
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def _blocks(message: Fields) -> Fields:
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
        return user([result | {"content": message["content"]}])
    blocks: list[Fields] = []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", []):
        function = call["function"]
        given = {"name": function["name"], "input": json.loads(function["arguments"])}
        blocks.append({"type": "tool_use", "id": call["id"], **given})
    return {"role": message["role"], "content": blocks}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_with_tools_is_one_prompt_in_all_apis(asked: Asked, name: str) -> None:
    prompts = set()
    for path in CHATS:
        response = asked.post(name, path, conversation(path) | efforts(path, "max"))
        assert response.status_code == 200, response.text
        prompts.add(asked.latest(name)[1])
    (prompt,) = prompts
    for text in ("Be brief.", "list_files", "Sunny.", "It rains.", "Thanks. Why?"):
        assert text in prompt
    assert ("<parameter=city>\nRome\n" in prompt) == (name in XML)


# A model's answer with its reasoning, the stop strings, and the text that the client gets.
STOPPED = [
    ("Question: so?\n</think>\n\nIt is. Question: no", ["Question:"], "It is. "),
    ("Question: so?\n</think>\n\nQuestion: no", ["Question:"], ""),
    ("a\n\nb\n</think>\n\nOne.\n\nTwo.", ["\n\n"], "One."),  # not the newlines after the reasoning
    ("a\n</think>\n\nOne.", ["</think>", "Two"], "One."),
    ("Quest\n</think>ion", ["Question"], "ion"),  # in neither part alone
]


@pytest.mark.parametrize(("text", "stops", "left"), STOPPED, ids=str)
def test_stop_strings_are_for_the_answer(text: str, stops: list[str], left: str) -> None:
    tokenizer, thought = tokenizer_with(TEMPLATES[Q35]), text.partition("</think>")[0].strip("\n")
    for sizes in ((1,), (3, 1)):
        engine = saying(tokenizer, text, sizes)
        with in_process(engine, tokenizer=tokenizer) as client:
            message = ask(client, stop=stops)["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == (thought, left)
            message = joined(events(client, stop=stops))
            assert (message["reasoning_content"], message["content"]) == (thought, left)
            assert message["finish_reason"] == "stop"
            body = {"stop_sequences": stops, "thinking": {"type": "enabled"}}
            blocks = client.post(MESSAGES, json=GOOD[MESSAGES] | body | {"max_tokens": 99}).json()
            texts = [block.get("text", block.get("thinking")) for block in blocks["content"]]
            assert texts == [thought, *([left] if left else [])]
            ollama = client.post(OLLAMA_CHAT, json=GOOD[OLLAMA_CHAT] | {"stop": stops}).json()
            assert (ollama["message"]["thinking"], ollama["message"]["content"]) == (thought, left)


def test_the_servers_defaults_are_between_the_models_and_the_requests() -> None:
    engine, tokenizer = FakeEngine(answer([300])), tokenizer_with(TEMPLATES[Q36])
    settings = {"temperature": 0.5, "top_k": -1, "max_tokens": 7, "presence_penalty": 1.0}
    given = {"preserve_thinking": True, "enable_thinking": False, "thinking_budget": 5}
    with in_process(
        engine, tokenizer=tokenizer, sampling=settings, chat_template_kwargs=given
    ) as client:
        for path in CHATS:
            assert client.post(path, json=GOOD[path] | conversation(path)).status_code == 200
            prompt = tokenizer.text_of(engine.submitted[-1].prompt_token_ids)
            assert "I ask for it." in prompt and prompt.endswith("</think>\n\n")
            own = kwargs(preserve_thinking=False) | efforts(path, "max")
            client.post(path, json=GOOD[path] | conversation(path) | {"temperature": 0.9} | own)
            request = engine.submitted[-1]
            prompt = tokenizer.text_of(request.prompt_token_ids)
            assert "I ask for it." not in prompt and prompt.endswith("<think>\n")
            assert request.sampling.grammar == GrammarSpec("free", "", "</think>", 5)
            expected = 5 if path == MESSAGES else 7
            found = request.sampling
            assert (found.temperature, found.presence_penalty) == (0.9, 1.0)
            assert (found.top_k, found.max_tokens) == (0, expected)
    for wrong in ({"tokenize": True}, {"thinking_budget": -1}):
        with pytest.raises(UsageError, match="--chat-template-kwargs"):
            in_process(chat_template_kwargs=wrong).__enter__()


def test_calls_over_ollamas_route_have_ids() -> None:
    tokenizer = Tokenizer(library_tokenizer(), "the test's")
    with in_process(saying(tokenizer, CALL * 2)) as client:
        body = GOOD[OLLAMA_CHAT] | {"tools": [WEATHER]}
        whole = client.post(OLLAMA_CHAT, json=body).json()["message"]["tool_calls"]
        lines = client.post(OLLAMA_CHAT, json=body | {"stream": True}).text.splitlines()
        streamed = [c for line in lines for c in json.loads(line)["message"].get("tool_calls", [])]
        for calls in (whole, streamed):
            ids = [call["id"] for call in calls]
            assert len({*ids}) == 2 and all(name.startswith("call_") for name in ids)
        version = client.get("/api/version").json()["version"]
        assert tuple(map(int, version.split("."))) >= (0, 12, 10)
