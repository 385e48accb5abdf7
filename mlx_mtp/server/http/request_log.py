"""One log line and one count for each HTTP request, at its end."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_mtp.server.generation.timings import timings
from mlx_mtp.server.metrics import Metrics
from mlx_mtp.text.characters import cut

if TYPE_CHECKING:
    from mlx_mtp.server.generation.generation import Generation

logger = logging.getLogger(__name__)

LEFT = 499  # nginx's status for a client that did not wait for the answer
IGNORED, REQUEST_ID = "x-mlx-mtp-ignored", "x-request-id"  # headers of responses
_RECORD = "mlx_mtp.record"
# Asked every few seconds by programs that watch; and the page's files, a dozen at a time.
_QUIET = re.compile("/(health|metrics|page/.*)/?")
# What a line says of a request, as far as it is known. JSON has the same by name.
_PARTS = {
    "client": "%(client)s",
    "method": " %(method)s",
    "path": " %(path)s",
    "status": " %(status)d",
    "seconds": " in %(seconds).2f s",
    "prompt_tokens": ", tokens: %(prompt_tokens)d in",
    "cached_tokens": " (%(cached_tokens)d cached)",
    "completion_tokens": ", %(completion_tokens)d out",
    "first_token_seconds": ", first token after %(first_token_seconds).2f s",
    "tokens_per_second": ", %(tokens_per_second).1f tokens/s",
    "draft_tokens": ", %(accepted_tokens)d of %(draft_tokens)d drafts accepted",
    "draft_sources": " (%(draft_sources)s)",
    "optimistic_tokens": ", %(optimistic_tokens)d of them optimistically",
    "ignored": ", ignored: %(ignored)s",
    "id": ", %(id)s",
    "reason": ": %(reason)s",
}


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request, as far as it has come; its handlers add what they know."""

    ignored: list[str] = field(default_factory=list)  # parameters without effect, as in the body
    id: str = field(default_factory=lambda: f"req-{uuid.uuid4().hex[:24]}")  # or the answer's
    body_bytes: int = 0  # of the request, once it is read
    generation: Generation | None = None
    reason: str | None = None  # why it failed
    status: int = 0  # of the response, once there is one
    began: float = field(default_factory=time.perf_counter)


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request that this scope is of."""
    record: RequestRecord | None = scope.get(_RECORD)
    if record is None:
        record = scope[_RECORD] = RequestRecord()
    return record


class RequestLog:
    """ASGI middleware around everything else: names, counts and logs each request."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Container[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = record_of(scope)

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                found = {REQUEST_ID: record.id, IGNORED: ", ".join(record.ignored)}
                more = [(name.encode(), text.encode()) for name, text in found.items() if text]
                message["headers"] = [*message["headers"], *more]
                self._metrics.count_ignored(record.ignored)
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except Exception as error:
            record.status = record.status or 500  # by the middleware that FastAPI puts around all
            record.reason = record.reason or type(error).__name__
            raise
        finally:
            route = getattr(scope.get("route"), "path", None) or scope["path"]
            route = route.rstrip("/") or "/"
            # A client's own text would make as many series as it likes.
            route = route if route in self._paths else "other"
            self._metrics.count("http_requests", route, str(record.status or LEFT))
            if not _QUIET.fullmatch(scope["path"]):
                log_request(scope, time.perf_counter() - record.began)


def log_request(scope: Scope, seconds: float | None = None) -> None:
    """Write the line of a request; the text is made where the log is written."""
    record = record_of(scope)
    generation, status, reason = record.generation, record.status or LEFT, record.reason
    fields: dict[str, Any] = {
        "client": scope["client"][0] if scope.get("client") else "-",
        "method": scope["method"],
        # Without the query, in which some clients send their key.
        "path": cut(scope["path"]),
        "status": status,
        "seconds": seconds,
        "ignored": ", ".join(map(cut, record.ignored)) or None,
        "id": record.id,
    }
    if generation is not None:
        times = timings(generation)
        fields |= {"prompt_tokens": generation.prompt_tokens, "cached_tokens": times["cache_n"]}
        fields["completion_tokens"] = times["predicted_n"]
        if times["predicted_n"]:
            fields["first_token_seconds"] = times["prompt_ms"] / 1e3
            fields["tokens_per_second"] = times["predicted_per_second"]
        if times["draft_n"]:
            fields["draft_tokens"] = times["draft_n"]
            fields["accepted_tokens"] = times["draft_n_accepted"]
            fields["optimistic_tokens"] = times.get("draft_n_optimistic") or None
            fields["draft_sources"] = ", ".join(
                f"{source} {sum(counts['draft_n_accepted'])} of {sum(counts['draft_n'])}"
                for source, counts in times["draft_sources"].items()
            )
        if reason is None and not generation.is_finished:
            reason = "the client left" if generation.error is None else str(generation.error)
    elif status == LEFT:
        reason = reason or "the client left"
    fields["reason"] = reason
    fields = {name: value for name, value in fields.items() if value is not None}
    failed = status >= 500 or (generation is not None and generation.error is not None)
    text = "".join(part for name, part in _PARTS.items() if name in fields)
    logger.log(logging.WARNING if failed else logging.INFO, text, fields)
