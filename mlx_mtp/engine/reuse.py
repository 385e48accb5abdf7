"""What a request takes from the prefix cache, and what it waits for. No arrays: policy alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable

from mlx_mtp.cache.prefix_node import Fetch, Node, common_length
from mlx_mtp.cache.prefix_reader import READ_SECONDS
from mlx_mtp.cache.prefix_tree import PrefixTree
from mlx_mtp.engine.fair_queue import FairQueue
from mlx_mtp.engine.save_points import MIN_GAIN, save_points, turns
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.stats import PrefixCacheStats


class PrefixReuse:
    """Looks prompts up, and holds back those that another is computing the beginning of, or whose
    beginning is read from the disk.

    Requests that arrive together and share a long prefix (the choices of one request, an agent's
    first two) would each compute it: all but the first wait until it has saved what they share.
    Each waits only for prompts that were before it in the queue, and these for none that are
    behind, so none waits for ever.

    One prefix is read at a time, so that what has been read and not used yet is one prefix at most.
    Clients take turns; whoever wants the same finds it in memory when its turn comes. What a read
    brings is looked up anew when it is here: the tree may have changed meanwhile. A read that takes
    longer than `READ_SECONDS` is given up by all that wait for the disk.

    Args:
        tree: the prefixes.
        turn_ends: ids that end a message.
        step: of the prefill.
        min_gain: tokens that are worth a cut in a prefill, or a wait.
        clock: seconds.

    Attributes:
        num_queries: prompt tokens of the requests that were looked up.
        num_hits: those that were found.
    """

    def __init__(
        self,
        tree: PrefixTree,
        turn_ends: Container[int],
        step: int,
        min_gain: int = MIN_GAIN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tree = tree
        self.num_queries = 0
        self.num_hits = 0
        self._turn_ends = turn_ends
        self._step = step
        self._min_gain = min_gain
        self._num_seen = 0
        self._clock = clock
        self._reads = FairQueue[Sequence]()
        # The one at the head that has asked the disk, and until when it waits for that.
        self._reader: Sequence | None = None
        self._read_by = 0.0

    def find(self, sequence: Sequence) -> Node | None:
        """The longest prefix of its prompt in memory."""
        return self.tree.match(sequence.salt, sequence.prompt, in_memory=True)

    def must_read(self, sequence: Sequence) -> bool:
        """Its prefix is on the disk alone and will be read, so that it should wait.

        To be asked again until it need not: what has been read is taken into memory here.
        """
        while (node := self._match(sequence)) is not None and node.snapshot is None:
            if not sequence.reads:
                sequence.reads = True
                self._reads.add(sequence)
            if self._reads.peek() is not sequence:
                return True
            if self._reader is not sequence:
                self._reader, self._read_by = sequence, self._clock() + READ_SECONDS
            state = self.tree.fetch(node)
            if state is Fetch.NEVER:
                sequence.skips_disk = True
            elif state is Fetch.HERE:
                # If that fails, what matches next is shorter.
                self.tree.load(node)
            elif self._clock() < self._read_by:
                return True
            else:
                for each in self._reads:
                    each.skips_disk = True
        self._end_read(sequence)
        return False

    @property
    def seconds_left(self) -> float:
        """For how long a read is waited for at most, from now on."""
        return 0.0 if self._reader is None else max(self._read_by - self._clock(), 0.0)

    def waits(self, sequence: Sequence) -> bool:
        """What it was held back for is still to come. (A read under way has to be asked after.)"""
        if sequence.awaited is not None:
            leader, point = sequence.awaited
            if not leader.finished and point in leader.save_points:
                return True
        return sequence.reads and not sequence.skips_disk and self._reads.peek() is not sequence

    def held_back(self, sequence: Sequence, prefilling: Iterable[Sequence]) -> bool:
        """It should wait: for one of these prompts, which are computed, or for its turn to read."""
        if sequence.number is None:
            sequence.number, self._num_seen = self._num_seen, self._num_seen + 1
        if self.waits(sequence):
            return True
        sequence.awaited = None
        node = self._match(sequence)
        found = 0 if node is None else node.end
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
        start = 0
        if node is not None:
            self.tree.touch(node)
            self.tree.pin(node)
            start = node.end
        ends = turns(sequence.prompt, self._turn_ends)
        points = save_points(sequence.num_prompt, start, ends, self._step, self._min_gain)
        sequence.begin(node, points, first_turn=ends[0] if ends else None)
        self.num_queries += sequence.num_prompt
        self.num_hits += start

    def release(self, sequence: Sequence) -> None:
        """The request no longer needs its prefix."""
        self._end_read(sequence)
        if sequence.prefix is not None:
            self.tree.unpin(sequence.prefix)
            sequence.prefix = None

    def stats(self) -> PrefixCacheStats:
        """What it has found, and what it takes."""
        nbytes = self.tree.nbytes + self.tree.fetched_nbytes
        return PrefixCacheStats(self.num_queries, self.num_hits, nbytes, len(self.tree))

    def _match(self, sequence: Sequence) -> Node | None:
        """The longest prefix of its prompt, wherever that is."""
        return self.tree.match(sequence.salt, sequence.prompt, in_memory=sequence.skips_disk)

    def _end_read(self, sequence: Sequence) -> None:
        """It has what it waited for, or waits for the disk no longer."""
        if not sequence.reads:
            return
        sequence.reads = False
        if self._reader is sequence:
            self._reader = None
            self.tree.forget_fetched()
        if self._reads.peek() is sequence:
            self._reads.pop()
        else:
            self._reads.keep(frozenset(s for s in self._reads if s is not sequence))
