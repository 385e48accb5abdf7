"""Tokens per second with MTP off, at fixed depths and with `auto`, offline, on the bundled model.

The engine decodes greedy stories of at most 128 tokens. The contenders take turns, round after
round, each with a fresh set of requests and the costs and acceptance it has learned so far, so
that a machine that slows down slows them all. A second table does the same with a head whose
weights are random, so that no draft is right.

    python -m benchmarks.depth [--rounds 7] [--rows 1 4 16] [--depths 0 1 2 3 4] ...

On a machine that others use too, `OPENBLAS_NUM_THREADS=1` takes most of the noise away.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence as Many
from pathlib import Path

from mlx_mtp import backend

BACKEND = backend.prepare()

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlx_mtp.config import MAX_DRAFT_TOKENS, EngineConfig
from mlx_mtp.engine.calibration import calibrate
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.models.loader import load_model
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.server.tokenizer import Tokenizer
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
    """

    def __init__(self, model: LoadedModel, depth: str, num_rows: int) -> None:
        config = EngineConfig(max_num_seqs=num_rows, calibration_seconds=CALIBRATION_SECONDS)
        proposer = None if depth == "off" else MTPProposer(model)
        self._runner = ModelRunner(model, proposer, model.vocab_size)
        policy: DepthPolicy
        if depth == "auto":
            costs = StepCosts(MAX_DRAFT_TOKENS)
            calibrate(costs, config, self._runner, stopping=lambda: False)
            policy = DepthController(costs)
        else:
            policy = FixedDepth(0 if depth == "off" else int(depth))
        self._core = EngineCore(Scheduler(config, policy), self._runner, overlap=config.overlap)
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


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--depths", nargs="+", default=["0", "1", "2", "3", "4"])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write every speed here")
    given = parser.parse_args()
    tokenizer = Tokenizer.load(BUNDLED_MODEL)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in STORIES]
    off = load_model(BUNDLED_MODEL, enable_mtp=False)
    good = load_model(BUNDLED_MODEL, enable_mtp=True)
    spoiled = load_model(BUNDLED_MODEL, enable_mtp=True)
    spoil(spoiled)
    everything: dict[str, dict[int, Speeds]] = {}
    for title, model, depths in (
        ("the model's own head", good, (*given.depths, "auto")),
        ("a head of random weights", spoiled, ("0", "1", "auto")),
    ):
        found = {
            rows: measure(off, model, depths, prompts, rows, given.rounds, given.max_tokens)
            for rows in given.rows
        }
        everything[title] = found
        print(f"\n{title}\n\n{table(found)}", flush=True)
    print(f"\n{platform.platform()}, {BACKEND}, load {os.getloadavg()[0]:.1f}; tokens per second,")
    print(f"median of {given.rounds} rounds; in brackets the ratio to off in the same round: by")
    print("wall time / by processor time.")
    if given.json:
        given.json.write_text(json.dumps(everything, indent=1))


def spoil(model: LoadedModel) -> None:
    """Replace the head's matrices by random ones of the same size."""
    assert model.head is not None
    mx.random.seed(0)
    weights = {
        name: mx.random.normal(value.shape, dtype=value.dtype) * mx.std(value)
        if value.ndim > 1
        else value
        for name, value in tree_flatten(model.head.parameters())
    }
    model.head.update(tree_unflatten(list(weights.items())))


def measure(
    off: LoadedModel,
    model: LoadedModel,
    depths: Many[str],
    prompts: Many[tuple[int, ...]],
    num_rows: int,
    rounds: int,
    max_tokens: int,
) -> Speeds:
    """All contenders in turns; each has a warm-up that doesn't count."""
    contenders = {"off": Contender(off, "off", num_rows)}
    contenders |= {depth: Contender(model, depth, num_rows) for depth in depths}
    speeds: Speeds = {name: [] for name in contenders}
    for number in range(rounds + 1):
        chosen = [prompts[(number + i) % len(prompts)] for i in range(num_rows)]
        # Every second round backwards, so that what drifts favours none.
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            result = contenders[name].run(chosen, max_tokens)
            if number:
                speeds[name].append(result)
        print(".", end="", file=sys.stderr, flush=True)
    print(f" {num_rows} rows: auto chose {contenders['auto'].policy.choices()}", file=sys.stderr)
    return speeds


def table(found: dict[int, Speeds]) -> str:
    """Markdown: a row per contender, a column per number of rows; then auto against the best."""
    names = list(next(iter(found.values())))
    lines = ["| depth | " + " | ".join(f"{rows} at once" for rows in found) + " |"]
    lines.append("|---" * (len(found) + 1) + "|")
    for name in names:
        cells = []
        for speeds in found.values():
            rate = statistics.median(wall for wall, _ in speeds[name])
            wall, cpu = ratios(speeds, name, "off")
            cells.append(f"{rate:.0f} ({wall:.2f} / {cpu:.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    cells = []
    for speeds in found.values():
        best = max(
            (name for name in names if name != "auto"), key=lambda n: ratios(speeds, n, "off")[1]
        )
        wall, cpu = ratios(speeds, "auto", best)
        cells.append(f"{best}: {wall:.3f} / {cpu:.3f}")
    lines.append("| auto over the best of the others | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratios(speeds: Speeds, name: str, other: str) -> tuple[float, float]:
    """Medians over the rounds of the ratio of wall speeds and of processor speeds."""
    pairs = list(zip(speeds[name], speeds[other], strict=True))
    return (
        statistics.median(a[0] / b[0] for a, b in pairs),
        statistics.median(a[1] / b[1] for a, b in pairs),
    )


if __name__ == "__main__":
    main()
