"""An OpenAI-compatible server that plays what a test scripts, on a loopback port."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.loopback import LoopbackServer

MODEL = "fake/model"
STREAM = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


@dataclass
class Reply:
    """An HTTP answer.

    Args:
        body: in the pieces that are written.
        status: of HTTP.
        kind: the content type.
        breaks: the connection is cut after the body, before HTTP's own end of it.
    """

    body: Sequence[bytes]
    status: int = 200
    kind: str = STREAM
    breaks: bool = False


def as_json(content: object, status: int = 200) -> Reply:
    return Reply([json.dumps(content).encode()], status, "application/json")


def refusal(message: str, status: int = 400) -> Reply:
    return as_json({"error": {"message": message}}, status)


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def piece(text: str, **more: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}}], **more)


def closing(reason: str = "length", **more: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": {}, "finish_reason": reason}], **more)


def usage(completion: int, prompt: int = 9) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion}


def end(completion: int, prompt: int = 9, **more: Any) -> bytes:
    return event(choices=[], usage=usage(completion, prompt), **more)


def plain_stream(body: dict[str, Any]) -> Reply:
    """One token a chunk; usage if it is asked for."""
    tokens = body["max_tokens"]
    opening = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    asked = (body.get("stream_options") or {}).get("include_usage")
    last = [end(tokens)] if asked else []
    return Reply([opening, *(piece(f"t{i} ") for i in range(tokens)), closing(), *last, DONE])


Chat = Callable[[dict[str, Any]], Reply]


@dataclass
class FakeServer:
    """A context manager.

    Args:
        chat: answers POST /v1/chat/completions.
        models: answers GET /v1/models.
        key: that requests must bring.
    """

    chat: Chat = plain_stream
    models: Reply = field(default_factory=lambda: as_json({"data": [{"id": MODEL}, {"id": "b"}]}))
    key: str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    def __enter__(self) -> FakeServer:
        fake, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.play(fake.models if self.path == "/v1/models" else refusal("no route", 404))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    fake.asked.append(body)
                    fake.at_once += 1
                    fake.most_at_once = max(fake.most_at_once, fake.at_once)
                try:
                    self.play(fake.chat(body))
                finally:
                    with lock:
                        fake.at_once -= 1

            def play(self, reply: Reply) -> None:
                if fake.key and self.headers["Authorization"] != f"Bearer {fake.key}":
                    reply = refusal("Incorrect API key", 401)
                self.send_response(reply.status)
                self.send_header("Content-Type", reply.kind)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for part in reply.body:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                if reply.breaks:
                    self.close_connection = True
                else:
                    self.wfile.write(b"0\r\n\r\n")

            def log_message(self, *_: object) -> None:
                pass

        self._server = LoopbackServer(Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return self._server.url


def ticking(step: float = 1.0) -> Callable[[], float]:
    """A clock that goes on by `step` whenever it is looked at, from 0."""
    times: Iterator[int] = iter(range(1_000_000))
    return lambda: step * next(times)
