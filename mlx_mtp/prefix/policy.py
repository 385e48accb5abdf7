"""What a request takes from the prefix cache, what it waits for, and where its prompt is saved."""

from array import array
from bisect import bisect
from collections.abc import Container, Iterable
from collections.abc import Sequence as Many
from itertools import pairwise
from zlib import crc32

from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.stats import PrefixCacheStats
from mlx_mtp.prefix.radix_tree import Fetch, Node, PrefixTree, common_length

MIN_GAIN = 64  # A prefill is not cut, and a request does not wait, to save fewer tokens.
MOST_STEP = 512  # Save points are its multiples, however long the chunks of prompts may be.
NUM_TURNS = 2  # So many turn ends are saved, counted from the last.


class PrefixReuse:
    """Looks prompts up, and holds back requests while another computes their prefix, or it is read.

    Each waits only for prompts that were before it in the queue, so none waits forever. One prefix
    is read at a time; one that wants the same finds it in memory then. When the disk is late all
    that wait for it give up. A tree of no size keeps nothing, and nothing is looked up.
    """

    def __init__(
        self,
        tree: PrefixTree,
        turn_ends: Container[int],
        step: int,
        min_gain: int = MIN_GAIN,
        exact: bool = False,  # see `cuts`
    ) -> None:
        self.tree = tree
        self.num_queries = 0  # prompt tokens of the requests that were looked up
        self.num_hits = 0  # how many of them were found
        self._turn_ends = turn_ends
        self._step, self._min_gain, self._exact = step, min_gain, exact
        self._num_seen = 0
        # Those that wait for the disk, and the one that it reads for.
        self._reads: set[Sequence] = set()
        self._reader: Sequence | None = None

    def find(self, sequence: Sequence) -> Node | None:
        if not self._looks_up(sequence):
            return None
        return self.tree.match(sequence.salt, sequence.key)

    def must_read(self, sequence: Sequence) -> bool:
        """Whether it waits for its prefix to be read from the disk; call it until it doesn't."""
        while length := self._on_disk(sequence):
            self._reads.add(sequence)
            if self._reader not in (None, sequence):
                return True
            self._reader = sequence
            lasting = sequence.turns[:1] == [length]
            state = self.tree.fetch(sequence.salt, sequence.key[:length], lasting)
            if state is Fetch.COMING:
                return True
            if state in (Fetch.LATE, Fetch.NO_ROOM):
                for each in self._reads if state is Fetch.LATE else {sequence}:
                    each.skips_disk = True
        self._end_read(sequence)
        return False

    @property
    def seconds_left(self) -> float:
        disk = None if self._reader is None else self.tree.disk
        return 0.0 if disk is None else max(disk.seconds_left, 0.0)

    def waits(self, sequence: Sequence) -> bool:
        """What it was held back for is still missing. (A read under way must be polled.)"""
        leader, point = sequence.awaited or (None, 0)
        if leader is not None and not leader.finished and point in leader.save_points:
            return True
        waits_for_disk = sequence in self._reads and not sequence.skips_disk
        return waits_for_disk and self._reader not in (None, sequence)

    def held_back(self, sequence: Sequence, prefilling: Iterable[Sequence]) -> bool:
        """Whether it waits for one of these prompts to be computed, or for its turn to read."""
        if sequence.number is None:
            sequence.number, self._num_seen = self._num_seen, self._num_seen + 1
            sequence.turns = turns(sequence.prompt, self._turn_ends)
            if self._exact:
                sequence.cuts = cuts(
                    sequence.num_prompt, sequence.turns, self._step, self._min_gain
                )
                sequence.key = by_chunk(sequence.prompt, sequence.cuts)
        if not self._looks_up(sequence):
            return False
        if self.waits(sequence):
            return True
        sequence.awaited = None
        node = self.find(sequence)
        found = self._on_disk(sequence) or (0 if node is None else node.end)
        for leader in prefilling:
            assert leader.number is not None
            if leader.number > sequence.number or leader.salt != sequence.salt:
                continue
            shared = common_length(leader.prompt, sequence.prompt)
            point = max((p for p in leader.save_points if p <= shared), default=0)
            if not leader.finished and point - found >= self._min_gain:
                sequence.awaited = leader, point
                self._end_read(sequence)
                return True
        return False

    def begin(self, sequence: Sequence, node: Node | None) -> None:
        """Let a request start after a prefix, which is kept until it is released."""
        if node is not None:
            self.tree.touch(node)
            self.tree.pin(node)
        start = 0 if node is None else node.end
        points = save_points(
            sequence.num_prompt,
            start,
            sequence.turns,
            min(self._step, MOST_STEP),
            self._min_gain,
            sequence.cuts,
        )
        sequence.begin(node, points if self.tree.limit else [])
        self.num_queries += sequence.num_prompt if self._looks_up(sequence) else 0
        self.num_hits += start

    def release(self, sequence: Sequence) -> None:
        self._end_read(sequence)
        if sequence.prefix is not None:
            self.tree.unpin(sequence.prefix)
            sequence.prefix = None

    def stats(self) -> PrefixCacheStats:
        return PrefixCacheStats(
            queries=self.num_queries,
            hits=self.num_hits,
            nbytes=self.tree.nbytes + self.tree.fetched_nbytes,
            num_entries=len(self.tree),
            evicted=dict(self.tree.evicted),
        )

    def _looks_up(self, sequence: Sequence) -> bool:
        """Not for logprobs of its prompt: hidden states of a cached prefix are not kept."""
        return self.tree.limit > 0 and sequence.request.sampling.prompt_logprobs is None

    def _on_disk(self, sequence: Sequence) -> int:
        """Length of the longest prefix of its prompt, if that is not in memory; else 0."""
        if self.tree.disk is None or sequence.skips_disk or not self._looks_up(sequence):
            return 0
        node = self.find(sequence)
        length = self.tree.disk.longest(sequence.salt, sequence.key)
        return length if node is None or length > node.end else 0

    def _end_read(self, sequence: Sequence) -> None:
        self._reads.discard(sequence)
        if self._reader is sequence and self.tree.disk is not None:
            self._reader = None
            self.tree.disk.forget()


def turns(prompt: Many[int], turn_ends: Container[int]) -> list[int]:
    """Where the messages of a prompt end: lengths of the prefixes up to there, ascending."""
    return [i + 1 for i, token in enumerate(prompt) if token in turn_ends]


def cuts(end: int, turns: Many[int], step: int, min_gain: int = MIN_GAIN) -> list[int]:
    """Where the chunks of a prompt end so that the tokens before each place alone decide it.

    The bits of a token's KV may depend on the chunk it was computed in. So prompts that begin alike
    are cut alike, whatever follows and wherever one of them continues a cached prefix.
    """
    found = [0]
    for turn in turns:
        found += range(found[-1] + step, turn + 1, step)
        if turn - found[-1] >= min_gain:
            found.append(turn)
    return [*found[1:], *range(found[-1] + step, end + 1, step)]


def by_chunk(prompt: tuple[int, ...], cuts: Many[int]) -> tuple[int, ...]:
    """A prompt's tokens, the first of each chunk marked by all that the chunk has.

    Prompts that part inside a chunk share none of it: its KV is that of its own length.
    """
    key = list(prompt)
    for start, end in pairwise(dict.fromkeys((0, *cuts, len(prompt)))):
        key[start] |= crc32(array("I", prompt[start:end]).tobytes()) << 32
    return tuple(key)


def save_points(
    end: int,
    start: int,
    turns: Many[int],
    step: int,
    min_gain: int = MIN_GAIN,
    cuts: Many[int] | None = None,  # the only places for them
) -> list[int]:
    """Lengths of the prefixes to save while a prompt is computed, ascending.

    A recurrent state exists only where it was saved, so it is saved where conversations branch:
    after the first message, which others share (system prompt and tools), after the last messages,
    as a template may render the end of a prompt otherwise in the next turn, and at the end. Inside
    a long text, which may branch anywhere, at doubling distances, where the prefill is cut anyway.
    """
    if start == end:
        return []
    wanted = [*turns[:1], *turns[: -NUM_TURNS - 1 : -1]]
    wanted += [step << n for n in range(end.bit_length()) if step << n < end]
    if cuts is not None:
        before = {cuts[number - 1] for p in (*wanted, end) if (number := bisect(cuts, p))}
        return sorted(point for point in before if point > start)
    points = [start]
    for point in wanted:
        if start < point < end and all(abs(point - other) >= min_gain for other in points):
            points.append(point)
    return [*sorted(points[1:]), end]
