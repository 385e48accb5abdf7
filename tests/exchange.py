"""Several ranks in one process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import mlx.core as mx
import pytest

from mlx_mtp.engine import batch
from mlx_mtp.models import layers, loaded, mixture
from mlx_mtp.sampling import sampler
from mlx_mtp.world import World


class Exchange:
    """Stands in for the collectives, at once: threads of one process are the ranks."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.parts: list[mx.array | None] = [None] * size
        self.local = threading.local()
        for each in (layers, mixture):
            monkeypatch.setattr(each, "summed", self.summed)
        monkeypatch.setattr(mixture, "world", lambda: World(size=size))
        for module in (batch, loaded):
            monkeypatch.setattr(module, "gathered", self.gathered)
        monkeypatch.setattr(sampler, "agreed", lambda tokens: self.all(tokens)[0])

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What each rank's work returns."""

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
                task.result()  # the first failure, not the barriers that it broke
            return [task.result() for task in tasks]

    def all(self, x: mx.array) -> list[mx.array]:
        mx.eval(x)
        self.parts[self.local.rank] = x
        self.barrier.wait()
        found = list(self.parts)
        self.barrier.wait()
        return found

    def summed(self, x: mx.array) -> mx.array:
        return sum(self.all(x))

    def gathered(self, x: mx.array) -> mx.array:
        return mx.concatenate(self.all(x), axis=-1)
