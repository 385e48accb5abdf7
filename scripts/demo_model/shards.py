"""Training data made by processes beside the trainer, from seeds, in files that it takes in.

A shard is a function of (seed, its number) alone, however many processes there are.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from demo_model.chat import ToolFormat
from demo_model.dice import Dice
from demo_model.mixture import MAX_TOKENS, SHORT_TOKENS, Settings, training_chat
from demo_model.packing import Rows, encode, pack
from demo_model.tokenizer import load

MAX_WAITING = 64
"""Files that wait to be taken in, at most."""
FIELDS = ("ids", "segments", "kinds")


@dataclass(frozen=True)
class ShardSettings:
    """What shards are made of.

    Args:
        seed: of all of them.
        settings: of the generator.
        tool_format: of the chats.
        num_chats: in a shard.
        buckets: lengths of rows. Attention costs a long row more, and most documents are short.
        keep: share of each task's chats that is kept; None: all.
    """

    seed: int
    settings: Settings
    tool_format: ToolFormat
    num_chats: int = 3000
    buckets: tuple[int, int] = (SHORT_TOKENS, MAX_TOKENS)
    keep: Mapping[str, float] | None = None


def make_shard(number: int, wanted: ShardSettings) -> dict[int, Rows]:
    """Packed rows of each bucket; documents longer than the longest row are dropped."""
    dice = Dice(f"train {wanted.seed} {number}", wanted.settings.lean)
    chats = [training_chat(dice, wanted.settings, wanted.keep) for _ in range(wanted.num_chats)]
    documents = encode(load(), chats, wanted.tool_format)
    low, high = wanted.buckets
    short = [document for document in documents if len(document.ids) <= low]
    long = [document for document in documents if low < len(document.ids) <= high]
    # Long rows have room left, which short documents fill.
    filling = len(long)
    by_length = {low: short[filling:], high: long + short[:filling]}
    return {length: pack(each, length, dice) for length, each in by_length.items() if each}


def _work(directory: Path, first: int, step: int, wanted: ShardSettings) -> None:
    os.nice(5)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    number = first
    while True:
        while len(list(directory.glob("*.npz"))) >= MAX_WAITING:
            time.sleep(0.1)
        arrays = {
            f"{field}_{bucket}": getattr(rows, field)
            for bucket, rows in make_shard(number, wanted).items()
            for field in FIELDS
        }
        unfinished = directory / f".{number}.tmp"
        with unfinished.open("wb") as file:
            np.savez(file, **arrays)
        unfinished.rename(directory / f"{number:06d}.npz")
        number += step


class ShardFactory:
    """Processes that make shards; a context manager, which ends them.

    Args:
        directory: where they put their files; empty.
        wanted: what they make.
        num_workers: processes.
        first: number of the first shard.
    """

    def __init__(
        self, directory: Path, wanted: ShardSettings, num_workers: int, first: int = 0
    ) -> None:
        self.directory = directory
        self.buckets = wanted.buckets
        self.next_number = first
        # Not forked: the trainer's device and threads would not survive that.
        context = multiprocessing.get_context("spawn")
        self._processes = [
            context.Process(
                target=_work, args=(directory, first + i, num_workers, wanted), daemon=True
            )
            for i in range(num_workers)
        ]

    def __enter__(self) -> ShardFactory:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def take(self) -> dict[int, Rows] | None:
        """The next shard in order, if it is there.

        Raises:
            RuntimeError: a process has failed, and it will never be.
        """
        path = self.directory / f"{self.next_number:06d}.npz"
        if not path.exists():
            if not all(process.is_alive() for process in self._processes):
                raise RuntimeError("a process that makes training data has failed; see above")
            return None
        with np.load(path) as arrays:
            shard = {
                bucket: Rows(*(arrays[f"{field}_{bucket}"] for field in FIELDS))
                for bucket in self.buckets
                if f"ids_{bucket}" in arrays
            }
        path.unlink()
        self.next_number += 1
        return shard
