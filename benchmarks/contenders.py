"""Engines without their threads that answer the same prompts in turns, round after round."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from collections.abc import Sequence as Many

from mlx_mtp.config import MAX_DRAFT_TOKENS, EngineConfig
from mlx_mtp.engine.calibration import calibrate
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.models.draft_head import DraftHead
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.controller import DepthController
from mlx_mtp.speculative.costs import StepCosts
from mlx_mtp.speculative.depth import DepthPolicy, FixedDepth
from mlx_mtp.speculative.proposer import MTPProposer

CALIBRATION_SECONDS = 2.0
STORIES = [
    f"Write a short story about {name}, a {animal} who finds {thing}."
    for name, animal in (("Anna", "fox"), ("Ben", "owl"), ("Clara", "bear"), ("Leo", "otter"))
    for thing in (
        "a lamp in the forest",
        "a map in the village",
        "a bell in the castle",
        "a key by the lake",
    )
]
Speeds = dict[str, list[tuple[float, float]]]
"""Tokens per second of wall time, and of the processor's time, by contender and round."""


class Contender:
    """An engine without its thread.

    Args:
        model: with its head, unless it runs without MTP.
        depth: "off", a fixed depth, or "auto".
        num_rows: rows at once.
        draft_ids: the only tokens that are drafted; None: all.
    """

    def __init__(
        self,
        model: LoadedModel,
        depth: str,
        num_rows: int,
        draft_ids: Many[int] | None = None,
    ) -> None:
        config = EngineConfig(max_num_seqs=num_rows, calibration_seconds=CALIBRATION_SECONDS)
        head = None if draft_ids is None else DraftHead(model, draft_ids)
        proposer = None if depth == "off" else MTPProposer(model, head)
        runner = ModelRunner(model, proposer, model.vocab_size)
        policy: DepthPolicy
        if depth == "auto":
            costs = StepCosts(MAX_DRAFT_TOKENS)
            calibrate(costs, config, runner, stopping=lambda: False)
            policy = DepthController(costs)
        else:
            policy = FixedDepth(0 if depth == "off" else int(depth))
        self._core = EngineCore(Scheduler(config, policy), runner, overlap=config.overlap)
        self._stop_ids = model.eos_token_ids
        self.policy = policy

    def run(self, prompts: Many[tuple[int, ...]], max_tokens: int) -> tuple[float, float]:
        """Answer all prompts at once: tokens per second of wall and of processor time."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        for number, prompt in enumerate(prompts):
            request = Request(str(number), prompt, sampling)
            self._core.add(Sequence(request, self._stop_ids, max_tokens))
        tokens, wall, cpu = 0, time.perf_counter(), time.process_time()
        while not self._core.idle:
            tokens += sum(len(output.token_ids) for output in self._core.step())
        return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)

    @property
    def acceptance(self) -> float:
        """Share of all drafts so far."""
        stats = self._core.stats()
        return stats.num_accepted_tokens / max(stats.num_draft_tokens, 1)


def take_turns(
    contenders: Mapping[str, Contender],
    prompts: Many[tuple[int, ...]],
    num_rows: int,
    rounds: int,
    max_tokens: int,
) -> Speeds:
    """All of them, round after round; each has a warm-up that doesn't count."""
    speeds: Speeds = {name: [] for name in contenders}
    for number in range(rounds + 1):
        chosen = [prompts[(number + i) % len(prompts)] for i in range(num_rows)]
        # Every second round backwards, so that what drifts favours none.
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            result = contenders[name].run(chosen, max_tokens)
            if number:
                speeds[name].append(result)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return speeds


def ratios(speeds: Speeds, name: str, other: str) -> tuple[float, float]:
    """Medians over the rounds of the ratio of wall speeds and of processor speeds."""
    pairs = list(zip(speeds[name], speeds[other], strict=True))
    return (
        statistics.median(a[0] / b[0] for a, b in pairs),
        statistics.median(a[1] / b[1] for a, b in pairs),
    )
