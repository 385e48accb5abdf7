"""What chunks of prompts cost by their length, measured while nobody asks."""

import logging
import time
from collections.abc import Callable

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.engine.step import StepPlan, StepRow
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.prefill_costs import PrefillCosts

logger = logging.getLogger(__name__)

_SHARE = 0.25  # of the time for calibration; the rest is for decode steps


def spread(vocab_size: int, count: int) -> tuple[int, ...]:
    """Tokens from everywhere in the vocabulary: equal ones would share their experts."""
    return tuple(n * vocab_size // count for n in range(count))


class ChunkCalibration:
    """Computes first chunks of prompts that don't go on, shorter ones first, one at each step.

    A request that comes waits for one of them, so behind the first two lengths none is tried that
    is expected to take longer than `--max-decode-pause`; without that bound costs of chunks are not
    used.
    """

    def __init__(
        self,
        costs: PrefillCosts,
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.costs, self._pause, self._clock = costs, config.decode_pause, clock
        self.seconds_left = _SHARE * config.calibration_seconds if self._pause else 0.0

    @property
    def over(self) -> bool:
        return self.seconds_left <= 0 or self.costs.next_unmeasured(self._pause) is None

    def step(self, runner: ModelRunner) -> None:
        """Compute and time one chunk, unless it is over."""
        length = self.costs.next_unmeasured(self._pause)
        assert length is not None
        # If this kills the thread or fails, nothing more is measured.
        left, self.seconds_left = self.seconds_left, 0.0
        began = self._clock()
        prompt = spread(runner.vocab_size, length + 1)
        sequence = Sequence(Request("calibration", prompt, SamplingParams(max_tokens=1)), (), 1)
        plan = StepPlan((StepRow(sequence, 0, length),), (), frozenset([sequence]))
        (step,) = runner.run(plan)
        runner.read(step)
        seconds = self._clock() - began
        if step.error is not None:
            logger.warning("A step failed while costs of prompts were measured")
            runner.release()
            return
        self.costs.observe(length, 0, seconds)
        self.seconds_left = left - seconds
        # Not between two of a length, which would allocate anew.
        if self.over or self.costs.next_unmeasured(self._pause) != length:
            runner.release()
