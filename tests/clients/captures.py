"""What real clients send: kept without anybody's names, and read back to be sent again.

Structure is whole: every field, message and tool is there. Text that is long is cut, as it is the
clients' own and means nothing to a server; ids, dates, paths and keys are replaced.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_mtp.server.serve import create_app
from tests.server import conftest

FOLDER = Path(__file__).parents[1] / "data" / "clients"
WRITE = "MLX_MTP_WRITE_CAPTURES"
MOST_CHARACTERS = 160
SHOWN_CHARACTERS = 60
HEADERS = (
    "accept",
    "anthropic-beta",
    "anthropic-version",
    "authorization",
    "content-type",
    "originator",
    "user-agent",
    "x-api-key",
    "x-app",
)
_UUID = re.compile(r"(?<![0-9a-f])[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_NO_UUID = "00000000-0000-4000-8000-000000000000"
_SYSTEM = re.compile(r"(?<=\()[^()]*(Linux|Debian|Darwin|Mac OS|Windows)[^()]*(?=\))")
_OUR_ID = re.compile(r"\b(call|toolu|msg|fc|rs|resp|chatcmpl)[_-][0-9a-f]{8,}\b")
_REPLACED = (
    (_UUID, _NO_UUID),
    (re.compile(r"\b[0-9a-f]{32,}\b"), "0" * 32),
    (re.compile(r"\bses_\w{10,}\b"), "ses_0"),
    (re.compile(r"(cch=|cc_version=[\d.]+\.)\w+"), r"\g<1>0"),
    (re.compile(r"\b1[6-9]\d{11}\b"), "1700000000000"),
    (re.compile(r"\b20\d\d[-/]\d\d[-/]\d\d\b"), "2026-01-01"),
    (
        re.compile(
            r"\b(Mon|Tues?|Wed(nes)?|Thu(rs)?|Fri|Sat(ur)?|Sun)(day)?,? \w{3,9} \d\d? 20\d\d"
        ),
        "Thu Jan 01 2026",
    ),
    (re.compile(r"(?<![\w:/])/(tmp|root|home|work|var|usr|private)/[\w./@+-]*"), "/home/user"),
    (re.compile(r"\b127\.0\.0\.1:\d+"), "127.0.0.1:8000"),
)


@dataclass
class Exchange:
    """One request, and how it was answered."""

    method: str
    path: str
    headers: Mapping[str, str]
    content: bytes = b""
    status: int = 0


class Recorder:
    """Middleware that keeps what clients send."""

    def __init__(self, app: ASGIApp, exchanges: list[Exchange]) -> None:
        self.app = app
        self.exchanges = exchanges

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        query = scope["query_string"].decode()
        path = scope["path"] + (f"?{query}" if query else "")
        exchange = Exchange(scope["method"], path, Headers(scope=scope))
        self.exchanges.append(exchange)

        async def received() -> Message:
            message = await receive()
            exchange.content += message.get("body", b"")
            return message

        async def sent(message: Message) -> None:
            exchange.status = message.get("status", exchange.status)
            await send(message)

        await self.app(scope, received, sent)


def recording(monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    """The exchanges, as they come, of whatever application is served from now on."""
    exchanges: list[Exchange] = []

    def recorded(*parts: Any) -> Any:
        app = create_app(*parts)
        app.add_middleware(Recorder, exchanges=exchanges)
        return app

    monkeypatch.setattr(conftest, "create_app", recorded)
    return exchanges


@dataclass(frozen=True)
class Capture:
    """One client's requests, in order."""

    client: str
    version: str
    requests: Sequence[Mapping[str, Any]]


def load() -> list[Capture]:
    """Every capture that is kept."""
    files = sorted(FOLDER.glob("*.json"))
    return [Capture(**json.loads(file.read_text("utf-8"))) for file in files]


def keep(client: str, version: str, exchanges: Sequence[Exchange]) -> None:
    """Write a client's capture, if the environment asks for new ones."""
    if not os.environ.get(WRITE):
        return
    ids: dict[str, str] = {}
    requests = [
        {
            "method": exchange.method,
            "path": exchange.path,
            "headers": {
                name: _SYSTEM.sub("an OS", exchange.headers[name])
                for name in HEADERS
                if name in exchange.headers
            },
            "body": scrubbed(json.loads(exchange.content), ids),
        }
        for exchange in exchanges
    ]
    FOLDER.mkdir(exist_ok=True)
    content = {"client": client, "version": version, "requests": requests}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    (FOLDER / f"{client}.json").write_text(text, "utf-8")


def scrubbed(value: Any, ids: dict[str, str]) -> Any:
    """JSON without what belongs to one machine, person or day; equal `ids` of ours stay equal."""
    if isinstance(value, dict):
        return {scrubbed(key, ids): scrubbed(inner, ids) for key, inner in value.items()}
    if isinstance(value, list):
        return [scrubbed(inner, ids) for inner in value]
    if not isinstance(value, str):
        return value
    text = value
    for pattern, new in _REPLACED:
        text = pattern.sub(new, text)

    def renamed(found: re.Match[str]) -> str:
        return ids.setdefault(found[0], f"{found[1]}_{len(ids) + 1:024x}")

    text = _OUR_ID.sub(renamed, text)
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:SHOWN_CHARACTERS]} [... {len(text)} characters]"
    return text
