"""Cached segments and prefix directories, where every rank has its own part of each.

Only rank 0's tree decides which prefixes are kept, read and dropped. Its actions are recorded as
operations, which the other ranks run on their parts before their next step. A prefix is used from
disk only if all ranks can read their parts.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, cast

from mlx_mtp.errors import RankError
from mlx_mtp.prefix.cache import PrefixCache, Rows
from mlx_mtp.prefix.disk import READ_SECONDS, PrefixStore
from mlx_mtp.prefix.radix_tree import Fetch, Node
from mlx_mtp.prefix.segments import Entry, Segment, join_segments
from mlx_mtp.ranks.links import Link, Links
from mlx_mtp.ranks.messages import Fetched, Poll, PrefixOp

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class LeaderSegment(Segment):
    """Rank 0's part of a segment. The other ranks free theirs when this is garbage-collected."""

    links: Links
    id: int = field(default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        weakref.finalize(self, self.links.record, "free", self.id).atexit = False

    @classmethod
    def of(cls, part: Segment, links: Links) -> LeaderSegment:
        return cls(part.start, part.end, part.arrays, part.bits, links=links)

    def cut(self, start: int, end: int) -> Segment:
        part = LeaderSegment.of(super().cut(start, end), self.links)
        self.links.record("cut", self.id, start, end, part.id)
        return part


def ids_of(segments: Iterable[Segment]) -> tuple[int, ...]:
    """Returns the ids of rank 0's segments."""
    return tuple(cast(LeaderSegment, segment).id for segment in segments)


class LeaderStore(PrefixStore):
    """Rank 0's prefix directory. The other ranks do the same in their directories."""

    def __init__(self, links: Links, *args: Any, **more: Any) -> None:
        self._links = links
        self._numbers = itertools.count(1)
        # Number, salt, tokens and start of the prefix that the other ranks fetch or have fetched.
        self._request: tuple[int, str, tuple[int, ...], int] | None = None
        self._requested_at = 0.0
        super().__init__(*args, **more)
        for link in links.all:
            link.on_fetched = lambda: self.on_read()  # `on_read` is set later.

    def keep(self, salt: str, tokens: Many[int], entry: Entry) -> None:
        self._links.record("keep", salt, tuple(tokens), ids_of(entry))
        super().keep(salt, tokens, entry)

    def touch(self, salt: str, tokens: Many[int]) -> None:
        self._links.record("touch", salt, tuple(tokens))
        super().touch(salt, tokens)

    def drop_snapshot(self, salt: str, tokens: Many[int]) -> None:
        self._links.record("drop_snapshot", salt, tuple(tokens))
        super().drop_snapshot(salt, tokens)

    def fetch(
        self, salt: str, tokens: Many[int], start: int, make_room: Callable[[int], bool]
    ) -> Fetch | Entry:
        """Like the base class, but COMING until all ranks have their parts; GONE if one fails.

        The KV is at most one segment.
        """
        place = salt, tuple(tokens), start
        request = self._request
        if request is None or request[1:] != place:
            self.forget()
            fetched = super().fetch(*place, make_room)
            if fetched is Fetch.COMING:
                self._request, self._requested_at = (next(self._numbers), *place), time.monotonic()
                self._links.record("fetch", *self._request)
            return fetched
        if (others := self._state_at_others(request[0])) is not Fetch.HERE:
            return others if self.seconds_left > 0 else Fetch.LATE
        self._request = None  # else `forget`, which the base class calls, would tell other ranks
        fetched = super().fetch(*place, make_room)
        if fetched is Fetch.COMING:
            self._request = request
        elif isinstance(fetched, Fetch):
            self._links.record("forget")
        else:
            fetched = [LeaderSegment.of(part, self._links) for part in _joined(fetched, start)]
            self._links.record("name_fetched", ids_of(fetched))
        return fetched

    @property
    def seconds_left(self) -> float:
        left = super().seconds_left
        if self._request is None:
            return left
        return min(left, self._requested_at + READ_SECONDS - time.monotonic())

    def forget(self) -> None:
        if self._request is not None:
            self._request = None
            self._links.record("forget")
        super().forget()

    def _state_at_others(self, number: int) -> Fetch:
        """HERE if all other ranks have fetched their part; else one rank's failure, or COMING."""
        fetched = [link.fetched for link in self._links.all]
        states = [Fetch[f.state] if f.number == number else Fetch.COMING for f in fetched]
        failed = (s for s in states if s not in (Fetch.HERE, Fetch.COMING))
        return next(failed, Fetch.COMING if Fetch.COMING in states else Fetch.HERE)


class FollowerPrefixes(PrefixCache):
    """Restores the segments of `FollowerSegments`; raises RankError if that fails.

    Rank 0 goes on as if it had succeeded.
    """

    def restore(self, batch: Rows, nodes: Many[Node]) -> bool:
        if not super().restore(batch, nodes):
            raise RankError("a prefix is not here")
        return True


class FollowerSegments:
    """Another rank's parts of the segments, by rank 0's ids, and its prefix directory."""

    def __init__(self, link: Link, store: PrefixStore | None) -> None:
        self._link, self._store = link, store
        self._segments: dict[int, Segment] = {}
        self._request: tuple[int, str, tuple[int, ...], int] | None = None  # until it is answered
        self._fetched: Entry = []  # fetched segments that have no ids yet
        if store is not None:
            store.on_read = lambda: link.post(Poll())

    def add(self, ids: Many[int], segments: Many[Segment]) -> None:
        self._segments |= zip(ids, segments, strict=True)

    def build_path(self, ids: Many[int]) -> Node:
        """Build a tree path from these segments; the last id is that of the snapshot at its end."""
        *segments, snapshot = (self._segments[each] for each in ids)
        node = Node("", None, (), None)
        for segment in segments:
            node = Node("", node, (), segment)
        node.snapshot = snapshot
        return node

    def run_op(self, op: PrefixOp) -> None:
        """Run any operation except "copy"."""
        store = self._store
        match op:
            case "cut", whole, start, end, part:
                self._segments[part] = self._segments[whole].cut(start, end)
            case "free", segment:
                del self._segments[segment]
            case "name_fetched", ids:
                self.add(ids, self._fetched)
                self._fetched = []
            case _ if store is None:
                raise RankError("rank 0 has a directory of prefixes, and this rank none")
            case "keep", salt, tokens, ids:
                store.keep(salt, tokens, [self._segments[each] for each in ids])
            case "touch", salt, tokens:
                store.touch(salt, tokens)
            case "drop_snapshot", salt, tokens:
                store.drop_snapshot(salt, tokens)
            case "fetch", *request:
                self._request, self._fetched = cast(Any, request), []
                self.poll()
            case ("forget",):
                self._request, self._fetched = None, []
                store.forget()
            case _:
                raise RankError(f"rank 0 has sent an unknown operation: {op[0]}")

    def poll(self) -> None:
        """Answer rank 0's fetch if the store has read the prefix."""
        if self._request is None or self._store is None:
            return
        number, salt, tokens, start = self._request
        state = Fetch.GONE
        try:
            fetched = self._store.fetch(salt, tokens, start, lambda _: True)
            if isinstance(fetched, Fetch):
                state = fetched
            else:
                self._fetched, state = _joined(fetched, start), Fetch.HERE
        except Exception:
            logger.exception("A prefix could not be read; all ranks take it for missing")
        if state is not Fetch.COMING:
            self._request = None
            self._link.send(Fetched(number, state.name))


def _joined(entry: Entry, start: int) -> Entry:
    """The entry with its KV from `start` on in one segment, however this rank's files split it."""
    *kv, snapshot = entry
    return [*([join_segments(kv, start)] if kv else []), snapshot]
