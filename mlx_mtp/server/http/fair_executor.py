"""Work for requests beside the event loop, so much at once; the clients that wait take turns."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from mlx_mtp.engine.fair_queue import FLAT_COST, QUANTUM, FairQueue

Result = TypeVar("Result")

SMALL = 1 << 18
"""Characters, or bytes, of a text that is read or written within milliseconds."""


@dataclass(frozen=True, eq=False, slots=True)
class _Waiting:
    """What the queue of the engine knows of a request: here each costs its client a turn."""

    client: tuple[str, ...]
    begins: asyncio.Future[None]
    num_prompt: int = QUANTUM - FLAT_COST


class FairExecutor:
    """Runs `free` pieces of work at once, on threads; `small` texts take no turn."""

    def __init__(self, free: int, executor: Executor | None = None, small: int = SMALL) -> None:
        self._free, self._executor, self._small = free, executor, small
        self._queue: Any = FairQueue()

    async def run_by_size(
        self, size: int, client: tuple[str, ...], work: Callable[[], Result]
    ) -> Result:
        """Do work on a text of this many characters: in turn, or at once if it is small."""
        if size <= self._small:
            return await asyncio.to_thread(work)
        return await self.run(client, work)

    async def run(self, client: tuple[str, ...], work: Callable[[], Result]) -> Result:
        """Do some work in its client's turn.

        The turn lasts until the work has ended, even if nobody waits for it any longer.
        """
        loop = asyncio.get_running_loop()
        if self._free:
            self._free -= 1
        else:
            begins = loop.create_future()
            self._queue.add(_Waiting(client, begins))
            try:
                await begins
            except asyncio.CancelledError:
                if begins.done() and not begins.cancelled():
                    self._next()
                raise
        try:
            job = loop.run_in_executor(self._executor, work)
        except BaseException:
            self._next()
            raise
        job.add_done_callback(self._end)
        return await asyncio.shield(job)

    def _end(self, job: "asyncio.Future[Any]") -> None:
        if not job.cancelled():
            job.exception()  # Nobody may be left to ask for it.
        self._next()

    def _next(self) -> None:
        while len(self._queue):
            begins = self._queue.pop().begins
            if not begins.cancelled():
                begins.set_result(None)
                return
        self._free += 1
