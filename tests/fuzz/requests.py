"""Requests that no client should send, at a real server with MTP: none may break it.

`python -m tests.fuzz.requests --seconds 3600`: every answer is a 200 or a 4xx in the shape of its
API and comes in time, what is asked in between is answered as before, and the log has no traceback.
"""

import argparse
import contextlib
import copy
import itertools
import json
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.process import CHAT, MODEL, Server, running
from tests.server.raw_http import Answer, error_of, incoming, request_bytes
from tests.server.test_fuzz import GOOD, places, spoilt
from tests.server.test_fuzz import TOKENS as JSON_TOKENS
from tests.server.test_protocol import CHUNKED, chunks
from tests.server.test_protocol import TOKENS as HTTP_TOKENS

SECONDS = 180.0  # in which each answer must come, on a machine that does much else
FLAGS = ("--max-model-len", "512", "--max-queue", "64")
CANARY = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
TEXTS = [
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
TYPES = ["string", "number", "integer", "object", "array", "boolean", "null", "any", [], ["null"]]


def schema(chance: random.Random, depth: int = 0) -> Any:
    """A JSON schema, as its standard has it but for the values."""
    if depth > 4 or chance.random() < 0.1:
        return chance.choice([{}, True, False, None, {"type": chance.choice(TYPES)}])
    inner = lambda: schema(chance, depth + 1)  # noqa: E731
    some = lambda: [inner() for _ in range(chance.randrange(4))]  # noqa: E731
    number, text = lambda: chance.choice(NUMBERS), lambda: chance.choice(TEXTS)
    made: dict[str, Callable[[], Any]] = {
        "type": lambda: chance.choice(TYPES),
        "properties": lambda: {text(): inner() for _ in range(chance.randrange(4))},
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
    """Any JSON value."""
    kinds = [TEXTS, NUMBERS, [None, True, False], PATTERNS]
    if depth > 3 or chance.random() < 0.7:
        return chance.choice(chance.choice(kinds))
    inner = [value(chance, depth + 1) for _ in range(chance.randrange(4))]
    return inner if chance.random() < 0.5 else {chance.choice(TEXTS): each for each in inner}


def grammar(chance: random.Random) -> dict[str, Any]:
    """One of the fields that ask for a form of the answer."""
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
    """A route, and a good body for it with some changes."""
    path, good = chance.choice(GOOD)
    made: Any = copy.deepcopy(good) | {"model": MODEL}
    if chance.random() < 0.3:
        made |= copy.deepcopy(grammar(chance))
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
    """The method, the path, and the bytes of a request."""
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


def ask(address: tuple[str, int], chance: random.Random) -> str:
    """Send one request in some way, check its answer, and say what came of it."""
    method, path, content = sent(chance)
    way = chance.choice(["whole"] * 6 + ["spoilt", "two", "half", "left", "unread", "closed"])
    if way == "spoilt":
        content = spoilt(content, HTTP_TOKENS, chance)
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(socket.create_connection(address, timeout=SECONDS))
        whole = way in ("whole", "unread", "closed")
        cut = len(content) if whole else chance.randrange(len(content) + 1)  # Damage may empty it.
        with contextlib.suppress(OSError):  # It was refused before it was all sent.
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
        answer = Answer(incoming(raw), method)
        assert answer.status < 500, (answer.status, answer.body[:500], content[:5000])
        if answer.status >= 400 and method != "HEAD":
            error_of(answer, path)
        return str(answer.status)


def check_end(raw: socket.socket, way: str) -> str:
    """Answers, of which there may be several or none, and then the connection's end."""
    read = b""
    with contextlib.suppress(ConnectionError):
        while piece := raw.recv(1 << 16):
            read += piece
    starts = [line[9:12] for line in read.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert all(start < b"500" for start in starts), (way, read[:2000])
    return way


def run(server: Server, seconds: float, seed: int, clients: int = 8) -> Counter[str]:
    """Fuzz a server from several threads, and ask it the same in between."""
    until, found = time.monotonic() + seconds, Counter[str]()
    faults: list[str] = []
    address = httpx.URL(server.url).host, httpx.URL(server.url).port or 0
    expected = server.post("/v1/completions", **CANARY).json()["choices"][0]["text"]

    def client(number: int) -> None:
        for count in itertools.count():
            if time.monotonic() > until or faults:
                return
            name = f"{seed}-{number}-{count}"
            try:
                found[ask(address, random.Random(name))] += 1
                if count % 50 == 49:
                    assert server.http.get("/health").status_code == 200
                    text = server.post("/v1/completions", **CANARY).json()["choices"][0]["text"]
                    assert text == expected, "a good request is answered differently"
                    found["canary"] += 1
            except Exception as error:
                faults.append(f"request {name}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, "\n".join(faults)
    server.wait_until_empty()
    assert server.process.poll() is None
    return found


def main() -> int:
    """Run it against a server of its own; the exit status says whether it held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--only", help="one request, by the name that a failure has")
    parser.add_argument("flags", nargs="*", help="more flags of serve, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        code = f"import os; os.dup2(os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT), 2)"
        # A busy machine may hold up a step for as long as a hang: `SECONDS` finds those.
        code += "\nfrom mlx_mtp.engine.health import Heartbeat; Heartbeat.hang = lambda self: None"
        with running(*FLAGS, *options.flags, code=code) as server:
            if options.only:
                address = httpx.URL(server.url).host, httpx.URL(server.url).port or 0
                print(ask(address, random.Random(options.only)))
                return 0
            began = server.resident_bytes
            try:
                found = run(server, options.seconds, options.seed)
                print(dict(found), f"resident: {began / 1e6:.0f} MB, then", end=" ")
                print(f"{server.resident_bytes / 1e6:.0f} MB")
            finally:
                text = log.read_text("utf-8", "replace")
                start = text.find("Traceback")
                print(text[start : start + 5000] if start >= 0 else "No traceback.", flush=True)
        return int(start >= 0)


if __name__ == "__main__":
    sys.exit(main())
