"""Which prefix a prompt continues, what a request waits for, and which prefixes are saved."""

import hashlib
from array import array
from bisect import bisect
from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import pairwise

from mlx_mtp.prefix.radix_tree import Fetch, Node, PrefixTree, common_length

MIN_GAIN = 64  # tokens; to save fewer, no chunk is cut and no request waits
MOST_STEP = 512  # maximum tokens up to the first save point inside a text; the next ones double
NUM_MESSAGES = 2  # number of last messages whose ends are saved


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Totals and gauges of the prefix cache; all 0 without one."""

    queries: int = 0  # prompt tokens of admitted requests that were looked up
    hits: int = 0  # prompt tokens that were found
    nbytes: int = 0  # bytes in memory
    num_entries: int = 0  # prefixes in memory that a prompt can continue
    num_files: int = 0  # files on disk
    file_nbytes: int = 0  # bytes of these files
    num_files_written: int = 0
    num_files_dropped: int = 0  # files not written: too large, or the disk is slow or full
    evicted: Mapping[str, int] = field(default_factory=dict)  # evicted entries by reason


@dataclass(eq=False, slots=True)
class PrefixState:
    """What the prefix cache knows of one sequence. Lengths and places are in tokens."""

    prompt: tuple[int, ...]
    salt: str  # a `root_key`; only sequences with the same salt share prefixes
    looks_up: bool = True  # False: hidden states of the whole prompt are needed
    # Set when the sequence is first considered for admission:
    arrival: int | None = None  # number of the sequence, in order of arrival
    cache_key: tuple[int, ...] = ()  # ids that stand for the prompt in the tree
    message_ends: list[int] = field(default_factory=list)  # ascending
    chunk_ends: list[int] | None = None  # where all chunks end if the prompt is computed exactly
    waits_for: tuple["PrefixState", int] | None = None  # who computes a prefix, and its length
    skips_disk: bool = False  # True if the disk was too slow, or memory had no room
    node: Node | None = None  # the prefix that its prefill continues, until that is copied
    num_reused: int = 0  # length of that prefix
    save_points: list[int] = field(default_factory=list)  # lengths of prefixes to save, ascending
    num_copied: int = 0  # length of a prefix that is copied, but not in the tree yet
    dropped: bool = False  # the sequence was cancelled or failed

    def saved(self, length: int) -> None:
        """Note that the prefix of `length` tokens is in the tree, or can't be saved."""
        if length in self.save_points:
            self.save_points.remove(length)
        if self.num_copied == length:
            self.num_copied = 0

    def chunk_end(self, start: int, step: int) -> int:
        """Returns where the prefill chunk from `start` on must end at the latest."""
        end = len(self.prompt)
        if self.chunk_ends is not None:
            behind = bisect(self.chunk_ends, start)
            return self.chunk_ends[behind] if behind < len(self.chunk_ends) else end
        multiple = start - start % step + step
        saves = (point for point in self.save_points if point > start)
        return min(next(saves, multiple), multiple, end)


class PrefixReuse:
    """Looks up prompts, and holds back requests whose prefix is being computed or read.

    A request waits only for prompts that arrived before it, so none waits forever. One prefix is
    read from disk at a time; other requests for the same prefix then find it in memory. If the disk
    is late, all requests that wait for it give up. With a tree of limit 0 nothing is looked up.
    """

    def __init__(
        self,
        tree: PrefixTree,
        message_end_ids: Container[int],  # tokens that end a message
        step: int,
        min_gain: int = MIN_GAIN,
        exact: bool = False,  # see `chunk_ends`
    ) -> None:
        self.tree = tree
        self.num_queries = 0  # prompt tokens that were looked up
        self.num_hits = 0  # prompt tokens that were found
        self._message_end_ids = message_end_ids
        self._step, self._min_gain, self._exact = step, min_gain, exact
        self._num_seen = 0
        self._reads: set[PrefixState] = set()  # sequences that wait for the disk
        self._reader: PrefixState | None = None  # the sequence whose prefix is being read

    def find(self, state: PrefixState) -> Node | None:
        """Returns the end of the longest prefix in memory; None if there is none."""
        return self.tree.longest_prefix(state.salt, state.cache_key) if state.looks_up else None

    def must_wait_for_disk(self, state: PrefixState) -> bool:
        """Returns True while the prefix is being read from disk; call again until it is False."""
        if self.tree.disk is None:
            return False
        while length := self._on_disk(state):
            self._reads.add(state)
            if self._reader not in (None, state):
                return True
            self._reader = state
            lasting = state.message_ends[:1] == [length]
            fetched = self.tree.fetch(state.salt, state.cache_key[:length], lasting)
            if fetched is Fetch.COMING:
                return True
            if fetched in (Fetch.LATE, Fetch.NO_ROOM):
                for each in self._reads if fetched is Fetch.LATE else {state}:
                    each.skips_disk = True
        self._end_read(state)
        return False

    @property
    def disk_seconds_left(self) -> float:
        disk = None if self._reader is None else self.tree.disk
        return 0.0 if disk is None else max(disk.seconds_left, 0.0)

    def is_waiting(self, state: PrefixState) -> bool:
        """True while a sequence must be held back. (Poll its own read by `must_wait_for_disk`.)"""
        leader, point = state.waits_for or (None, 0)
        if leader is not None and not leader.dropped and point in leader.save_points:
            return True
        waits_for_disk = state in self._reads and not state.skips_disk
        return waits_for_disk and self._reader not in (None, state)

    def must_wait(self, state: PrefixState, prefilling: Iterable[PrefixState]) -> bool:
        """True if a sequence must wait for one of `prefilling`, or for its turn to read files."""
        if state.arrival is None:
            state.arrival, self._num_seen = self._num_seen, self._num_seen + 1
            state.cache_key, state.looks_up = state.prompt, state.looks_up and self.tree.limit > 0
            state.message_ends = message_ends(state.prompt, self._message_end_ids)
            if self._exact:
                state.chunk_ends = chunk_ends(
                    len(state.prompt), state.message_ends, self._step, self._min_gain
                )
                state.cache_key = by_chunk(state.prompt, state.chunk_ends)
        if not state.looks_up:
            return False
        if self.is_waiting(state):
            return True
        state.waits_for = None
        node = self.find(state)
        length = 0 if node is None else node.end
        if self.tree.disk is not None:
            length = self._on_disk(state) or length
        for leader in prefilling:
            assert leader.arrival is not None
            if leader.arrival > state.arrival or leader.salt != state.salt:
                continue
            shared = common_length(leader.prompt, state.prompt)
            point = max((p for p in leader.save_points if p <= shared), default=0)
            if not leader.dropped and point - length >= self._min_gain:
                state.waits_for = leader, point
                self._end_read(state)
                return True
        return False

    def acquire(self, state: PrefixState, node: Node | None) -> None:
        """Let a prompt continue the prefix `node`, kept until `release`; None: no prefix."""
        state.node = node
        if node is not None:
            self.tree.touch(node)
            self.tree.pin(node)
            state.num_reused = node.end
        if self.tree.limit:
            state.save_points = save_points(
                len(state.prompt),
                state.num_reused,
                state.message_ends,
                min(self._step, MOST_STEP),
                self._min_gain,
                state.chunk_ends,
            )
        self.num_queries += len(state.prompt) if state.looks_up else 0
        self.num_hits += state.num_reused

    def release(self, state: PrefixState) -> None:
        """Unpin its prefix and end its read: the prefix was copied, or the sequence is dropped."""
        if state in self._reads:
            self._end_read(state)
        if state.node is not None:
            self.tree.unpin(state.node)
            state.node = None

    def stats(self) -> PrefixCacheStats:
        return PrefixCacheStats(
            queries=self.num_queries,
            hits=self.num_hits,
            nbytes=self.tree.nbytes + self.tree.fetched_nbytes,
            num_entries=len(self.tree),
            evicted=dict(self.tree.evicted),
        )

    def _on_disk(self, state: PrefixState) -> int:
        """Length of the longest prefix on disk, if it is longer than any in memory; else 0."""
        if self.tree.disk is None or state.skips_disk or not state.looks_up:
            return 0
        node = self.find(state)
        length = self.tree.disk.longest(state.salt, state.cache_key)
        return length if node is None or length > node.end else 0

    def _end_read(self, state: PrefixState) -> None:
        self._reads.discard(state)
        if self._reader is state and self.tree.disk is not None:
            self._reader = None
            self.tree.disk.forget()


def message_ends(prompt: Many[int], end_ids: Container[int]) -> list[int]:
    """Returns where the messages of a prompt end, as lengths of prefixes, ascending."""
    return [i + 1 for i, token in enumerate(prompt) if token in end_ids]


def chunk_ends(end: int, message_ends: Many[int], step: int, min_gain: int = MIN_GAIN) -> list[int]:
    """Returns where the chunks of a prompt end if each end depends only on the tokens before it.

    The bits of a token's KV can depend on the chunk that it was computed in. With these ends,
    prompts that begin alike get the same chunks, whatever follows and whichever cached prefix they
    continue.
    """
    ends = [0]
    for message_end in message_ends:
        ends += range(ends[-1] + step, message_end + 1, step)
        if message_end - ends[-1] >= min_gain:
            ends.append(message_end)
    return [*ends[1:], *range(ends[-1] + step, end + 1, step)]


def by_chunk(prompt: tuple[int, ...], chunk_ends: Many[int]) -> tuple[int, ...]:
    """Returns a prompt's ids, with the first id of each chunk replaced by the chunk's 64-bit hash.

    So prompts that differ inside a chunk share no part of it, as its KV depends on the whole chunk.
    """
    key = list(prompt)
    for start, end in pairwise(dict.fromkeys((0, *chunk_ends, len(prompt)))):
        chunk = array("Q", prompt[start:end]).tobytes()
        key[start] = int.from_bytes(hashlib.blake2b(chunk, digest_size=8).digest(), "little")
    return tuple(key)


def save_points(
    end: int,
    start: int,
    message_ends: Many[int],
    step: int,
    min_gain: int = MIN_GAIN,
    chunk_ends: Many[int] | None = None,  # the only possible save points; None: any
) -> list[int]:
    """Returns the lengths of the prefixes to save while a prompt is computed, ascending.

    A prefix can be continued only where its recurrent state was saved. So states are saved where
    conversations branch: after the first message (system prompt and tools), which conversations
    share; after the last messages, as a template can render the end of a prompt differently in the
    next turn; and at the end. A long text can branch anywhere, so states are also saved at doubling
    distances, where chunks end anyway.
    """
    if start == end:
        return []
    places = [*message_ends[:1], *message_ends[: -NUM_MESSAGES - 1 : -1]]
    places += [step << n for n in range(end.bit_length()) if step << n < end]
    if chunk_ends is not None:
        numbers = [bisect(chunk_ends, place) for place in (*places, end)]
        return sorted({chunk_ends[n - 1] for n in numbers if n and chunk_ends[n - 1] > start})
    points = [start]
    for point in places:
        if start < point < end and all(abs(point - other) >= min_gain for other in points):
            points.append(point)
    return [*sorted(points[1:]), end]
