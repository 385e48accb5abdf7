"""Forwards a request to its model's process, and the answer to the client as it arrives."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mlx_mtp.errors import UNEXPECTED, MlxMtpError, UnavailableError
from mlx_mtp.router.child import Child
from mlx_mtp.server.cards import EMBEDS, ollama_unloaded, wrong_kind
from mlx_mtp.server.http.access import CLIENT, client_header
from mlx_mtp.server.http.body import RoutedBody, read_body, until_disconnect
from mlx_mtp.server.http.errors import StreamForm, public
from mlx_mtp.server.http.middleware import REQUEST_ID, refuse
from mlx_mtp.server.http.protocol import WRITE
from mlx_mtp.server.http.record import record_of
from mlx_mtp.unix_http import HOP_BY_HOP, SocketAnswer, ask

if TYPE_CHECKING:
    from mlx_mtp.router.app import RouterState
    from mlx_mtp.router.fleet import ServedModel

# Headers that are not forwarded: hop-by-hop ones, keys, and one that a process would trust.
_OWN = {*HOP_BY_HOP, b"content-length", b"expect", b"authorization", b"x-api-key", CLIENT.encode()}
_OF_ANSWER = {*HOP_BY_HOP, b"date", REQUEST_ID.encode()}


async def forward(request: Request) -> Response:
    """Forward a request to the model that its body names."""
    state: RouterState = request.app.state.context
    content, body = await read_body(request, state, RoutedBody)
    model, route = state.fleet.find(body.model), record_of(request.scope).route
    if (able := model.plan.get("able")) and route.generates and route.embeds != (able == EMBEDS):
        raise wrong_kind(model.name, embeds=not route.embeds)
    form = StreamForm(request.scope["path"], route.error_body)
    if form.is_ollama:
        state.fleet.keep(model, seconds := body.seconds())
        if seconds == 0 and not (body.messages or body.prompt or body.input):  # Unload it.
            return JSONResponse(ollama_unloaded(body.model))
    state.limiter.reserve(request.scope, 1)
    return Forwarded(state, form, model, content, form.wants_stream(body.stream))


class Forwarded(Response):
    """The answer to a forwarded request: the process's, or an error if no process answers."""

    def __init__(
        self, state: RouterState, form: StreamForm, model: ServedModel, body: bytes, streams: bool
    ) -> None:
        super().__init__()
        self._state, self._form, self._model = state, form, model
        self._content, self._streams = body, streams
        self._begun, self._last = False, b""  # True if the response has begun; last piece sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            await until_disconnect(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        record, error = record_of(scope), None
        route = record.route
        try:
            error = await self._pass_on(scope, send)
        except (MlxMtpError, OSError) as fault:
            if not isinstance(fault, MlxMtpError):
                lost = "ended before its answer was complete"
                fault = UnavailableError(f"The process of the model {self._model.name!r} {lost}.")
            record.route = route
            if not self._begun:
                await refuse(scope, fault)(scope, receive, send)
                return
            error, record.reason = self._form.body(fault), str(public(fault))
        end = b"" if error is None else self._form.failure(error, self._last)
        if error is None or (end and self._streams):
            await send({"type": "http.response.body", "body": end, "more_body": False})
        # Otherwise uvicorn closes the connection in the middle of the response.

    async def _pass_on(self, scope: Scope, send: Send) -> dict[str, Any] | None:
        """Forward the request; return the process's error if the response had already begun."""
        while True:
            try:
                child = await self._taken(send)
                try:
                    request = child_request(scope)
                    with await ask(child.path, *request, self._content, child.spare) as answer:
                        self._content = b""  # It may be large, and the answer may take long.
                        self._state.held.release(scope)
                        return await self._copy(scope, send, answer)
                finally:
                    self._state.fleet.release(self._model)
            except (BlockingIOError, ConnectionRefusedError, FileNotFoundError):
                await asyncio.sleep(0.05)  # It accepts too slowly, or has ended: ask again.

    async def _taken(self, send: Send) -> Child:
        """Wait until the model takes the request; a stream gets keep-alives meanwhile."""
        config, fleet = self._state.config, self._state.fleet
        patience = config.keep_alive_seconds if self._streams else None

        async def wait(begins: asyncio.Future[Any]) -> None:
            while not (await asyncio.wait({begins}, timeout=patience))[0]:
                await self._begin(send, 200, self._form.headers)
                await self._send(send, self._form.keep_alive)

        limit = min(fleet.config.model_timeout, config.request_timeout or float("inf"))
        return await fleet.take(self._model, limit, wait)

    async def _begin(self, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send(self, send: Send, piece: bytes) -> None:
        self._last = piece
        await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _copy(self, scope: Scope, send: Send, answer: SocketAnswer) -> dict[str, Any] | None:
        """Send the process's answer; return its error if the response had already begun."""
        if self._begun and answer.status != 200:
            with contextlib.suppress(*UNEXPECTED):
                return dict(json.loads(await answer.body()))
            return self._form.body(UnavailableError("The model's process gave no answer."))
        record = record_of(scope)
        record.route = record.route._replace(is_logged=False)  # The process logs it.
        record.id = dict(answer.headers).get(REQUEST_ID.encode(), record.id.encode()).decode()
        headers = [each for each in answer.headers if each[0] not in _OF_ANSWER]
        await self._begin(send, answer.status, headers)

        def take(piece: bytes) -> bool:
            self._last = piece
            return bool(scope["state"][WRITE](piece))

        while piece := await answer.piece(take):
            await self._send(send, piece)
        return None


def child_request(scope: Scope) -> tuple[str, bytes, list[tuple[bytes, bytes]]]:
    """Returns the method, the target and the headers that the process gets."""
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    kept = [each for each in scope["headers"] if each[0] not in _OWN]
    return scope["method"], scope["raw_path"] + query, [*kept, client_header(scope)]
