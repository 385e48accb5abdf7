"""All rows on the device, by where they stand."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Many

from mlx_mtp.engine.batch import Batch
from mlx_mtp.engine.sequence import Sequence


class Batches:
    """The groups that prefill, the rows whose first token is awaited, and the running batch.

    Attributes:
        prefilling: by the group's number.
        ready: their prompts are computed. They join the running rows when their first token has
            been read; until then nothing of them touches those, so a prefill that fails hits
            nobody else.
        decoding: the running rows.
    """

    def __init__(self) -> None:
        self.prefilling: dict[int, Batch] = {}
        self.ready: list[Batch] = []
        self.decoding: Batch | None = None

    def file(self, group: int, batch: Batch, is_last: Many[bool]) -> None:
        """Put a group away after a chunk; `is_last` tells the rows whose prompt ended in it."""
        done = {s for s, last in zip(batch.sequences, is_last, strict=True) if last}
        if done:
            self.ready.append(batch.take(lambda s: s in done))
        if len(done) < len(batch):
            self.prefilling[group] = batch.take(lambda s: s not in done)

    def gather(self, wanted: Many[Sequence]) -> Batch:
        """The running batch, with exactly the wanted rows."""
        rows = frozenset(wanted)
        parts = [self.decoding] if self.decoding is not None else []
        waiting: list[Batch] = []
        for batch in self.ready:
            (parts if rows.issuperset(batch.sequences) else waiting).append(batch)
        kept = [p for p in (part.take(lambda s: s in rows) for part in parts) if len(p)]
        self.decoding, self.ready = kept[0], waiting
        for batch in kept[1:]:
            self.decoding.join(batch)
        assert set(self.decoding.sequences) == rows, "the plan and the batches disagree"
        return self.decoding

    def forget(self, live: Container[Sequence]) -> None:
        """Let go of rows that no one waits for."""
        groups = {n: b.take(lambda s: s in live) for n, b in self.prefilling.items()}
        self.prefilling = {n: batch for n, batch in groups.items() if len(batch)}
        ready = (batch.take(lambda s: s in live) for batch in self.ready)
        self.ready = [batch for batch in ready if len(batch)]
        if self.decoding is not None and not any(s in live for s in self.decoding.sequences):
            self.decoding = None

    def drop(self, rows: Many[Sequence]) -> list[Sequence]:
        """Drop every batch that any of these rows is in; returns the rows that were in them."""
        dropped: list[Sequence] = []

        def hit(batch: Batch) -> bool:
            if not any(s in rows for s in batch.sequences):
                return False
            dropped.extend(batch.sequences)
            return True

        if self.decoding is not None and hit(self.decoding):
            self.decoding = None
        self.ready = [b for b in self.ready if not hit(b)]
        self.prefilling = {n: b for n, b in self.prefilling.items() if not hit(b)}
        return dropped

    def clear(self) -> None:
        """Let go of all rows."""
        self.prefilling, self.ready, self.decoding = {}, [], None
