"""A router with fake model processes, which send what a request describes (fake_child.py)."""

import contextlib
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fake_child
from mlx_mtp.config import RouterConfig, ServerConfig
from mlx_mtp.router.app import create_router
from mlx_mtp.router.fleet import Fleet, ServedModel
from tests.server.conftest import Served, listening

FAKE = str(Path(fake_child.__file__).resolve())


class Routed(Served):
    """A client for a router, with access to the router's fleet."""

    fleet: Fleet

    def chat(self, model: str, **fields: Any) -> Any:
        return self.post("/v1/chat/completions", json={"model": model, **fields})

    def model(self, name: str) -> ServedModel:
        return self.fleet.find(name)

    def states(self) -> dict[str, str]:
        return {each["id"]: each["state"] for each in self.get("/v1/models").json()["data"]}

    def count(self, event: str, name: str) -> int:
        return self.fleet.counts[event, name]


def is_gone(pid: int) -> bool:
    """Returns True if a process has ended, even if it has not been reaped yet."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return shown.stdout.strip() in ("", "Z", "Zs")


@contextlib.contextmanager
def routed(
    *names: str,
    limit: int = 2,
    needs: dict[str, int] | None = None,
    how: dict[str, str] | None = None,  # the fake's second argument, by model
    pinned: str = "",
    embeds: str = "",  # name of the model that makes embeddings
    settings: dict[str, Any] | None = None,  # fields of `ServerConfig`
    max_queue: int = 256,
    **config: Any,
) -> Iterator[Routed]:
    """Yields a client of a router; each model needs one byte unless `needs` says otherwise."""
    of_router = RouterConfig(**config)
    keep = of_router.keep_alive
    models = [ServedModel(n, keep, n == pinned, names=(n, n.upper())) for n in names]

    async def plans(of: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"limit": limit, "source": "as the test says"}
        for number, each in enumerate(of):
            able = ["embedding" if each.name == embeds else "completion"]
            fields = {"context": 1000, "weights": 7, "kind": "fake", "able": able}
            yield {"model": number, "nbytes": (needs or {}).get(each.name, 1), **fields}

    def command(model: ServedModel) -> list[str]:
        seconds = (how or {}).get(model.name, "0")
        return [sys.executable, "-S", "-E", FAKE, model.name, seconds]

    of_server = ServerConfig(model_name=names[0], **(settings or {}))
    num_keys = len(of_server.api_keys)
    fleet = Fleet(
        models, of_router, command=command, plans=plans, num_keys=num_keys, max_queue=max_queue
    )
    client = Routed(timeout=60)
    client.fleet = fleet
    with listening(create_router(of_server, fleet), client):
        yield client


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="mlx_mtp")
    return caplog
