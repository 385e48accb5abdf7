"""Scripted OpenAI-compatible servers that replace httpx's network."""

import errno
import inspect
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

MODEL = "fake/model"
DONE = b"data: [DONE]\n\n"
Body = dict[str, Any]


@dataclass
class Reply(httpx.AsyncByteStream):
    """An HTTP response whose body arrives in exactly these reads; an exception is raised."""

    body: Sequence[bytes | Exception]
    status: int = 200
    kind: str = "text/event-stream; charset=utf-8"

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for read in self.body:
            if isinstance(read, Exception):
                raise read
            yield read


def as_json(content: object, status: int = 200) -> Reply:
    return Reply([json.dumps(content).encode()], status, "application/json")


def refusal(message: str, status: int = 400) -> Reply:
    return as_json({"error": {"message": message}}, status)


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def piece(text: str, count: int | None = None) -> bytes:
    """Returns an event with a piece of text; `count` is the number of tokens generated so far."""
    choices = [{"index": 0, "delta": {"content": text}}]
    return event(choices=choices) if count is None else event(choices=choices, usage=usage(count))


def closing(reason: str = "length") -> bytes:
    return event(choices=[{"index": 0, "delta": {}, "finish_reason": reason}])


def usage(completion: int, prompt: int = 9) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion}


def end(completion: int, **more: Any) -> bytes:
    return event(choices=[], usage=usage(completion), **more)


def plain_stream(body: Body) -> Reply:
    """Returns a stream with one token per chunk, and with usage if the request asks for it."""
    tokens = body["max_tokens"]
    opening = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    asked = (body.get("stream_options") or {}).get("include_usage")
    last = [end(tokens)] if asked else []
    return Reply([opening, *(piece(f"t{i} ") for i in range(tokens)), closing(), *last, DONE])


def measured(*reads: bytes | Exception) -> Callable[[Body], Reply]:
    """Returns a `chat` that sends `reads`; only the first, probing request gets a whole stream."""
    return lambda body: plain_stream(body) if body["max_tokens"] == 8 else Reply(reads)


@dataclass
class FakeServer:
    """Answers POST /v1/chat/completions with `chat` (which may be async) and GET /v1/models."""

    url: str
    chat: Callable[[Body], Any] = plain_stream
    models: Reply = field(default_factory=lambda: as_json({"data": [{"id": MODEL}, {"id": "b"}]}))
    key: str | None = None
    asked: list[Body] = field(default_factory=list)
    requests: list[httpx.Request] = field(default_factory=list)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        reply = self.models if request.url.path == "/v1/models" else refusal("no route", 404)
        if request.url.path == "/v1/chat/completions":
            self.asked.append(json.loads(await request.aread()))
            reply = self.chat(self.asked[-1])
            reply = await reply if inspect.isawaitable(reply) else reply
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            reply = refusal("Incorrect API key", 401)
        return httpx.Response(reply.status, headers={"Content-Type": reply.kind}, stream=reply)

    @property
    def questions(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.asked]


def refused() -> httpx.ConnectError:
    """Returns httpx's error for a refused connection, with the system's error as its cause."""
    error = httpx.ConnectError("All connection attempts failed")
    error.__cause__ = ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed")
    return error
