"""Which prompts are computed next, and how much of them. No arrays, no model: policy alone.

A chunk goes to the prompt that has the least left, unless the oldest has waited for as many seconds
of others' chunks as its own next one takes. So a short prompt behind long ones has at least half of
the machine until it is done, the oldest has at least half of it at any time, and none starves: a
prompt is computed within twice the time of itself and of what was left of those before it.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Many

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import InFlightStep, StepRow
from mlx_mtp.speculative.costs import PrefillCosts

Group = list[Sequence]


class PrefillScheduler:
    """The prompts that are being computed: groups of short ones together, long ones alone.

    Beside running rows chunks are cut to the pause that these may have, otherwise to what is
    fastest. Without a bound of the pause nothing is measured, and every chunk is a whole step.
    """

    def __init__(self, config: EngineConfig, costs: PrefillCosts | None = None) -> None:
        self._step = config.prefill_step_size
        self._pause = config.decode_pause
        self._costs = costs or PrefillCosts(self._step)
        self._groups: list[Group] = []  # the oldest first
        self._credit = 0.0  # seconds of others' chunks that the oldest has waited for

    def __iter__(self) -> Iterator[Sequence]:
        return (s for group in self._groups for s in group)

    def add(self, group: Group) -> None:
        self._groups.append(group)

    def drop(self, sequence: Sequence) -> None:
        """It has its first token, or has ended."""
        for group in self._groups:
            if sequence in group:
                group.remove(sequence)
        self._groups = [group for group in self._groups if group]

    def most_tokens(self, context: float = 0, left: int = 0, *, beside: bool) -> int:
        """Of a chunk after so much context, beside running rows or not."""
        if not self._pause:
            return self._step
        if beside:
            return self._costs.longest_within(self._pause, context)
        return self._costs.fastest(left)

    def next_chunk(self, *, beside: bool) -> tuple[StepRow, ...]:
        """Plan a chunk; `beside`: rows are running."""
        waiting = [group for group in self._groups if any(map(_is_waiting, group))]
        if not waiting:
            self._credit = 0.0
            return ()
        # What has been launched to its end runs as soon as that has been read.
        beside = beside or len(waiting) < len(self._groups)
        oldest, group = waiting[0], min(waiting, key=_num_left)
        chunk = self._chunk(group, beside)
        if group is not oldest:
            own = self._chunk(oldest, beside)
            if self._credit >= self._seconds(own):
                self._credit -= self._seconds(own)
                chunk = own
            else:
                self._credit += self._seconds(chunk)
        for row in chunk:
            row.sequence.num_computed = row.start + row.length
            row.sequence.begun = True
        return chunk

    def observe(self, step: InFlightStep) -> None:
        """Learn from a chunk that has been read."""
        if self._pause and step.seconds is not None and not step.did_more:
            self._costs.observe(*_size(step.rows), step.seconds)

    def _chunk(self, group: Group, beside: bool) -> tuple[StepRow, ...]:
        rows = tuple(StepRow(s, s.num_computed) for s in group if _is_waiting(s))
        _, context = _size(rows)
        most = self.most_tokens(context, _num_left(group), beside=beside)
        most = max(most // len(rows), 1)
        for row in rows:
            left = row.sequence.prefix.chunk_end(row.start, self._step) - row.start
            # A rest of few tokens would take a chunk of its own.
            row.length = -(-left // 2) if most < left < 2 * most else min(left, most)
        return rows

    def _seconds(self, chunk: tuple[StepRow, ...]) -> float:
        return self._costs.seconds(*_size(chunk))


def _is_waiting(sequence: Sequence) -> bool:
    return sequence.num_computed < sequence.num_prompt or not sequence.begun


def _num_left(group: Group) -> int:
    return sum(s.num_prompt - s.num_computed for s in group)


def _size(rows: Many[StepRow]) -> tuple[int, float]:
    """Tokens of a chunk, as a rectangle of its rows, and how many are before one of them."""
    longest = max(row.length for row in rows)
    return len(rows) * longest, sum(row.start for row in rows) / len(rows)
