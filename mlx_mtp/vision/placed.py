"""Images in a prompt: the tokens that stand for them, their cache keys, and their positions.

Qwen's M-RoPE rotates a token by three positions: time, row and column. A text token's three are
equal. All tokens of an image have the time at which the image begins, and rows and columns counted
from there; the text continues after the larger of both counts. So after an image a token's position
is its place in the prompt plus a shift of 0 or less.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_mtp.vision.images import Pixels

NO_TOKEN = -1  # an id that no text has, so that no draft copies an image's tokens
MAX_EMBEDDED_BYTES = 256 << 20  # kept, as later turns of a chat show the same images again


@dataclass(frozen=True)
class PlacedImage:
    """An image with `rows` x `columns` tokens in a prompt, from place `start` on."""

    start: int
    rows: int
    columns: int
    pixels: Pixels

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class PromptImages:
    """The images of a prompt of `length` tokens, in order; text follows the last one."""

    def __init__(self, images: Sequence[PlacedImage], length: int) -> None:
        self.images, self.length = tuple(images), length
        # The place of each image token, in order.
        self.places = np.concatenate([np.arange(i.start, i.end) for i in images])
        self.positions = self._positions()  # int32 [length, 3]: time, row, column
        # A place after the prompt plus this shift is the token's position.
        self.shift = int(self.positions[-1, 0]) + 1 - length

    def keys(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Returns a prompt's key in the prefix cache: its ids, with 64-bit ids for image tokens.

        These are hashes of the image, its size, and the token's place in it.
        """
        keys = list(prompt)
        for image in self.images:
            text = f"mlx-mtp image {image.rows} {image.columns} ".encode() + image.pixels.digest
            hashed = hashlib.shake_128(text).digest(8 * image.num_tokens)
            keys[image.start : image.end] = array("Q", hashed)
        return tuple(keys)

    def with_ids(self, prompt: Sequence[int], ids: int | np.ndarray) -> np.ndarray:
        """Returns the prompt, int32 [length], with `ids` for the tokens of images."""
        changed = np.array(prompt, dtype=np.int32)
        changed[self.places] = ids
        return changed

    def within(self, start: int, end: int) -> tuple[list[PlacedImage], int]:
        """Returns the images with tokens in [start, end), and the token count of earlier images."""
        found = [image for image in self.images if image.start < end and image.end > start]
        before = sum(image.num_tokens for image in self.images if image.end <= start)
        return found, before

    def _positions(self) -> np.ndarray:
        positions = np.arange(self.length, dtype=np.int32)[:, None].repeat(3, axis=1)
        for image in self.images:
            here, behind = positions[image.start : image.end], positions[image.end :]
            here[:] = here[0]
            here[:, 1:] += np.indices((image.rows, image.columns)).reshape(2, -1).T
            behind += max(image.rows, image.columns) - image.num_tokens
        return positions
