"""Chats to token ids, and these to rows of whole documents."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demo_model.chat import ToolFormat, segments
from demo_model.conversation import Conversation
from demo_model.dice import Dice
from demo_model.tokenizer import PAD_ID

GAP = 3
"""Padding after a document: as many places as the convolution looks back, less itself."""
CONTEXT, OWN = 1, 2
"""Kinds of tokens: what the model reads, and what it says."""


@dataclass(frozen=True)
class Document:
    """A chat's tokens.

    Args:
        ids: of all of it.
        kinds: `CONTEXT` or `OWN`, for each.
    """

    ids: list[int]
    kinds: list[int]


@dataclass(frozen=True)
class Rows:
    """Packed rows, all [N, T].

    Args:
        ids: token ids, `PAD_ID` between documents; int16.
        segments: number of the document in its row from 1, 0 at padding; uint8.
        kinds: of the tokens, 0 at padding; uint8.
    """

    ids: NDArray[np.int16]
    segments: NDArray[np.uint8]
    kinds: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.ids)


def encode(
    tokenizer: Any, chats: Sequence[Conversation], tool_format: ToolFormat
) -> list[Document]:
    """Each chat's pieces, encoded on their own."""
    pieces = [segments(chat, tool_format) for chat in chats]
    texts = [text for chat in pieces for text, _ in chat]
    encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    documents = []
    for chat in pieces:
        document = Document([], [])
        for _, own in chat:
            ids = next(encoded).ids
            document.ids.extend(ids)
            document.kinds.extend([OWN if own else CONTEXT] * len(ids))
        documents.append(document)
    return documents


def pack(documents: Sequence[Document], length: int, dice: Dice) -> Rows:
    """Fill rows with documents: one at random, then the longest that fit, padding between them.

    Args:
        documents: each of at most `length` tokens.
        length: T.
        dice: which document begins a row, and which follow while there is much room.
    """
    waiting = sorted(documents, key=lambda d: len(d.ids))
    lengths = [len(d.ids) for d in waiting]
    rows: list[list[Document]] = []
    while waiting:
        # The longest first, so that no row is left for a long one alone at the end.
        row, room = [], length
        index = len(waiting) - 1
        while index >= 0:
            row.append(waiting.pop(index))
            room -= lengths.pop(index) + GAP
            fitting = bisect.bisect_right(lengths, room)
            index = dice.number(0, fitting - 1) if fitting and room > length // 3 else fitting - 1
        dice.shuffle(row)
        rows.append(row)
    return _filled(rows, length)


def _filled(rows: Sequence[Sequence[Document]], length: int) -> Rows:
    shape = (len(rows), length)
    out = Rows(
        np.full(shape, PAD_ID, np.int16), np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
    )
    for i, row in enumerate(rows):
        start = 0
        for number, document in enumerate(row, 1):
            end = start + len(document.ids)
            out.ids[i, start:end] = document.ids
            out.segments[i, start:end] = number
            out.kinds[i, start:end] = document.kinds
            start = end + GAP
    return out
