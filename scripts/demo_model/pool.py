"""Rows on the training device: fresh ones as long as there are any, then any again."""

from __future__ import annotations

import torch
from torch import Tensor

from demo_model.packing import Rows


class Pool:
    """Rows of one length.

    Args:
        length: T.
        capacity: rows it holds; more are not taken.
        device: where they are.
    """

    def __init__(self, length: int, capacity: int, device: torch.device) -> None:
        shape = (capacity, length)
        self.ids = torch.empty(shape, dtype=torch.int16, device=device)
        self.segments = torch.empty(shape, dtype=torch.uint8, device=device)
        self.kinds = torch.empty(shape, dtype=torch.uint8, device=device)
        self.length, self.capacity = length, capacity
        self.num_rows = self.num_used = 0

    @property
    def full(self) -> bool:
        """No more rows are taken."""
        return self.num_rows == self.capacity

    @property
    def num_fresh(self) -> int:
        """Rows that have never been trained on."""
        return self.num_rows - self.num_used

    def add(self, rows: Rows) -> None:
        """Take as many as there is room for."""
        count = min(len(rows), self.capacity - self.num_rows)
        end = self.num_rows + count
        for name in ("ids", "segments", "kinds"):
            source = torch.from_numpy(getattr(rows, name)[:count])
            getattr(self, name)[self.num_rows : end].copy_(source)
        self.num_rows = end

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """ids, segments and kinds, int64 and int32 [size, T] and uint8."""
        if self.num_fresh >= size:
            index = torch.arange(self.num_used, self.num_used + size)
            self.num_used += size
        else:
            index = torch.randint(0, self.num_rows, (size,), generator=generator)
        index = index.to(self.ids.device)
        return self.ids[index].long(), self.segments[index].int(), self.kinds[index]
