"""The parent's application: it has a model server's routes, and forwards most requests to one."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette

from mlx_mtp.config import ServerConfig
from mlx_mtp.router import views
from mlx_mtp.router.fleet import EVENTS, Fleet
from mlx_mtp.router.forward import forward
from mlx_mtp.server import page
from mlx_mtp.server.http.admission import HeldBytes, RequestLimiter
from mlx_mtp.server.http.record import route_finder
from mlx_mtp.server.serving import add_routes_and_checks
from mlx_mtp.server.table import route_table

_OF_ONE = "stored_chat label_chat delete_chat stored_messages stored_response delete_response"
_OF_ONE += " stored_items cancel"
_OF_ALL = "list_chats show tags processes models model metrics"
_OWN = "health live clients page_file root ollama_version"
_ANSWERED = dict.fromkeys(_OF_ONE.split(), views.of_one)
_ANSWERED |= {name: getattr(views, f"{name}_of_all") for name in _OF_ALL.split()}
_ANSWERED |= {name: getattr(page, name) for name in _OWN.split()}
# All other routes are forwarded to the model that the request's body names.
ROUTES = route_table(defaultdict(lambda: forward, _ANSWERED))


class RouterMetrics:
    """The parent's own metrics; the models' processes have the others."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._requests = fleet, Counter[tuple[str, ...]]()

    def count(self, name: str, *labels: str) -> None:
        if name == "http_requests":
            self._requests[labels] += 1

    def count_ignored(self, names: Iterable[str]) -> None:
        """Do nothing: the models' processes count ignored parameters."""

    def render(self) -> str:
        registry: Any = self  # `generate_latest` calls only `collect`.
        return generate_latest(registry).decode()

    def collect(self) -> Iterator[Metric]:
        counts, models = self._fleet.counts, self._fleet.models
        by_model = {event: [counts[event, m.name] for m in models] for event in EVENTS}
        by_model |= {"memory_bytes": [m.share for m in models]}
        by_model |= {"waiting": [len(m.waiting) for m in models]}
        samples = {name: zip([[m.name] for m in models], of) for name, of in by_model.items()}
        for name, rows in {"requests": self._requests.items(), **samples}.items():
            kind: Any = CounterMetricFamily if name in ("requests", *EVENTS) else GaugeMetricFamily
            labels = ["route", "status"] if name == "requests" else ["model"]
            family = kind(f"mlx_mtp:router_{name}", name.replace("_", " "), labels=labels)
            for values, number in rows:
                family.add_metric(values, number)
            yield family


class RouterState:
    """The application's state: that of every server (`serving.ServerState`), and the models."""

    fault = None  # always: a process that fails is started again
    loop = "uvloop"

    def __init__(self, config: ServerConfig, fleet: Fleet) -> None:
        self.config, self.fleet = config, fleet
        info = SimpleNamespace(max_num_seqs=config.max_connections)  # in place of batch rows
        engine: Any = SimpleNamespace(info=info, unhealthy_reason=None, hang_reason=None)
        self.limiter = RequestLimiter(engine, config.max_queue)
        self.held = HeldBytes(config.max_held_bytes, self.limiter.rejected)
        self.metrics = RouterMetrics(fleet)
        self.created = datetime.now(UTC).replace(microsecond=0)
        self.end_all = fleet.end_all

    def resume(self) -> None:
        """Do nothing: the processes are in other sessions, so Ctrl-Z has not suspended them."""

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(model.name for model in self.fleet.models)

    @property
    def max_model_len(self) -> int:
        return int(self.fleet.find("").plan.get("context", 0))

    @property
    def sees_images(self) -> bool:
        return self.fleet.find("").card.get("images") is True


def create_router(config: ServerConfig, fleet: Fleet) -> Starlette:
    """Build the application; its lifespan starts and ends the models' processes."""
    state = RouterState(config, fleet)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        fleet.start()
        try:
            yield
        finally:
            await fleet.stop()

    app = Starlette(lifespan=lifespan)
    add_routes_and_checks(app, state, ROUTES, route_finder(ROUTES))
    app.state.live = views.LiveFeed(state)
    return app
