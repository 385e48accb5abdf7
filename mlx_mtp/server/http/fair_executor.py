"""Threads for the long work of requests: a bounded number at once, and clients take turns."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from types import SimpleNamespace
from typing import Any, TypeVar

from mlx_mtp.engine.fair_queue import FLAT_COST, QUANTUM, FairQueue

T = TypeVar("T")

SMALL = 1 << 18
"""Characters, or bytes, of a text that takes milliseconds to read or write."""


class FairExecutor:
    """Runs at most `max_running` calls at once, on the executor or on the loop's default one.

    Texts of up to `small` characters take no turn.
    """

    def __init__(
        self, max_running: int, executor: Executor | None = None, small: int = SMALL
    ) -> None:
        self._free, self._executor, self._small = max_running, executor, small
        self._queue: Any = FairQueue()

    async def run_by_size(self, size: int, client: tuple[str, ...], work: Callable[[], T]) -> T:
        """Call `work` on a thread: in the client's turn, or at once if `size` is small."""
        if size <= self._small:
            return await asyncio.to_thread(work)
        return await self.run(client, work)

    async def run(self, client: tuple[str, ...], work: Callable[[], T]) -> T:
        """Call `work` on a thread, in the client's turn.

        If the caller is cancelled meanwhile, the turn still lasts until the call has returned.
        """
        loop = asyncio.get_running_loop()
        if self._free:
            self._free -= 1
        else:
            begins = loop.create_future()
            # To the engine's queue each call looks like a prompt that costs one turn.
            cost = QUANTUM - FLAT_COST
            self._queue.add(SimpleNamespace(client=client, num_prompt=cost, begins=begins))
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
            job.exception()  # Retrieved, so that asyncio logs nothing if the caller has left.
        self._next()

    def _next(self) -> None:
        while len(self._queue):
            begins = self._queue.pop().begins
            if not begins.cancelled():
                begins.set_result(None)
                return
        self._free += 1
