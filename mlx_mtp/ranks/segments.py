"""What each rank has its part of: cached segments, by numbers that rank 0 gives, and their files.

Rank 0's tree alone decides what is kept, read and dropped; notes of it go with the next step. A
prefix is read from the disk where all ranks have read their parts, and else it is on none.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from mlx_mtp.errors import RankError
from mlx_mtp.prefix.disk import READ_SECONDS, PrefixStore
from mlx_mtp.prefix.radix_tree import Fetch, Node
from mlx_mtp.prefix.segments import Entry, Segment, join_segments
from mlx_mtp.ranks.links import Link, Links
from mlx_mtp.ranks.messages import (
    Answer,
    Cut,
    Drop,
    Forget,
    Keep,
    Load,
    Note,
    Poll,
    Read,
    Stored,
)

logger = logging.getLogger(__name__)


class Notes:
    """What the others will be told about prefixes."""

    def __init__(self) -> None:
        self._untold: list[Note] = []
        self._names = itertools.count()
        self.add = self._untold.append

    def take(self) -> list[Note]:
        """All notes, once. That of a segment that is dropped may come at any time."""
        return [self._untold.pop(0) for _ in range(len(self._untold))]

    def named(self, segment: Segment) -> Named:
        """Of which the others have parts by its name, until it is dropped."""
        parts = segment.start, segment.end, segment.arrays, segment.bits
        named = Named(*parts, name=next(self._names), notes=self)
        weakref.finalize(named, self.add, Drop(named.name)).atexit = False
        return named


@dataclass(frozen=True, eq=False, kw_only=True)
class Named(Segment):
    """A segment that the other ranks have a part of, by this name."""

    name: int
    notes: Notes

    def cut(self, start: int, end: int) -> Segment:
        part = self.notes.named(super().cut(start, end))
        self.notes.add(Cut(self.name, start, end, part.name))
        return part


def names_of(segments: Iterable[Segment]) -> tuple[int, ...]:
    """By which the other ranks know their parts."""
    names = []
    for each in segments:
        if not isinstance(each, Named):
            raise RankError("a prefix is on rank 0 alone")
        names.append(each.name)
    return tuple(names)


class LeadStore(PrefixStore):
    """Rank 0's files. The others' stores are told what happens to it."""

    def __init__(self, links: Links, *place: Any, **more: Any) -> None:
        self.notes = Notes()
        self._links = links
        self._numbers = itertools.count(1)
        self._asked: Read | None = None  # what the others read, or have read
        self._asked_at = 0.0
        super().__init__(*place, **more)
        for link in links.all:
            link.on_answer = lambda: self.on_read()

    def keep(self, salt: str, tokens: Many[int], entry: Entry) -> None:
        self.notes.add(Keep(salt, tuple(tokens), names_of(entry)))
        super().keep(salt, tokens, entry)

    def touch(self, salt: str, tokens: Many[int]) -> None:
        self.notes.add(Stored(salt, tuple(tokens), dropped=False))
        super().touch(salt, tokens)

    def drop_snapshot(self, salt: str, tokens: Many[int]) -> None:
        self.notes.add(Stored(salt, tuple(tokens), dropped=True))
        super().drop_snapshot(salt, tokens)

    def fetch(
        self, salt: str, tokens: Many[int], start: int, make_room: Callable[[int], bool]
    ) -> Fetch | Entry:
        """As ever; it is COMING until all ranks have it, and what one can't read is not here."""
        wanted = salt, tuple(tokens), start
        if self._asked is None or self._asked[1:] != wanted:
            self.forget()
            found = super().fetch(*wanted, make_room)
            if found is Fetch.COMING:
                self._asked, self._asked_at = Read(next(self._numbers), *wanted), time.monotonic()
                self.notes.add(self._asked)
            return found
        if (others := self._answer(self._asked.number)) is not Fetch.HERE:
            return others if self.seconds_left > 0 else Fetch.LATE
        asked, self._asked = self._asked, None  # The others are to forget nothing.
        found = super().fetch(*wanted, make_room)
        if found is Fetch.COMING:
            self._asked = asked
        elif isinstance(found, Fetch):
            self.notes.add(Forget())
        else:
            found = [self.notes.named(part) for part in _joined(found, start)]
            self.notes.add(Load(names_of(found)))
        return found

    @property
    def seconds_left(self) -> float:
        left = super().seconds_left
        if self._asked is None:
            return left
        return min(left, self._asked_at + READ_SECONDS - time.monotonic())

    def forget(self) -> None:
        if self._asked is not None:
            self._asked = None
            self.notes.add(Forget())
        super().forget()

    def _answer(self, number: int) -> Fetch:
        """HERE when all others have read their parts; what one of them says that can't."""
        given = [link.answer for link in self._links.all]
        states = [Fetch[a.state] if a.number == number else Fetch.COMING for a in given]
        failed = (s for s in states if s not in (Fetch.HERE, Fetch.COMING))
        return next(failed, Fetch.COMING if Fetch.COMING in states else Fetch.HERE)


class Parts:
    """Another rank's segments and files, which follow rank 0's."""

    def __init__(self, link: Link, store: PrefixStore | None) -> None:
        self._link, self._store = link, store
        self._segments: dict[int, Segment] = {}
        self._asked: Read | None = None  # what rank 0 waits for
        self._found: Entry = []  # what was read and has no names yet
        if store is not None:
            store.on_read = lambda: link.post(Poll())

    def add(self, names: Many[int], segments: Many[Segment]) -> None:
        self._segments |= zip(names, segments, strict=True)

    def prefix(self, names: Many[int]) -> Node:
        """A path of segments that ends with a snapshot."""
        *segments, snapshot = (self._segments[name] for name in names)
        node = Node("", None, (), None)
        for segment in segments:
            node = Node("", node, (), segment)
        node.snapshot = snapshot
        return node

    def follow(self, note: Note) -> None:
        """Do what is noted."""
        store = self._store
        match note:
            case Drop(name):
                del self._segments[name]
            case Cut(whole, start, end, name):
                self._segments[name] = self._segments[whole].cut(start, end)
            case Load(names):
                self.add(names, self._found)
                self._found = []
            case Keep(salt, tokens, names) if store is not None:
                store.keep(salt, tokens, [self._segments[name] for name in names])
            case Stored(salt, tokens, dropped) if store is not None:
                (store.drop_snapshot if dropped else store.touch)(salt, tokens)
            case Read() if store is not None:
                self._asked, self._found = note, []
                self.poll()
            case Forget() if store is not None:
                self._asked, self._found = None, []
                store.forget()
            case _:
                raise RankError("rank 0 has a directory of prefixes, and this rank none")

    def poll(self) -> None:
        """Tell rank 0 how a read went, once that is known."""
        if self._asked is None or self._store is None:
            return
        number, salt, tokens, start = self._asked
        state = Fetch.GONE
        try:
            found = self._store.fetch(salt, tokens, start, lambda _: True)
            if isinstance(found, Fetch):
                state = found
            else:
                self._found, state = _joined(found, start), Fetch.HERE
        except Exception:
            logger.exception("A prefix could not be read; all ranks take it for missing")
        if state is not Fetch.COMING:
            self._asked = None
            self._link.send(Answer(number, state.name))


def _joined(found: Entry, start: int) -> Entry:
    """A prefix's KV from `start` on, if any, and its snapshot, however it lay in files."""
    *kv, snapshot = found
    return [*([join_segments(kv, start)] if kv else []), snapshot]
