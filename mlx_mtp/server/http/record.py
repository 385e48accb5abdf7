"""What is known of an HTTP request: each layer and the handler add to one record in its scope."""

from __future__ import annotations

import hashlib
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import Scope

from mlx_mtp.server.http.routing import NO_ROUTE, Route

if TYPE_CHECKING:
    from mlx_mtp.server.generation.generation import Generation

_RECORD = "mlx_mtp.record"


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request, from its head to the end of its response."""

    route: Route = NO_ROUTE
    began: float = field(default_factory=time.perf_counter)
    id: str = field(default_factory=lambda: f"req-{uuid.uuid4().hex[:24]}")  # or the answer's
    key: str = ""  # SHA-256 of the API key that let it in; empty on a server without keys
    num_slots: int = 0  # reserved in the engine and its queue
    body_bytes: int = 0  # of the text that it has to read
    num_bytes: int = 0  # of its body and unread answer, as `HeldBytes` counts them
    ignored: list[str] = field(default_factory=list)  # the body's parameters without effect
    generation: Generation | None = None
    status: int = 0  # of the response, once there is one
    reason: str | None = None  # why it failed


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of the request with this ASGI scope; the first call makes it."""
    record: RequestRecord | None = scope.get(_RECORD)
    if record is None:
        record = scope[_RECORD] = RequestRecord()
    return record


def client_of(scope: Scope, user: str | None = None) -> tuple[str, str]:
    """Return the client of a request: its key and address, and its user agent or the body's `user`.

    The first can't be chosen freely, the second can. Waiting clients take turns by the first, and
    within it by the second (`engine.fair_queue`): so agents on one machine are told apart, and
    inventing names gains nothing.
    """
    address = scope["client"][0] if scope.get("client") else ""
    name = user or Headers(scope=scope).get("user-agent", "")
    digest = hashlib.sha256(name.encode()).hexdigest()[:16] if name else ""
    return f"{record_of(scope).key[:16]}@{address}", f"user {digest}" if user else digest
