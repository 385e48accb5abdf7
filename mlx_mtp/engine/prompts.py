"""Prompts on the device, with their images: runs the vision tower, and places its output rows."""

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
from mlx_mtp.vision.placed import MAX_EMBEDDED_BYTES, PromptImages
from mlx_mtp.vision.tower import TowerPart


class Prompts:
    """The ids of prompts, and the tower's rows of recent images, in at most `limit` bytes.

    The tower computes each image alone, so an image's rows depend on nothing else. A prompt's image
    tokens all have the same id of the vocabulary; in arrays on the device each has an id of its
    own, from the vocabulary's size on. With several ranks each has a tower, and all use the rows
    of rank 0, as the ranks' chips can round differently.
    """

    def __init__(
        self, model: LoadedModel, pause: float = 0.0, limit: int = MAX_EMBEDDED_BYTES
    ) -> None:
        self._model, self._limit = model, limit
        self._pause = pause  # maximum seconds of the tower per step; 0: no limit
        self._rows: OrderedDict[bytes, mx.array] = OrderedDict()
        # Digest of the image that is partly through the tower, and its remaining parts.
        self._begun: tuple[bytes, Iterator[TowerPart]] | None = None
        self._ids = WeakKeyDictionary[Sequence, mx.array]()
        self._positions = WeakKeyDictionary[PromptImages, mx.array]()

    def ids(self, sequence: Sequence) -> mx.array:
        """Returns the prompt and a 0, int32 [T + 1] on the device, uploaded once for all chunks.

        An upload for each chunk would stall on CUDA: the new array can get a buffer that the device
        has used, and moving that buffer back to the host waits for all launched chunks.
        """
        if sequence not in self._ids:
            ids = np.array(sequence.prompt, dtype=np.int32)
            if (images := sequence.images) is not None:
                numbers = np.arange(len(images.places))
                ids = images.with_ids(sequence.prompt, self._model.vocab_size + numbers)
            self._ids[sequence] = mx.array(np.append(ids, np.int32(0)))
        return self._ids[sequence]

    def token_ids(self, ids: mx.array) -> mx.array:
        """Returns ids from `ids` with image tokens' own ids replaced by the vocabulary's id."""
        image_ids = self._model.image_token_ids[:1]
        return mx.where(ids < self._model.vocab_size, ids, *image_ids) if image_ids else ids

    def see(self, row: StepRow) -> bool:
        """Returns True if all images of a chunk have rows; otherwise runs a part of the tower.

        In that case the chunk is planned again, so running rows wait for a part of the tower or for
        a chunk, never for both.
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
            begun, self._begun = self._begun, None  # dropped if it fails
            self._run(*(begun or (missing, tower.parts(needed[missing].array()))))
            sequence.num_planned = row.start
            # Its cached prefix, if any, has not been copied yet.
            sequence.begun = row.start > sequence.prefix.num_reused
            return False
        # The rows that this chunk needs stay, even above the limit.
        for digest in [digest for digest in self._rows if digest not in needed]:
            if sum(rows.nbytes for rows in self._rows.values()) > self._limit:
                del self._rows[digest]
        return True

    def place(self, packing: Packing, row: StepRow, num_repeated: int = 0) -> None:
        """Set a packing's RoPE positions, and the image rows of its chunk and of the next token.

        The packing has the chunk's tokens after `num_repeated` tokens. Call `see` before.
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
        """Free the rows of all images."""
        self._rows.clear()
        self._begun = None

    def _run(self, digest: bytes, parts: Iterator[TowerPart]) -> None:
        """Evaluate at least two parts, and more while they are expected to fit into the pause."""
        mx.synchronize()  # Steps launched before must not count as the tower's time.
        began, last = perf_counter(), mx.array(0)
        for number, part in enumerate(parts):
            mx.eval(last)  # Only one part's scratch memory exists at a time.
            spent = perf_counter() - began  # on `number` parts
            mx.async_eval(part)
            last = part[0]
            most = self._pause * number or math.inf
            if broadcast(mx.array(spent * (number + 2) > most)).item():  # All ranks decide alike.
                self._begun = digest, parts
                break
        else:
            last = self._rows[digest] = broadcast(last)
        mx.eval(last)
