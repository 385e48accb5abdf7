"""Runs the vision tower for the images of prompts, and gives their rows to prefill chunks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx

from mlx_mtp.cache.packing import ImageRows, Packing
from mlx_mtp.distributed import broadcast
from mlx_mtp.vision.placed import PromptImages
from mlx_mtp.vision.tower import TowerPart, VisionTower

_NO_LIMIT = 1e30  # multiplications


class Vision:
    """A tower, and the rows of the images that it saw last, in at most `limit` bytes.

    The tower sees each image alone, so an image's rows depend on nothing else. In arrays on the
    device the tokens of a prompt's images, in the vocabulary all `image_id`, are `first_id` and up.
    With several ranks each has a tower, and all take the rows of rank 0, whose chip may round
    otherwise.
    """

    def __init__(
        self, tower: VisionTower, image_id: int, first_id: int, limit: int, pause: float = 0.0
    ) -> None:
        self._tower, self._limit = tower, limit
        self._pause = pause  # most seconds of the tower in a step; 0: no limit
        self._speed: float | None = None  # multiplications a second
        self.image_id, self.first_id = image_id, first_id
        self._rows: OrderedDict[bytes, mx.array] = OrderedDict()
        # An image that is half-way through the tower, and what is left of its parts.
        self._begun: tuple[bytes, Iterator[TowerPart]] | None = None
        self._positions = WeakKeyDictionary[PromptImages, mx.array]()

    def advance(self, images: PromptImages, start: int, end: int) -> bool:
        """Whether the images of the tokens `start` to `end` have rows; if not, work on that.

        Call it once a step until they have: running rows wait for a part of the tower or for a
        chunk, never for both.
        """
        needed = {image.pixels.digest: image.pixels for image in images.within(start, end)[0]}
        for digest in needed.keys() & self._rows.keys():
            self._rows.move_to_end(digest)
        missing = next((digest for digest in needed if digest not in self._rows), None)
        if missing is not None:
            begun, self._begun = self._begun, None  # gone if it fails
            self._run(*(begun or (missing, self._tower.parts(needed[missing].array()))))
            return False
        # What this chunk needs stays in any case.
        for digest in [digest for digest in self._rows if digest not in needed]:
            if sum(rows.nbytes for rows in self._rows.values()) > self._limit:
                del self._rows[digest]
        return True

    def place(
        self, packing: Packing, images: PromptImages, start: int, end: int, num_repeated: int
    ) -> None:
        """Give a packing its positions, and rows for the tokens `start` to `end` and the next one.

        The packing has these tokens after `num_repeated` others. Call `advance` before.
        """
        if images not in self._positions:
            self._positions[images] = mx.array(images.positions)
        positions = self._positions[images][start - num_repeated : end]
        if not images.within(start - num_repeated, end)[0]:
            positions = positions[:, 0]
        found, before = images.within(start, end + 1)
        rows = None
        if found:
            parts = [self._rows[image.pixels.digest] for image in found]
            rows = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        packing.rope_positions = positions
        packing.images = ImageRows(rows, self.first_id + before)

    def clear(self) -> None:
        """Free the memory."""
        self._rows.clear()
        self._begun = None

    def _run(self, digest: bytes, parts: Iterator[TowerPart]) -> None:
        """Evaluate as many parts as a step may take by the speed of earlier ones, at least one."""
        allowed = _NO_LIMIT if not self._pause else (self._speed or 0.0) * self._pause
        most: Any = broadcast(mx.array(allowed)).item()  # All ranks need the same.
        mx.synchronize()  # What was launched before is not the tower's time.
        began, done, rows = perf_counter(), 0, mx.array(0)
        for part in parts:
            if done and done + part.work > most:
                self._begun = digest, chain([part], parts)
                break
            mx.eval(rows)  # One part's scratch at a time; the next one is built meanwhile.
            mx.async_eval(part.arrays)
            rows, done = part.arrays[0], done + part.work
        else:
            rows = self._rows[digest] = broadcast(rows)
        mx.eval(rows)
        if done:
            speed = done / max(perf_counter() - began, 1e-9)
            self._speed = speed if self._speed is None else (self._speed + speed) / 2
