"""The fleet with stub processes, so that the test controls the order of events."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mlx_mtp.config import RouterConfig
from mlx_mtp.router import fleet as fleet_module
from mlx_mtp.router.fleet import Fleet, ServedModel
from mlx_mtp.router.policy import ModelState


class StubChild:
    """A process that is healthy until the test clears `healthy` and ends when it sets `ended`."""

    started: list["StubChild"]

    def __init__(self) -> None:
        self.path, self.last_lines, self.healthy = Path("/nowhere"), ["bye"], True
        self.killed, self.ended = asyncio.Event(), asyncio.Event()

    @classmethod
    async def start(cls, *_: Any) -> "StubChild":
        cls.started.append(cls())
        return cls.started[-1]

    async def wait(self) -> str:
        await self.ended.wait()
        return "has ended"

    def kill(self) -> None:
        self.killed.set()

    def terminate(self, most: int) -> None:
        self.ended.set()

    async def is_healthy(self, seconds: float | None = None) -> bool:
        return self.healthy


async def plans(_: Any) -> AsyncIterator[dict[str, Any]]:
    yield {"limit": 1, "source": "as the test says"}
    yield {"model": 0, "nbytes": 1}


async def until_done(begins: asyncio.Future[Any]) -> None:
    await asyncio.wait({begins})


def test_requests_wait_for_the_successor_of_a_process_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The requests get neither an error nor the process that is being killed."""
    monkeypatch.setattr(fleet_module, "HEALTH_SECONDS", 0.003)
    monkeypatch.setattr(fleet_module, "Child", StubChild)
    StubChild.started = []

    async def work() -> None:
        model = ServedModel("a", 60.0)
        fleet = Fleet([model], RouterConfig(), command=lambda _: [], plans=plans)
        fleet.start()

        async def asked() -> Any:
            child = await fleet.take(model, 60.0, until_done)
            fleet.release(model)
            return child

        first = await asked()
        first.healthy = False
        await first.killed.wait()
        assert model.state is ModelState.STOPPING
        late = [asyncio.create_task(asked()) for _ in range(3)]
        await asyncio.sleep(0.02)
        assert not any(each.done() for each in late)
        first.ended.set()  # A killed process may take a while to end.
        assert {await each for each in late} == {StubChild.started[1]} != {first}
        assert (fleet.counts["deaths", "a"], fleet.counts["loads", "a"]) == (1, 2)
        await fleet.stop()

    asyncio.run(asyncio.wait_for(work(), 60.0))
