"""Which prompts are computed next, and how much of them. No arrays, no model: policy alone.

The next chunk goes to the prompt with the fewest tokens left, unless the oldest prompt has waited
for other prompts' chunks for as many seconds as its own next chunk takes. So a short prompt that
arrives after long ones gets at least half of the machine, and so does the oldest prompt. No prompt
starves: it is complete after at most twice the time that it and the rest of the prompts before it
would take alone.
"""

from collections.abc import Collection
from collections.abc import Sequence as Many

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.chunk_costs import PrefillCosts
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import InFlightStep, StepRow


class PrefillScheduler:
    """Plans the chunks of prompts: short prompts in groups, long ones alone.

    While rows are running, a chunk is as long as `--max-decode-pause` allows; otherwise it has the
    length with the most tokens per second. Without `--max-decode-pause` nothing is measured, and
    chunks have `prefill_step_size` tokens.
    """

    def __init__(self, config: EngineConfig, costs: PrefillCosts | None = None) -> None:
        self._step = config.prefill_step_size
        self._pause = config.decode_pause
        self._costs = costs or PrefillCosts(self._step)
        self.groups: list[list[Sequence]] = []  # oldest first
        self._deficit = 0.0  # seconds that the oldest group has waited for other groups' chunks

    def drop(self, sequences: Collection[Sequence]) -> None:
        """Remove sequences that have emitted their first token, or have ended."""
        left = ([s for s in group if s not in sequences] for group in self.groups)
        self.groups = [group for group in left if group]

    def most_tokens(self, context: float = 0, left: int = 0, *, beside: bool) -> int:
        """Returns the longest chunk, in tokens, after `context` tokens.

        Prompts have `left` tokens left, with padding. `beside` is True while rows are running.
        """
        if not self._pause:
            return self._step
        if beside:
            return self._costs.longest_within(self._pause, context, left)
        return self._costs.fastest(left)

    def next_chunk(self, *, beside: bool) -> tuple[StepRow, ...]:
        """Plan the next chunk; () if no prompt needs one. `beside`: see `most_tokens`."""
        unplanned = (
            [s for s in group if s.num_planned < s.num_prompt or not s.begun]
            for group in self.groups
        )
        waiting = [group for group in unplanned if group]
        if not waiting:
            self._deficit = 0.0
            return ()
        # A prompt whose last chunk was launched becomes a running row when that chunk is read.
        beside = beside or len(waiting) < len(self.groups)
        oldest, group = waiting[0], min(waiting, key=_num_left)
        chunk = self._chunk(group, beside)
        if group is not oldest:
            turn = self._chunk(oldest, beside)
            seconds = self._costs.seconds(*_size(turn))
            if self._deficit >= seconds:
                self._deficit -= seconds
                chunk = turn
            else:
                self._deficit += self._costs.seconds(*_size(chunk))
        for row in chunk:
            row.sequence.num_planned = row.start + row.length
            row.sequence.begun = True
        return chunk

    def observe(self, step: InFlightStep) -> None:
        """Learn from a chunk that has been read."""
        if self._pause and step.seconds is not None and step.timing_valid:
            self._costs.observe(*_size(step.rows), step.seconds)

    def _chunk(self, group: Many[Sequence], beside: bool) -> tuple[StepRow, ...]:
        rows = tuple(StepRow(s, s.num_planned) for s in group)
        context = sum(row.start for row in rows) / len(rows)
        padded = len(rows) * max(s.num_prompt - s.num_planned for s in group)
        most = self.most_tokens(context, padded, beside=beside)
        most = max(most // len(rows), 1)
        for row in rows:
            left = row.sequence.prefix.chunk_end(row.start, self._step) - row.start
            # Two halves: otherwise the few remaining tokens would need a chunk of their own.
            row.length = -(-left // 2) if most < left < 2 * most else min(left, most)
        return rows


class WholeChunks(PrefillScheduler):
    """For calibration: each step is one chunk of a whole `prefill_step_size`."""

    def observe(self, step: InFlightStep) -> None:
        assert step.seconds is not None
        self._costs.observe(self._step, 0, step.seconds)


def _num_left(group: Many[Sequence]) -> int:
    return sum(s.num_prompt - s.num_planned for s in group)


def _size(rows: Many[StepRow]) -> tuple[int, float]:
    """Tokens of a chunk as a padded rectangle, and the rows' mean number of tokens before it."""
    longest = max(row.length for row in rows)
    return len(rows) * longest, sum(row.start for row in rows) / len(rows)
