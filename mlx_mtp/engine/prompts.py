"""Prompts on the device, with their images."""

from typing import Self
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from mlx_mtp.cache.packing import Packing
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import StepRow
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.vision.features import Vision
from mlx_mtp.vision.placed import MOST_ROWS


class Prompts:
    """The ids of prompts, and what a chunk needs of their images; without `vision` none has any."""

    def __init__(self, vision: Vision | None = None) -> None:
        self._vision = vision
        self._ids = WeakKeyDictionary[Sequence, mx.array]()

    @classmethod
    def of(cls, model: LoadedModel, pause: float = 0.0, limit: int = MOST_ROWS) -> Self:
        """For a model: see `Vision`."""
        if model.tower is None:
            return cls()
        return cls(Vision(model.tower, model.image_token_ids[0], model.vocab_size, limit, pause))

    def ids(self, sequence: Sequence) -> mx.array:
        """A prompt and a 0 on the device, int32 [T + 1], uploaded once for all of its chunks.

        Tokens of images have ids of their own. An upload for each chunk would stall on CUDA: the
        new array may get a buffer that the device used, and moving that to where the host can write
        waits for all launched chunks.
        """
        if sequence not in self._ids:
            ids = np.array(sequence.prompt, dtype=np.int32)
            if sequence.images is not None and self._vision is not None:
                ids = sequence.images.numbered(sequence.prompt, self._vision.first_id)
            self._ids[sequence] = mx.array(np.append(ids, np.int32(0)))
        return self._ids[sequence]

    def token_ids(self, ids: mx.array) -> mx.array:
        """Such ids as ids of the vocabulary."""
        if self._vision is None:
            return ids
        return mx.where(ids < self._vision.first_id, ids, self._vision.image_id)

    def see(self, row: StepRow) -> bool:
        """Whether a chunk's images have rows; if not, run a part of the tower.

        The chunk is planned again then.
        """
        sequence, end = row.sequence, row.start + row.length + 1
        if sequence.images is None or self._vision is None:
            return True
        if self._vision.advance(sequence.images, row.start, end):
            return True
        sequence.num_planned = row.start
        # Its cached prefix, if any, has not been copied yet.
        sequence.begun = row.start > sequence.prefix.num_reused
        return False

    def place(self, packing: Packing, row: StepRow, num_repeated: int = 0) -> None:
        """Give a chunk's packing the positions in images, and what replaces embeddings."""
        if (images := row.sequence.images) is not None and self._vision is not None:
            end = row.start + row.length
            self._vision.place(packing, images, row.start, end, num_repeated)

    def clear(self) -> None:
        """Free what images computed."""
        if self._vision is not None:
            self._vision.clear()
