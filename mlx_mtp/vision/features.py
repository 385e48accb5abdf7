"""Runs the vision tower for the images of prompts, and gives their rows to prefill chunks."""

from __future__ import annotations

from collections import OrderedDict
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from mlx_mtp.cache.packing import ImageRows, Packing
from mlx_mtp.vision.placed import PlacedImage, PromptImages
from mlx_mtp.vision.tower import Patches, VisionTower

AT_ONCE = 1024  # patches that go through the whole tower in one step; with more, some blocks do


class Vision:
    """A tower, and the rows of the images that it saw last, in at most `limit` bytes.

    The tower sees each image alone, so an image's rows depend on nothing else. In arrays on the
    device the tokens of a prompt's images, in the vocabulary all `image_id`, are `first_id` and up.
    """

    def __init__(self, tower: VisionTower, image_id: int, first_id: int, limit: int) -> None:
        self._tower, self._limit = tower, limit
        self.image_id, self.first_id = image_id, first_id
        self._rows: OrderedDict[bytes, mx.array] = OrderedDict()
        # An image that is half-way through the tower, and how many blocks it has passed.
        self._begun: tuple[bytes, Patches, int] | None = None
        self._positions = WeakKeyDictionary[PromptImages, mx.array]()

    def advance(self, images: PromptImages, start: int, end: int) -> bool:
        """Run a part of the tower for images of the tokens `start` to `end`; True when it is done.

        Call it again until it is. A part is short, so that it pauses running rows little.
        """
        found, _ = images.within(start, end)
        needed = {image.pixels.digest: image for image in found}
        for digest in needed.keys() & self._rows.keys():
            self._rows.move_to_end(digest)
        missing = [digest for digest in needed if digest not in self._rows]
        if missing:
            try:
                self._run(missing[0], needed[missing[0]])
            except BaseException:
                self._begun = None
                raise
        if not needed.keys() <= self._rows.keys():
            return False
        # What this chunk needs stays in any case.
        spare = [digest for digest in self._rows if digest not in needed]
        for digest in spare:
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

    def _run(self, digest: bytes, image: PlacedImage) -> None:
        """Run a part of the tower for this image, or for another one that has begun."""
        pixels, depth = image.pixels, self._tower.shape.depth
        if self._begun is None:
            rgb = np.frombuffer(pixels.rgb, np.uint8).reshape(pixels.height, pixels.width, 3)
            self._begun = digest, self._tower.begin(rgb), 0
        digest, patches, done = self._begun
        blocks = max(1, depth * AT_ONCE // len(patches.states))
        for number in range(done, min(done + blocks, depth)):
            patches = self._tower.run_block(number, patches)
            # One block's scratch at a time.
            mx.eval(patches.states)
        self._begun = digest, patches, done + blocks
        if done + blocks >= depth:
            self._begun, self._rows[digest] = None, self._tower.end(patches)
            mx.eval(self._rows[digest])
