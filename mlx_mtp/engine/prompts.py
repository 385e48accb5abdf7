"""Prompts on the device, with their images: runs the vision tower, and places its rows."""

import math
from collections import OrderedDict
from collections.abc import Iterator
from time import perf_counter
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from mlx_mtp.cache.packing import ImageRows, Packing
from mlx_mtp.distributed import broadcast
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import StepRow
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.vision.placed import MOST_ROWS, PromptImages
from mlx_mtp.vision.tower import TowerPart


class Prompts:
    """The ids of prompts, and the rows of the images seen last, in at most `limit` bytes.

    The tower sees each image alone, so an image's rows depend on nothing else. In arrays on the
    device the tokens of a prompt's images, in the vocabulary all the same, have ids of their own:
    those from the vocabulary's size on. With several ranks each has a tower, and all take the rows
    of rank 0, whose chip may round otherwise.
    """

    def __init__(self, model: LoadedModel, pause: float = 0.0, limit: int = MOST_ROWS) -> None:
        self._model, self._limit = model, limit
        self._pause = pause  # most seconds of the tower in a step; 0: no limit
        self._rows: OrderedDict[bytes, mx.array] = OrderedDict()
        # An image that is half-way through the tower, and what is left of its parts.
        self._begun: tuple[bytes, Iterator[TowerPart]] | None = None
        self._ids = WeakKeyDictionary[Sequence, mx.array]()
        self._positions = WeakKeyDictionary[PromptImages, mx.array]()

    def ids(self, sequence: Sequence) -> mx.array:
        """A prompt and a 0 on the device, int32 [T + 1], uploaded once for all of its chunks.

        An upload for each chunk would stall on CUDA: the new array may get a buffer that the device
        used, and moving that to where the host can write waits for all launched chunks.
        """
        if sequence not in self._ids:
            ids = np.array(sequence.prompt, dtype=np.int32)
            if (images := sequence.images) is not None:
                numbers = np.arange(len(images.places))
                ids = images.with_ids(sequence.prompt, self._model.vocab_size + numbers)
            self._ids[sequence] = mx.array(np.append(ids, np.int32(0)))
        return self._ids[sequence]

    def token_ids(self, ids: mx.array) -> mx.array:
        """Such ids as ids of the vocabulary."""
        image_ids = self._model.image_token_ids[:1]
        return mx.where(ids < self._model.vocab_size, ids, *image_ids) if image_ids else ids

    def see(self, row: StepRow) -> bool:
        """Whether a chunk's images have rows; if not, run a part of the tower.

        The chunk is planned again then, so running rows wait for a part of the tower or for a
        chunk, never for both.
        """
        sequence, tower = row.sequence, self._model.tower
        if sequence.images is None or tower is None:
            return True
        found, _ = sequence.images.within(row.start, row.start + row.length + 1)
        needed = {image.pixels.digest: image.pixels for image in found}
        for digest in needed.keys() & self._rows.keys():
            self._rows.move_to_end(digest)
        missing = next((digest for digest in needed if digest not in self._rows), None)
        if missing is not None:
            begun, self._begun = self._begun, None  # gone if it fails
            self._run(*(begun or (missing, tower.parts(needed[missing].array()))))
            sequence.num_planned = row.start
            # Its cached prefix, if any, has not been copied yet.
            sequence.begun = row.start > sequence.prefix.num_reused
            return False
        # What this chunk needs stays in any case.
        for digest in [digest for digest in self._rows if digest not in needed]:
            if sum(rows.nbytes for rows in self._rows.values()) > self._limit:
                del self._rows[digest]
        return True

    def place(self, packing: Packing, row: StepRow, num_repeated: int = 0) -> None:
        """Give a packing the positions in images, and rows for the chunk's tokens and the next one.

        The packing has the chunk's tokens after `num_repeated` others. Call `see` before.
        """
        if (images := row.sequence.images) is None:
            return
        if images not in self._positions:
            self._positions[images] = mx.array(images.positions)
        start, end = row.start - num_repeated, row.start + row.length
        positions = self._positions[images][start:end]
        packing.rope_positions = positions if images.within(start, end)[0] else positions[:, 0]
        found, before = images.within(row.start, end + 1)
        rows = mx.concatenate([self._rows[i.pixels.digest] for i in found]) if found else None
        packing.images = ImageRows(rows, self._model.vocab_size + before)

    def clear(self) -> None:
        """Free what images computed."""
        self._rows.clear()
        self._begun = None

    def _run(self, digest: bytes, parts: Iterator[TowerPart]) -> None:
        """Evaluate as many parts as a step may take if they are like those before, two at least."""
        mx.synchronize()  # What was launched before is not the tower's time.
        began, last = perf_counter(), mx.array(0)
        for number, part in enumerate(parts):
            mx.eval(last)  # One part's scratch at a time; the next one is built meanwhile.
            spent = perf_counter() - began  # on `number` parts
            mx.async_eval(part)
            last = part[0]
            most = self._pause * number or math.inf
            if broadcast(mx.array(spent * (number + 2) > most)).item():  # All ranks do the same.
                self._begun = digest, parts
                break
        else:
            last = self._rows[digest] = broadcast(last)
        mx.eval(last)
