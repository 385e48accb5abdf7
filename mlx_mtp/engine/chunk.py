"""A prefill chunk as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlx_mtp.engine.plan import PrefillChunk


@dataclass(frozen=True)
class ChunkArrays:
    """A prefill chunk on the host.

    Args:
        tokens: int32 [B, T], padded on the right.
        following: the token after each, int32 [B, T]; 0 where the prompt ends.
        lengths: int32 [B].
        is_last: bool [B], the row's prompt ends in this chunk.
        before: 1 where all rows begin with the last token of a prefix that is in the caches, whose
            hidden state is known; else 0.
    """

    tokens: np.ndarray
    following: np.ndarray
    lengths: np.ndarray
    is_last: np.ndarray
    before: int

    @staticmethod
    def of(chunk: PrefillChunk, before: int) -> ChunkArrays:
        """Lay a chunk's rows out."""
        lengths = np.array([length for _, _, length in chunk.rows], dtype=np.int32) + before
        tokens = np.zeros((len(lengths), int(lengths.max())), dtype=np.int32)
        following = np.zeros_like(tokens)
        is_last = np.zeros(len(lengths), dtype=bool)
        for row, (sequence, start, length) in enumerate(chunk.rows):
            piece = sequence.prompt[start - before : start + length + 1]
            tokens[row, : length + before] = piece[: length + before]
            following[row, : len(piece) - 1] = piece[1:]
            is_last[row] = start + length == sequence.num_prompt
        return ChunkArrays(tokens, following, lengths, is_last, before)

    @property
    def num_computed(self) -> np.ndarray:
        """int32 [B], how many of a row's tokens are to be computed."""
        return self.lengths - self.before
