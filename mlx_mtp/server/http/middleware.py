"""The middleware (log of requests, checks, writing of responses), and the handler of errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_mtp import errors
from mlx_mtp.bounded_json import shortened
from mlx_mtp.server.http.admission import PIECE, HeldBytes, RequestLimiter
from mlx_mtp.server.http.errors import error_response, public
from mlx_mtp.server.http.record import Route, record_of

logger = logging.getLogger(__name__)

LEFT = 499  # nginx's status for a client that did not wait for the answer
IGNORED, REQUEST_ID = "x-mlx-mtp-ignored", "x-request-id"  # headers of responses
# The parts of a log line, by field; a field without a value has no part. JSON has all by name.
_PARTS = {
    "client": "%(client)s ",
    "method": "%(method)s ",
    "path": "%(path)s",
    "status": " %(status)d",
    "seconds": " %(seconds).1f s",
    "completion_tokens": ", %(prompt_tokens)d+%(completion_tokens)d tokens",
    "tokens_per_second": ", %(tokens_per_second).1f/s",
    "accepted_percent": ", %(accepted_percent)d%% accepted",
    "ignored": ", ignored: %(ignored)s",
    "reason": ", %(id)s: %(reason)s",
}
# Usual values, which a line leaves out
_USUAL = {"method": ("POST",), "client": ("127.0.0.1", "::1")}
# First parts of routes of OpenAI's, Cohere's and Ollama's APIs that are not offered. They don't get
# a 404, which makes LiteLLM's proxy take a server out of service.
_NOT_OFFERED = {
    *("assistants", "audio", "batches", "containers", "conversations", "embeddings", "evals"),
    *("files", "fine_tuning", "images", "moderations", "ocr", "realtime", "rerank", "responses"),
    *("search", "threads", "uploads", "vector_stores", "videos"),
    *("copy", "create", "delete", "pull", "push"),
}


class RequestCounts(Protocol):
    """The metrics, as far as they count requests."""

    def count(self, name: str, *labels: str) -> None: ...

    def count_ignored(self, names: Iterable[str]) -> None: ...


Check = Callable[[Scope], None]
"""Raises an MlxMtpError if the request must be refused."""


class RequestLog:
    """The outermost middleware: finds a request's route, sends its ID, counts it and logs it."""

    def __init__(
        self, app: ASGIApp, metrics: RequestCounts, find_route: Callable[[str], Route]
    ) -> None:
        self._app, self._metrics, self._find_route = app, metrics, find_route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = record_of(scope)
        record.route = self._find_route(scope["path"])

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                headers = {REQUEST_ID: record.id, IGNORED: ", ".join(record.ignored)}
                more = [(name.encode(), text.encode()) for name, text in headers.items() if text]
                message["headers"] = [*message["headers"], *more]
                self._metrics.count_ignored(record.ignored)
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            record.status = record.status or 500  # Starlette's outermost layer will answer.
            record.reason = record.reason or type(error).__name__
            raise
        finally:
            # The label is the route's path: with clients' paths, series would grow without bound.
            self._metrics.count("http_requests", record.route.path, str(record.status or LEFT))
            if record.route.is_logged:
                log_request(scope, time.perf_counter() - record.began)


def log_request(scope: Scope, seconds: float | None = None) -> None:
    """Log a request that took `seconds`, if known; the log's handler formats the line."""
    record = record_of(scope)
    generation, status, reason = record.generation, record.status or LEFT, record.reason
    fields: dict[str, Any] = {
        "client": scope["client"][0] if scope.get("client") else "-",
        "method": scope["method"],
        # without the query, in which some clients send their key
        "path": shortened(scope["path"]),
        "status": status,
        "seconds": seconds,
        "ignored": ", ".join(map(shortened, record.ignored)) or None,
        "id": record.id,
    }
    if generation is not None:
        times = generation.timings()
        fields |= {"prompt_tokens": generation.prompt_tokens, "cached_tokens": times["cache_n"]}
        fields["completion_tokens"] = times["predicted_n"]
        if times["predicted_n"]:
            fields["first_token_seconds"] = times["prompt_ms"] / 1e3
            fields["tokens_per_second"] = times["predicted_per_second"]
        if times["draft_n"]:
            fields["draft_tokens"] = times["draft_n"]
            fields["accepted_tokens"] = times["draft_n_accepted"]
            fields["accepted_percent"] = round(100 * times["draft_n_accepted"] / times["draft_n"])
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
    # An answer that began well may have failed later.
    failed = status >= 500 or (status < 400 and record.reason is not None)
    failed |= generation is not None and generation.error is not None
    shown = {name for name, value in fields.items() if value not in _USUAL.get(name, ())}
    text = "".join(part for name, part in _PARTS.items() if name in shown)
    logger.log(logging.WARNING if failed else logging.INFO, text, fields)


def refuse(scope: Scope, error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    """Returns an error's response in the form of the API that was called; records the reason."""
    record = record_of(scope)
    record.reason = str(public(error))
    return error_response(error, record.route.error_body, headers)


class CheckMiddleware:
    """Refuses a request with the first error that a check raises."""

    def __init__(self, app: ASGIApp, checks: Sequence[Check]) -> None:
        self._app, self._checks = app, checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            try:
                for check in self._checks:
                    check(scope)
            except errors.MlxMtpError as error:
                app = refuse(scope, error)
        await app(scope, receive, send)


class WriteInPieces:
    """Writes responses piece by piece as clients read them, and counts their bytes as held.

    At the end of a response it frees the slots and bytes that the request has reserved.
    """

    def __init__(self, app: ASGIApp, limiter: RequestLimiter, held: HeldBytes) -> None:
        self._app, self._limiter, self._held = app, limiter, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start: Message | None = None
        refusal: Response | None = None

        async def send_in_pieces(message: Message) -> None:
            nonlocal start, refusal
            if message["type"] != "http.response.body":
                start = message  # held back until the body's size is known
                return
            body, more = memoryview(message.get("body", b"")), message.get("more_body", False)
            if start is not None:
                begin, start = start, None
                try:
                    # A generated answer is never thrown away.
                    always = record_of(scope).route.generates
                    self._held.reserve(scope, len(body), always=always)
                except errors.BytesLimitError as error:
                    refusal = refuse(scope, error)
                    await refusal(scope, receive, send)
                else:
                    await send(begin)
            if refusal is None:
                for at in range(0, max(len(body), 1), PIECE):
                    is_last = at + PIECE >= len(body)
                    piece = bytes(body[at : at + PIECE])
                    await send({**message, "body": piece, "more_body": more or not is_last})
                    if not is_last:
                        await asyncio.sleep(0)  # The loop may notice that the client left.

        try:
            await self._app(scope, receive, send_in_pieces)
        finally:
            self._limiter.release(scope)
            self._held.release(scope)


async def on_error(request: Request, error: Exception) -> Response:
    """Answer an error that a route raised."""
    path, headers = request.url.path, None
    if isinstance(error, ClientDisconnect):
        return Response(status_code=LEFT)  # for the log
    if isinstance(error, HTTPException):
        status, text, headers = error.status_code, error.detail, error.headers
        if status == errors.NotFoundError.status:
            error = _no_route(request)
        else:
            error = errors.RequestError(f"{text}: {shortened(f'{request.method} {path}')}.")
            error.status = status
    return refuse(request.scope, error, headers)


def _no_route(request: Request) -> errors.RequestError:
    path = shortened(request.url.path)
    message = f"There is no route {shortened(request.method)} {path}."
    parts = [part for part in path.split("/") if part not in ("", "v1", "api")]
    if parts and parts[0] in _NOT_OFFERED:
        one = "This server has one model, which generates text"
        return errors.UnsupportedRouteError(f"{message} {one}: use another server for this.")
    known = (route.path for route in request.app.routes)
    if near := get_close_matches(path, [each for each in known if each[-1] != "/"], 1):
        message += f" The nearest is {near[0]}."
    return errors.NotFoundError(message)
