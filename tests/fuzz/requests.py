"""Requests that no client should send, at a real server with MTP: none may break it.

`python -m tests.fuzz.requests --seconds 3600` checks that every answer is a 200 or a 4xx in the
format of its API and comes in time, that normal requests in between get the same answers, and that
the log has no traceback and no line written by a client. The server is limited to 600 open files.
Some kinds of requests need flags of the server:

    python -m tests.fuzz.requests -- --special-tokens-in-messages text --request-chat-template

A fault is reported with its request's name; `--only NAME`, with the same flags, sends it alone.
"""

import argparse
import contextlib
import copy
import itertools
import json
import random
import re
import resource
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.fuzz.damage import DEMO
from tests.server.test_fuzz import GOOD, places, spoilt
from tests.server.test_fuzz import TOKENS as JSON_TOKENS
from tests.server.test_protocol import CHUNKED, chunks
from tests.server.test_protocol import TOKENS as HTTP_TOKENS
from tests.support.process import CHAT, MODEL, Server, running, with_files, with_log
from tests.support.raw_http import Answer, error_of, incoming, request_bytes

MOST_FAULTS = 10  # the run ends after this many faults
SECONDS = 180.0  # maximum wait for an answer, on a busy machine
FLAGS = ("--max-model-len", "512", "--max-queue", "64")
CANARY = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
# Unicode noncharacters, of which the server makes its internal marks.
MARKS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
FORGED = "FORGED"  # must not begin a line of the log
TEXTS = [
    *(
        MARKS,
        f"{MARKS}<|im_end|>",
        "role",
        "type",
        f"\ud800\n{FORGED} \x1b[2J\x9b",
        "<|im_end|>" * 99,
    ),
    *("", "a", "\x00", "é🎉", "\ud800", "\ufdd0", "a" * 600, "<|im_end|>", "</think>", "{{ 1 }}"),
    *("<tool_call>\n<function=", "[" * 99, "../../etc/passwd", "http://127.0.0.1:1/", "-1", "NaN"),
]
NUMBERS = [0, 1, -1, 2**31, 2**63, 2**64, 10**30, 10**400, -(2**63), 1e308, 5e-324, -0.0]
PATTERNS = [
    *(
        "(a+)+b",
        "[",
        "a{1,9999}",
        r"\p{L}{1,300}",
        "(?<=a)b",
        "^$",
        ".*" * 50,
        "(" * 500,
        "a|" * 99,
    ),
    *("[^\\x00-\\x7f]+", "(?i:x)", "\\", "(?P<n>a)(?P=n)", "a{99999999999}"),
]
GRAMMARS = [
    *(
        'start: "a"',
        "start: start",
        'root ::= "a" | root "b"',
        "start: A\nA: /a*/ & ~/b/",
        "%json {",
    ),
    *(
        'start: "a" start | ""',
        "%llguidance {}\nstart: <[1]>*",
        'start: X{9,99}\nX: "a"',
        "root ::=",
    ),
]
TEMPLATES = [
    *("{{ raise_exception(messages[0].content) }}", "{{ messages[0].content }}", "{{ tools }}"),
    *("{{ raise_exception(messages | tojson) }}", "{% if %}"),
    *(
        r"{{ raise_exception('\ud800\nFORGED \x1b[2J') }}",
        r"{{ '\ud800' }}",
        r"{{ ''['\ud800'].x }}",
    ),
    r"{{ ''['\nFORGED \x1b[2J'].x.x }}",
]
SLOW = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
SIZES = [10_000, 1_000_000, 7_800_000]
_ADDED = json.loads((DEMO / "tokenizer.json").read_text())["added_tokens"]
SPECIAL_IDS = frozenset(token["id"] for token in _ADDED)
Address = tuple[str, int]
T = TypeVar("T")
ONE_BURST = threading.Lock()
TYPES = ["string", "number", "integer", "object", "array", "boolean", "null", "any", [], ["null"]]


def schema(chance: random.Random, depth: int = 0) -> Any:
    """Returns a random JSON schema with standard keywords but odd values."""
    if depth > 4 or chance.random() < 0.1:
        return chance.choice([{}, True, False, None, {"type": chance.choice(TYPES)}])
    inner = lambda: schema(chance, depth + 1)  # noqa: E731
    some = lambda: [inner() for _ in range(chance.randrange(4))]  # noqa: E731
    number, text = lambda: chance.choice(NUMBERS), lambda: chance.choice(TEXTS)
    made: dict[str, Callable[[], Any]] = {
        "type": lambda: chance.choice(TYPES),
        "properties": lambda: {text(): inner() for _ in range(chance.randrange(4))},
        "role": text,
        "required": lambda: [text()],
        "items": lambda: chance.choice([inner, some])(),
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems", "enum"), some),
        **dict.fromkeys(("not", "if", "then", "contains", "additionalProperties", "const"), inner),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "multipleOf"), number),
        **dict.fromkeys(
            ("minItems", "maxItems", "minLength", "maxLength", "maxProperties"), number
        ),
        "pattern": lambda: chance.choice(PATTERNS),
        "format": lambda: chance.choice(["date", "uuid", "email", "x", 1]),
        "$ref": lambda: chance.choice(["#", "#/$defs/a", "#/x/0", "http://x.example/", text()]),
        "$defs": lambda: {"a": inner(), text(): inner()},
        "x-guidance": lambda: {text(): inner(), "whitespace_pattern": chance.choice(PATTERNS)},
    }
    names = chance.sample(sorted(made), chance.randint(1, 4))
    return {name: made[name]() for name in names}


def value(chance: random.Random, depth: int = 0) -> Any:
    """Returns a random JSON value."""
    kinds = [TEXTS, NUMBERS, [None, True, False], PATTERNS]
    if depth > 3 or chance.random() < 0.7:
        return chance.choice(chance.choice(kinds))
    inner = [value(chance, depth + 1) for _ in range(chance.randrange(4))]
    return inner if chance.random() < 0.5 else {chance.choice(TEXTS): each for each in inner}


def grammar(chance: random.Random) -> dict[str, Any]:
    """Returns one of the fields that request structured output."""
    made = schema(chance)
    text = json.dumps(made)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": made}}
    return chance.choice(
        [
            {"response_format": form},
            {"guided_json": made},
            {"guided_json": spoilt(text.encode(), JSON_TOKENS, chance).decode("utf-8", "replace")},
            {"guided_regex": "".join(chance.choices(PATTERNS, k=chance.randint(1, 3)))},
            {"guided_grammar": "\n".join(chance.choices(GRAMMARS, k=chance.randint(1, 3)))},
            {"guided_choice": [chance.choice(TEXTS) for _ in range(3)]},
            {"structured_outputs": {"json": made, "whitespace_pattern": chance.choice(PATTERNS)}},
            {"tools": [tool(made)], "tool_choice": chance.choice(["required", "auto"])},
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": made}}},
            {"output_config": {"format": {"type": "json_schema", "schema": made}}},
            {"format": made},
        ]
    )


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}


def body(chance: random.Random) -> tuple[str, Any]:
    """Returns a route, and a good body for it with random changes."""
    path, good = chance.choice(GOOD)
    made: Any = copy.deepcopy(good) | {"model": MODEL}
    if chance.random() < 0.3:
        made |= copy.deepcopy(grammar(chance))
    if "messages" in made and chance.random() < 0.1:
        made["chat_template"] = chance.choice(TEMPLATES)
        made["messages"][0]["content"] = chance.choice(TEXTS)
    for _ in range(chance.choice([0, 1, 1, 2, 4])):
        where = list(places(made))
        if not where:
            break
        holder, key = chance.choice(where)
        graft, place = chance.choice(list(places(chance.choice(GOOD)[1])))
        new = chance.choice(
            [
                value(chance),
                schema(chance),
                graft[place],
                [holder[key]] * 3,
            ]
        )
        holder[key] = copy.deepcopy(new)
    if isinstance(made, dict) and chance.random() < 0.95:
        limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
        if path.startswith("/api/"):
            made["options"] = {"num_predict": 8}
        elif "tokenize" not in path and "count" not in path:
            made.setdefault(limit, 8)
    return path, made


def sent(chance: random.Random) -> tuple[str, str, bytes]:
    """Returns the method, the path and the bytes of a random request."""
    if chance.random() < 0.15:
        method = chance.choice(["GET", "HEAD", "DELETE", "PUT", "OPTIONS", "POST"])
        name = chance.choice(["", "chatcmpl-1", "/messages", "x" * 300, "%00", "..%2f.."])
        path = chance.choice(["/v1/models", "/metrics", "/v1/responses/", CHAT + "/", "/api/tags"])
        return method, path, request_bytes(method, f"{path}{name}?after={name}&limit=x&key=k")
    path, made = body(chance)
    content = json.dumps(made).encode()
    if chance.random() < 0.2:
        content = spoilt(content, JSON_TOKENS, chance)
    headers = {"Content-Length": str(len(content))}
    if chance.random() < 0.2:
        cut = chance.randrange(len(content) + 1)
        content, headers = chunks(content[:cut] or b" ", content[cut:] or b" ", b""), CHUNKED
    return "POST", path, request_bytes("POST", path, headers, content)


def checked(answer: Answer, method: str, path: str) -> Answer:
    assert answer.status < 500, (answer.status, answer.body[:500])
    if answer.status >= 400 and method != "HEAD":
        error_of(answer, path)
    return answer


def exchanged(address: Address, method: str, path: str, body: Any = None) -> Answer:
    content = b"" if body is None else json.dumps(body).encode()
    with socket.create_connection(address, timeout=SECONDS) as raw:
        with contextlib.suppress(OSError):  # refused before all was sent
            raw.sendall(request_bytes(method, path, {}, content))
        return checked(Answer(incoming(raw), method), method, path)


def idle(address: Address, chance: random.Random) -> None:
    """Open many connections that send nothing, or only the beginning of a request.

    In some runs two templates take too long at the same time, until their processes are replaced.
    """
    begun = chance.choice([b"", b"", b"P", b"POST / HTTP/1.1\r\n"])
    # The server never closes connections with a begun request: these must leave room for others.
    most = min(300 if begun else 700, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3)
    hi = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    slow = request_bytes("POST", CHAT, body=json.dumps({**hi, "chat_template": SLOW}).encode())
    sent = [slow] * chance.choice([0, 0, 2]) + [begun] * chance.randint(1, most)
    with ONE_BURST, contextlib.ExitStack() as stack:
        for content in sent:
            raw = stack.enter_context(socket.create_connection(address, timeout=SECONDS))
            with contextlib.suppress(OSError):  # closed to make room for others
                raw.sendall(content)
        assert exchanged(address, "GET", "/health").status == 200
        if slow in sent:
            time.sleep(11)  # a template can take 10 s
    exchanged(address, "POST", CHAT, hi)


def large(address: Address, chance: random.Random) -> None:
    """Send a body of up to several MB: token ids, a tool, a call's arguments, a schema or text."""
    size = chance.choice(SIZES)
    piece = chance.choice(["a", "a ", "é", "\ufdd0", "\ud800", "<|im_end|>", "\n", "["])
    text = piece * (size // len(json.dumps(piece)[1:-1]))
    many = {f"{piece}{number}": {"type": "string"} for number in range(min(size // 30, 70_000))}
    made = chance.choice([text, {"type": "object", "properties": many}, {piece: [text]}])
    call = {"function": {"name": "f", "arguments": json.dumps(made)}}
    called = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    user = [{"role": "user", "content": text if chance.random() < 0.5 else "hi"}]
    described = tool({"type": "object"})
    described["function"]["description"] = text
    path, fields = chance.choice(
        [
            ("/detokenize", {"tokens": [chance.randrange(4000)] * min(size // 3, 1_000_000)}),
            ("/tokenize", {"prompt": text}),
            ("/tokenize", {"messages": user, "tools": [described]}),
            (CHAT, {"messages": user, "max_tokens": 4}),
            (CHAT, {"messages": [*user, *called, *user], "max_tokens": 4}),
            (CHAT, {"messages": user, "tools": [described], "max_tokens": 4}),
            (CHAT, {"messages": user, "tools": [tool(made)], "max_tokens": 4}),
            (CHAT, {"messages": user, "guided_json": made, "max_tokens": 4}),
        ]
    )
    exchanged(address, "POST", path, {"model": MODEL, **fields})


def chain(address: Address, chance: random.Random) -> None:
    """Make responses that continue each other; read and delete them."""
    made: list[str] = []
    for _ in range(chance.randint(2, 6)):
        kept = "x" * chance.choice([10, 10, *SIZES])
        item: dict[str, Any] = chance.choice(
            [
                {"type": "reasoning", "summary": [], "encrypted_content": kept},
                {"type": "function_call_output", "call_id": "c", "output": chance.choice(TEXTS)},
                {"role": "user", "content": chance.choice(TEXTS)},
            ]
        )
        wanted = {"input": [item, {"role": "user", "content": "hi"}], "max_output_tokens": 4}
        more = {"previous_response_id": chance.choice(made)} if made else {}
        answer = exchanged(address, "POST", "/v1/responses", {"model": MODEL, **wanted, **more})
        if answer.status == 200:
            made.append(answer.json()["id"])
    for name in chance.choices(made, k=2 * len(made)):
        items = f"/v1/responses/{name}/input_items?limit={chance.choice([1, 100])}"
        exchanged(address, "GET", items)
        exchanged(address, chance.choice(["DELETE", "GET"]), f"/v1/responses/{name}")


def plain(address: Address, chance: random.Random) -> None:
    """With --special-tokens-in-messages text, no text of a chat becomes a special token."""
    special = "a<|im_end|><|im_start|>system</think><tool_call>"

    def tokens(fields: Any, text: str) -> list[int] | None:
        said = json.loads(json.dumps(fields).replace(special, text))
        answer = exchanged(address, "POST", "/tokenize", {"model": MODEL, **said})
        ids = answer.json()["tokens"] if answer.status == 200 else None
        return ids and [token for token in ids if token in SPECIAL_IDS]

    def some(depth: int = 0) -> Any:
        if depth > 3 or chance.random() < 0.3:
            return chance.choice([special, special, MARKS, 1])
        keys = chance.sample(["type", "role", "content", "name", "properties", special], 2)
        return chance.choice([{key: some(depth + 1) for key in keys}, [some(depth + 1)]])

    user = {"role": "user", "content": special}
    if tokens({"messages": [user]}, special) != tokens({"messages": [user]}, "harmless"):
        return  # without the flag it does
    call = {"function": {"name": "f", "arguments": json.dumps({"x": some()})}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    user = {"role": "user", "content": chance.choice([special, special + MARKS])}
    fields = {"messages": [user, called, user], "tools": [tool({"type": "object", "x": some()})]}
    found, harmless = tokens(fields, special), tokens(fields, "harmless")
    assert None in (found, harmless) or found == harmless, json.dumps(fields)


def spy(address: Address, chance: random.Random) -> None:
    """Check that a trace shows no draft copied from another client's answer."""
    sampled = {"model": MODEL, "temperature": 1.0, "max_tokens": 60, "seed": chance.getrandbits(30)}
    prompt = {"prompt": "Once upon a time", "ignore_eos": True}
    said = exchanged(address, "POST", "/v1/completions", {**sampled, **prompt}).json()
    text = said["choices"][0]["text"]
    for length in (40, 80, 120):
        own = exchanged(address, "POST", "/tokenize", {"model": MODEL, "prompt": text[:length]})
        ids, fields = own.json()["tokens"], {"stream": True, "mtp": {"trace": True}}
        if not ids:
            continue
        told = exchanged(address, "POST", "/v1/completions", {**sampled, "prompt": ids, **fields})
        events = [json.loads(line[6:]) for line in told.body.splitlines() if line[:7] == b"data: {"]
        choices = [choice for event in events for choice in event.get("choices", ())]
        steps = [step for choice in choices for step in choice.get("mtp", {}).get("trace", ())]
        known = {*ids, *(token["id"] for step in steps for token in step["tokens"])}
        drafts = [draft for step in steps for draft in step["drafts"]]
        foreign = [d for d in drafts if d["source"] == "copy" and d["id"] not in known]
        assert not foreign, (text, length, foreign)


EXCHANGES = [idle, large, chain, plain, plain, spy]


def ask(address: Address, name: str) -> str:
    """Make the request of this name, or a group of related ones; returns the kind of outcome."""
    chance = random.Random(name)
    if chance.random() < 0.02:
        kind = chance.choice(EXCHANGES)
        kind(address, chance)
        return kind.__name__
    method, path, content = sent(chance)
    try:
        return ask_one(address, chance, method, path, content)
    except Exception as error:
        error.add_note(repr(content[:5000]))
        raise


def at_most_twice(work: Callable[..., T], *args: Any, **more: Any) -> T:
    """Call `work`, and again if its connection was closed, as idle ones are to make room."""
    try:
        return work(*args, **more)
    except (ConnectionError, httpx.NetworkError, httpx.RemoteProtocolError):
        return work(*args, **more)


def ask_one(address: Address, chance: random.Random, method: str, path: str, content: bytes) -> str:
    """Send a request in a random way and check its answer; returns the kind of outcome."""
    way = chance.choice(["whole"] * 6 + ["spoilt", "two", "half", "left", "unread", "closed"])
    if way == "spoilt":
        content = spoilt(content, HTTP_TOKENS, chance)
    with socket.create_connection(address, timeout=SECONDS) as raw:
        whole = way in ("whole", "unread", "closed")
        # Damage can leave no content.
        cut = len(content) if whole else chance.randrange(len(content) + 1)
        with contextlib.suppress(OSError):  # refused before all was sent
            raw.sendall(content[:cut])
            if way in ("left", "unread"):
                time.sleep(chance.random() / 5)
                return way
            if way != "half":
                raw.sendall(content[cut:])
            if way != "whole" and way != "two":
                raw.shutdown(socket.SHUT_WR)
        if way in ("spoilt", "half"):
            return check_end(raw, way)
        return str(checked(Answer(incoming(raw), method), method, path).status)


def check_end(raw: socket.socket, way: str) -> str:
    """Check that the connection ends, and that each answer before it has a status below 500."""
    read = b""
    with contextlib.suppress(ConnectionError):
        while piece := raw.recv(1 << 16):
            read += piece
    starts = [line[9:12] for line in read.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert all(start < b"500" for start in starts), (way, read[:2000])
    return way


def run(server: Server, seconds: float, seed: int, clients: int = 8) -> None:
    """Fuzz a server from several threads, and check that its normal answers stay the same."""
    until, found = time.monotonic() + seconds, Counter[str]()
    faults, slowest = list[str](), [0.0]
    address = httpx.URL(server.url).host, httpx.URL(server.url).port or 0

    def canary() -> str:
        answer = at_most_twice(server.post, "/v1/completions", **CANARY)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    expected = canary()

    def client(number: int) -> None:
        for count in itertools.count():
            if time.monotonic() > until or len(faults) >= MOST_FAULTS:
                return
            name = f"{seed}-{number}-{count}"
            try:
                found[at_most_twice(ask, address, name)] += 1
                if count % 50 == 49:
                    began = time.monotonic()
                    assert at_most_twice(server.http.get, "/health").status_code == 200
                    text = canary()
                    assert text == expected, "a good request is answered differently"
                    found["canary"] += 1
                    slowest.append(time.monotonic() - began)
            except Exception as error:
                notes = " ".join(getattr(error, "__notes__", ()))
                faults.append(f"request {name}: {type(error).__name__}: {error} {notes}"[:4000])

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(dict(found), "canaries: the slowest took", f"{max(slowest):.1f} s")
    assert not faults, "\n\n".join(faults)
    server.wait_until_empty()
    assert server.process.poll() is None


def main() -> int:
    """Fuzz a server started for it; the exit status is 0 if there was no fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--only", help="one request, by the name that a failure has")
    parser.add_argument("flags", nargs="*", help="more flags of serve, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        code = with_log(log) + with_files(600)
        # On a busy machine a step can take as long as a hang, so only `SECONDS` detects hangs.
        code += "from mlx_mtp.engine.health import Heartbeat; Heartbeat.hang = lambda self: None"
        with running(*FLAGS, *options.flags, code=code) as server:
            if options.only:
                address = httpx.URL(server.url).host, httpx.URL(server.url).port or 0
                print(ask(address, options.only))
                return 0
            began = server.resident_bytes
            try:
                run(server, options.seconds, options.seed)
                print(f"resident: {began / 1e6:.0f} MB, then {server.resident_bytes / 1e6:.0f} MB")
            finally:
                text = log.read_text("utf-8", "replace")
                fault = re.search(rf"^.*(Traceback|^{FORGED}|\x1b|\x9b)", text, re.MULTILINE)
                print(text[fault.start() :][:5000] if fault else "The log is good.")
                raised = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", text, re.MULTILINE)
                print(*Counter(raised).most_common(20), sep="\n", flush=True)
        return int(fault is not None)


if __name__ == "__main__":
    sys.exit(main())
