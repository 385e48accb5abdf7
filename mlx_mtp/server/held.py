"""What requests' bodies and unread answers take in memory: bounded in all, and for each client."""

import asyncio
from collections import Counter

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_mtp.errors import BytesLimitError
from mlx_mtp.server.admission import UNKNOWN_RETRY_SECONDS, client_of
from mlx_mtp.server.http_errors import error_response
from mlx_mtp.server.request_log import record_of

PIECE = 64 << 10
"""Bytes of an answer that are written at once; as many of each body and answer are not counted:
they are bounded by the number of connections."""
# Bytes that a body takes until its request ends, for each of its own: text with one character
# beyond U+FFFF takes four; and for each of its objects, which become Python's.
BODY_BYTES, OBJECT_BYTES = 4, 512
_KEY = "mlx_mtp.held"


class HeldBytes:
    """Counts what requests hold, from when it arrives or is made to their end."""

    def __init__(self, most: int, rejected: Counter[str]) -> None:
        self.most, self.total = most, 0
        self._of: Counter[str] = Counter()
        self._rejected = rejected

    def take_body(self, scope: Scope, begun: bytearray) -> None:
        """Count a body as far as it has come."""
        self.take(scope, BODY_BYTES * len(begun) + OBJECT_BYTES * begun.count(b"{"))

    def take(self, scope: Scope, nbytes: int, *, always: bool = False) -> None:
        """Count what a request holds in all; BytesLimitError: others leave too little for it."""
        client, own = client_of(scope, None)[0], scope.get(_KEY, 0)
        more = max(0, nbytes - PIECE) - own
        if more <= 0:
            return
        for held, most in ((self.total, self.most), (self._of[client], self.most * 3 // 4)):
            # A request alone is bounded by the longest body.
            if held > own and held + more > most and not always:
                self._rejected["bytes"] += 1
                raise BytesLimitError(
                    "The bodies and unread answers of other requests take all memory that there "
                    "is for them. Try again later.",
                    retry_after=UNKNOWN_RETRY_SECONDS,
                )
        scope[_KEY] = own + more
        self.total += more
        self._of[client] += more

    def give_back(self, scope: Scope) -> None:
        client, own = client_of(scope, None)[0], scope.pop(_KEY, 0)
        self.total -= own
        self._of[client] -= own
        if not self._of[client]:
            del self._of[client]


class WriteInPieces:
    """ASGI middleware: writes answers as their clients read them, and counts those that wait."""

    def __init__(self, app: ASGIApp, held: HeldBytes) -> None:
        self._app, self._held = app, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = None
        refusal: Response | None = None

        async def write(message: Message) -> None:
            nonlocal start, refusal
            if message["type"] != "http.response.body":
                start = message  # It waits for the body's size.
                return
            body, more = memoryview(message.get("body", b"")), message.get("more_body", False)
            if start is not None:
                begin, start = start, None
                try:
                    # What was generated for an answer is not thrown away.
                    always = record_of(scope).generation is not None
                    self._held.take(scope, scope.get(_KEY, 0) + len(body), always=always)
                except BytesLimitError as error:
                    record_of(scope).reason = str(error)
                    refusal = error_response(error, scope["path"])
                    await refusal(scope, receive, send)
                else:
                    await send(begin)
            if refusal is None:
                for at in range(0, max(len(body), 1), PIECE):
                    rest = more or at + PIECE < len(body)
                    piece = bytes(body[at : at + PIECE])
                    await send({"type": message["type"], "body": piece, "more_body": rest})
                    if rest and not more:
                        await asyncio.sleep(0)  # That a client has left is known after a while.

        try:
            await self._app(scope, receive, write if scope["type"] == "http" else send)
        finally:
            self._held.give_back(scope)
