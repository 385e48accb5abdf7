"""What drawing costs at a real vocabulary, beside sorting all of it.

For windows of rows x positions, the time of `Sampler.draw` with the parameters that requests have,
and of `Sampler.logprobs`; and the same with a full sort of the vocabulary
(`sampling/truncation.py`). Both take turns, round after round, and must give equal tokens.

    python -m benchmarks.sampling [--rounds 15] [--vocab-size 151936] [--shapes 1x1 1x4 4x4]
"""

import argparse
import copy
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

from mlx_mtp import backend

BACKEND = backend.prepare()

import mlx.core as mx

from mlx_mtp.bench.report import NOTHING, render
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.sampling.truncation import Truncation

DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.7": {"temperature": 0.7},
    "top_k 20, top_p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top_k 512, top_p 0.8": {"temperature": 0.7, "top_k": 512, "top_p": 0.8},
    "min_p 0.05": {"temperature": 0.7, "min_p": 0.05},
    "top_p 0.8": {"temperature": 0.7, "top_p": 0.8},
}
REPORTS = {"logprobs, top 0": 0, "logprobs, top 5": 5}
Call = Callable[[], list[mx.array]]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--vocab-size", type=int, default=151_936, metavar="V")
    parser.add_argument("--shapes", nargs="+", default=["1x1", "1x4", "4x4"], metavar="ROWSxT")
    given = parser.parse_args()
    cells: dict[str, list[str]] = {name: [] for name in (*DRAWS, *REPORTS)}
    for shape in given.shapes:
        rows, length = map(int, shape.split("x"))
        for name, calls in contenders(rows, length, given.vocab_size).items():
            cells[name].append(cell(timed(calls, given.rounds)))
    shapes = [f"{rows} x {length}" for rows, length in (s.split("x") for s in given.shapes)]
    print(render(["rows x positions", *shapes], [[name, *found] for name, found in cells.items()]))
    device = mx.device_info().get("device_name", platform.machine())
    print(
        f"\nMilliseconds, median of {given.rounds} rounds; in brackets those of the full sort, and"
    )
    print("how many times ours it takes, median of the ratios in one round.")
    print(f"V = {given.vocab_size:,}; {device}, {BACKEND}, load {os.getloadavg()[0]:.1f}.")


def contenders(rows: int, length: int, vocab_size: int) -> dict[str, list[Call]]:
    """Ours, and the full sort where that is another; equal, or this ends here."""
    mx.random.seed(0)
    # Rounded as a real model's: many are equal.
    logits = (3 * mx.random.normal((rows, length, vocab_size))).astype(mx.bfloat16)
    logits = logits.astype(mx.float32)
    positions = mx.broadcast_to(mx.arange(100, 100 + length), (rows, length))
    window = mx.zeros((rows, length), dtype=mx.int32)
    mx.eval(logits, positions, window)

    def drawing(sampler: Sampler) -> Call:
        return lambda: [sampler.draw(logits, positions, window)]

    def reporting(report: Callable[[mx.array, mx.array], Any]) -> Call:
        return lambda: list(report(logits, window))

    found: dict[str, list[Call]] = {}
    for name, fields in DRAWS.items():
        params = [SamplingParams(max_tokens=1, seed=row, **fields) for row in range(rows)]
        sampler = Sampler(params, [[0]] * rows, vocab_size)
        found[name] = [drawing(sampler)]
        if params[0].truncates:
            sorting = copy.copy(sampler)
            sorting.truncation = FullSort(params, vocab_size)
            found[name].append(drawing(sorting))
    for name, top in REPORTS.items():
        params = [SamplingParams(max_tokens=1, top_logprobs=top)] * rows
        sampler = Sampler(params, [[0]] * rows, vocab_size)
        found[name] = [reporting(sampler.logprobs), reporting(sorted_logprobs(top))]
    for name, calls in found.items():
        results = [call() for call in calls]
        if not all(mx.array_equal(a, b) for r in results for a, b in zip(r, results[0])):
            raise SystemExit(f"{name}: the full sort gives something else.")
    return found


class FullSort(Truncation):
    """Puts all logits in order."""

    def __init__(self, params: list[SamplingParams], vocab_size: int) -> None:
        super().__init__(params, vocab_size)
        self._groups = [group._replace(num_ordered=vocab_size) for group in self._groups]


def sorted_logprobs(top: int) -> Callable[[mx.array, mx.array], list[mx.array]]:
    """`Sampler.logprobs` by a sort of all tokens."""

    def report(logits: mx.array, tokens: mx.array) -> list[mx.array]:
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
        ids = mx.argsort(-scores, axis=-1)[..., :top].astype(mx.int32)
        return [chosen, ids, mx.take_along_axis(scores, ids, axis=-1)]

    return report


def timed(calls: list[Call], rounds: int) -> list[list[float]]:
    """Milliseconds of each call in each round; they take turns, each first every other round."""
    found: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 1):
        turns = list(zip(calls, found))
        for call, times in turns if number % 2 else reversed(turns):
            began = time.perf_counter()
            mx.eval(call())
            if number:
                times.append(1e3 * (time.perf_counter() - began))
    return found


def cell(times: list[list[float]]) -> str:
    """One cell of the table."""
    ours = f"{statistics.median(times[0]):.1f}"
    if len(times) == 1:
        return f"{ours} ({NOTHING})"
    ratio = statistics.median(b / a for a, b in zip(*times))
    return f"{ours} ({statistics.median(times[1]):.0f}, {ratio:.1f})"


if __name__ == "__main__":
    main()
