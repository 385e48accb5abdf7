"""What a request takes from the prefix cache, and what it waits for. No arrays: policy alone."""

from __future__ import annotations

from collections.abc import Container, Iterable

from mlx_mtp.cache.prefix_node import Node, common_length
from mlx_mtp.cache.prefix_tree import PrefixTree
from mlx_mtp.engine.save_points import MIN_GAIN, save_points, turns
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.stats import PrefixCacheStats


class PrefixReuse:
    """Looks prompts up, and holds back those that another is computing the beginning of.

    Requests that arrive together and share a long prefix (the choices of one request, an agent's
    first two) would each compute it: all but the first wait until it has saved what they share.
    Each waits only for prompts that were before it in the queue, and these for none that are
    behind, so none waits for ever.

    Args:
        tree: the prefixes.
        turn_ends: ids that end a message.
        step: of the prefill.
        min_gain: tokens that are worth a cut in a prefill, or a wait.

    Attributes:
        num_queries: prompt tokens of the requests that were looked up.
        num_hits: those that were found.
    """

    def __init__(
        self, tree: PrefixTree, turn_ends: Container[int], step: int, min_gain: int = MIN_GAIN
    ) -> None:
        self.tree = tree
        self.num_queries = 0
        self.num_hits = 0
        self._turn_ends = turn_ends
        self._step = step
        self._min_gain = min_gain
        self._num_seen = 0

    def find(self, sequence: Sequence) -> Node | None:
        """The longest prefix of its prompt, in memory: what is on the disk alone is read."""
        salt, prompt = sequence.salt, sequence.prompt
        node = self.tree.match(salt, prompt)
        while node is not None and node.snapshot is None and not self.tree.load(node):
            before, node = node, self.tree.match(salt, prompt)
            if node is before:
                # There is no room for it now.
                return self.tree.match(salt, prompt, in_memory=True)
        return node

    @staticmethod
    def waits(sequence: Sequence) -> bool:
        """What it was held back for is still to come."""
        if sequence.awaited is None:
            return False
        leader, point = sequence.awaited
        return not leader.finished and point in leader.save_points

    def held_back(self, sequence: Sequence, prefilling: Iterable[Sequence]) -> bool:
        """It should wait for one of these prompts, which are being computed."""
        if sequence.number is None:
            sequence.number, self._num_seen = self._num_seen, self._num_seen + 1
        if self.waits(sequence):
            return True
        sequence.awaited = None
        node = self.tree.match(sequence.salt, sequence.prompt)
        found = 0 if node is None else node.end
        for leader in prefilling:
            assert leader.number is not None
            if leader.number > sequence.number or leader.salt != sequence.salt:
                continue
            shared = common_length(leader.prompt, sequence.prompt)
            point = max((p for p in leader.save_points if p <= shared), default=0)
            if not leader.finished and point - found >= self._min_gain:
                sequence.awaited = leader, point
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
        if sequence.prefix is not None:
            self.tree.unpin(sequence.prefix)
            sequence.prefix = None

    def stats(self) -> PrefixCacheStats:
        """What it has found, and what it takes."""
        return PrefixCacheStats(self.num_queries, self.num_hits, self.tree.nbytes, len(self.tree))
