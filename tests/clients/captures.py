"""Requests of real clients, stored without personal data and read back for replay.

The structure is complete: every field, message and tool is kept. Long text is cut, as it belongs to
the client and means nothing to a server; ids, dates, paths and keys are replaced.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response

from mlx_mtp.server.app import create_app
from tests.server import conftest

FOLDER = Path(__file__).parents[1] / "data" / "clients"
WRITE = "MLX_MTP_WRITE_CAPTURES"
MOST_CHARACTERS = 160
SHOWN_CHARACTERS = 60
HEADERS = ("accept", "anthropic-beta", "anthropic-version", "authorization", "content-type")
HEADERS += ("originator", "user-agent", "x-api-key", "x-app")
_UUID = re.compile(r"(?<![0-9a-f])[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_DAY = r"(Mon|Tues?|Wed(nes)?|Thu(rs)?|Fri|Sat(ur)?|Sun)(day)?"
_SYSTEM = re.compile(r"(?<=\()[^()]*(Linux|Debian|Darwin|Mac OS|Windows)[^()]*(?=\))")
_OUR_ID = re.compile(r"\b(call|toolu|msg|fc|rs|resp|chatcmpl)[_-][0-9a-f]{8,}\b")
_REPLACED = (
    (_UUID, "00000000-0000-4000-8000-000000000000"),
    (re.compile(r"\b[0-9a-f]{32,}\b"), "0" * 32),
    (re.compile(r"\bses_\w{10,}\b"), "ses_0"),
    (re.compile(r"(cch=|cc_version=[\d.]+\.)\w+"), r"\g<1>0"),
    (re.compile(r"\b1[6-9]\d{11}\b"), "1700000000000"),
    (re.compile(r"\b20\d\d[-/]\d\d[-/]\d\d\b"), "2026-01-01"),
    (re.compile(rf"\b{_DAY},? \w{{3,9}} \d\d? 20\d\d"), "Thu Jan 01 2026"),
    (re.compile(r"(?<![\w:/])/(tmp|root|home|work|var|usr|private)/[\w./@+-]*"), "/home/user"),
    (re.compile(r"\b127\.0\.0\.1:\d+"), "127.0.0.1:8000"),
)


def recording(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Request, int]]:
    """Returns the requests to applications served from now on, with the status of each answer."""
    exchanges: list[tuple[Request, int]] = []

    async def record(request: Request, call_next: RequestResponseEndpoint) -> Response:
        await request.body()  # the request object caches the body
        response = await call_next(request)
        exchanges.append((request, response.status_code))
        return response

    def recorded(*parts: Any) -> Any:
        app = create_app(*parts)
        app.add_middleware(BaseHTTPMiddleware, dispatch=record)
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
    """Returns every stored capture."""
    files = sorted(FOLDER.glob("*.json"))
    return [Capture(**json.loads(file.read_text("utf-8"))) for file in files]


async def keep(client: str, version: str, asked: Sequence[Request]) -> None:
    """Write a client's capture if the environment variable named by `WRITE` is set."""
    if not os.environ.get(WRITE):
        return
    ids: dict[str, str] = {}
    requests = []
    for request in asked:
        sent = {name: request.headers[name] for name in HEADERS if name in request.headers}
        query = f"?{request.url.query}" if request.url.query else ""
        requests.append(
            {
                "method": request.method,
                "path": request.url.path + query,
                "headers": {name: _SYSTEM.sub("an OS", value) for name, value in sent.items()},
                "body": scrubbed(await request.json(), ids),
            }
        )
    content = {"client": client, "version": version, "requests": requests}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    (FOLDER / f"{client}.json").write_text(text, "utf-8")


def scrubbed(value: Any, ids: dict[str, str]) -> Any:
    """Returns JSON without machine, personal and date values; equal server ids stay equal."""
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
