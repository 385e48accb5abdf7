"""Several ranks in one process."""

import pickle
import queue
import threading
from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import mlx.core as mx
import pytest

from mlx_mtp.distributed import World
from mlx_mtp.engine import batch, prompts
from mlx_mtp.models import joined, layers, model, moe
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.prefix.disk import PrefixStore
from mlx_mtp.ranks.follower import follow
from mlx_mtp.ranks.links import Links
from mlx_mtp.ranks.messages import Fetched
from mlx_mtp.sampling import sampler


class Exchange:
    """Replaces the collective operations: the ranks are threads of this process."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.parts: list[mx.array | None] = [None] * size
        self.local = threading.local()
        for each in (layers, moe):
            monkeypatch.setattr(each, "all_reduce", self.all_reduce)
        for each in (joined, moe):
            monkeypatch.setattr(each, "world", lambda: World(size=size))
        for module in (batch, model):
            monkeypatch.setattr(module, "all_gather", self.all_gather)
        for each in (prompts, sampler):
            monkeypatch.setattr(each, "broadcast", lambda tokens: self.all(tokens)[0])

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Run `work(rank)` on each rank's thread; returns the results."""

        def one(rank: int) -> Any:
            self.local.rank = rank
            try:
                return work(rank)
            except BaseException:
                self.barrier.abort()
                raise
            finally:
                mx.clear_streams()

        with ThreadPoolExecutor(len(self.parts)) as pool:
            tasks = [pool.submit(one, rank) for rank in range(len(self.parts))]
            for task in as_completed(tasks):
                task.result()  # raises the first failure, not the broken barriers that follow
            return [task.result() for task in tasks]

    def all(self, x: mx.array) -> list[mx.array]:
        mx.eval(x)
        self.parts[self.local.rank] = x
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts

    def all_reduce(self, x: mx.array) -> mx.array:
        return sum(self.all(x))

    def all_gather(self, x: mx.array) -> mx.array:
        return mx.concatenate(self.all(x), axis=-1)


class Queue:
    """Both ends of a link between threads."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.num_done = 0
        self.fetched = Fetched(0, "")
        self.on_fetched: Callable[[], None] = lambda: None

    def send(self, message: object) -> None:
        if isinstance(message, Fetched):
            self.fetched = message
            self.on_fetched()
        else:
            self.messages.put(pickle.dumps(message))

    post = send

    def receive(self) -> object:
        return pickle.loads(self.messages.get(timeout=60))

    def close(self) -> None:
        pass


def led(
    monkeypatch: pytest.MonkeyPatch,
    models: Many[LoadedModel],
    work: Callable[[Links], Any],
    stores: Many[PrefixStore] = (),  # of ranks 1 and up
) -> Any:
    """Run `work(links)` as rank 0, and a follower thread for each other rank's model."""
    together, ends = Links(pytest.fail), [Queue() for _ in models[1:]]
    together.all = ends

    def one(rank: int) -> Any:
        if rank:
            store = stores[rank - 1] if stores else None
            return follow(models[rank], ends[rank - 1], store)
        try:
            return work(together)
        finally:
            together.close()

    return Exchange(len(models), monkeypatch).run(one)[0]
