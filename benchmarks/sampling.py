"""The cost of sampling at a real vocabulary size, beside a sort of the whole vocabulary."""

import copy
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx

from benchmarks import Rows, row
from benchmarks.timed import take_turns
from mlx_mtp.errors import BenchError
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.sampler import Sampler
from mlx_mtp.sampling.truncation import Truncation

_DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.7": {"temperature": 0.7},
    "top_k 20, top_p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top_k 512, top_p 0.8": {"temperature": 0.7, "top_k": 512, "top_p": 0.8},
    "min_p 0.05": {"temperature": 0.7, "min_p": 0.05},
    "top_p 0.8": {"temperature": 0.7, "top_p": 0.8},
}
_REPORTS = {"logprobs, top 0": 0, "logprobs, top 5": 5}
_OURS, _SORTED = "ours", "full sort"
_Calls = dict[str, Callable[[], Any]]


def sampling(
    rounds: int = 15,
    vocab_size: int = 151_936,
    shapes: tuple[tuple[int, int], ...] = ((1, 1), (1, 4), (4, 4)),
) -> Rows:
    """Milliseconds of a draw and of logprobs, beside the same with a full sort of the vocabulary.

    Times `Sampler.draw` with usual parameters of requests, and `Sampler.logprobs`. Both ways take
    turns, and must give equal results. Times are medians of the rounds, and "ratio" is the median
    of the ratios.

    Args:
        shapes: rows x positions of a window
    """
    for rows, length in shapes:
        for name, calls in _contenders(rows, length, vocab_size):
            results = [call() for call in calls.values()]
            if not all(mx.array_equal(a, b) for r in results for a, b in zip(r, results[0])):
                raise BenchError(f"{name}: the full sort gives something else.")
            times = take_turns(calls, rounds)
            ms = {way: 1e3 * statistics.median(each) for way, each in times.items()}
            ratios = [b / a for a, b in zip(times[_OURS], times.get(_SORTED, ()))]
            figures = ms[_OURS], ms.get(_SORTED), statistics.median(ratios) if ratios else None
            names = "window | draw | ours, ms | full sort, ms | ratio"
            yield row(names, f"{rows} x {length}", name, *figures)


def _contenders(rows: int, length: int, vocab_size: int) -> Iterator[tuple[str, _Calls]]:
    mx.random.seed(0)
    # Rounded like a real model's logits, so that many are equal.
    logits = (3 * mx.random.normal((rows, length, vocab_size))).astype(mx.bfloat16)
    logits = logits.astype(mx.float32)
    positions = mx.broadcast_to(mx.arange(100, 100 + length), (rows, length))
    window = mx.zeros((rows, length), dtype=mx.int32)
    mx.eval(logits, positions, window)
    for name, fields in _DRAWS.items():
        params = [SamplingParams(max_tokens=1, seed=row, **fields) for row in range(rows)]
        ways = {_OURS: Sampler(params, [[0]] * rows, vocab_size)}
        if ways[_OURS].truncation:
            ways[_SORTED] = copy.copy(ways[_OURS])
            ways[_SORTED].truncation = _FullSort(params, vocab_size)
        yield name, {n: partial(way.draw, logits, positions, window) for n, way in ways.items()}
    for name, top in _REPORTS.items():
        params = [SamplingParams(max_tokens=1, top_logprobs=top)] * rows
        report = Sampler(params, [[0]] * rows, vocab_size).logprobs
        ours, full_sort = partial(report, logits), partial(_sorted_logprobs, top, logits)
        yield name, {_OURS: partial(ours, window), _SORTED: partial(full_sort, window)}


class _FullSort(Truncation):
    """Sorts all logits."""

    def __init__(self, params: list[SamplingParams], vocab_size: int) -> None:
        super().__init__(params, vocab_size)
        self._groups = [group._replace(num_ordered=vocab_size) for group in self._groups]


def _sorted_logprobs(top: int, logits: mx.array, tokens: mx.array) -> list[mx.array]:
    """Computes `Sampler.logprobs` by a sort of all tokens."""
    scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
    ids = mx.argsort(-scores, axis=-1)[..., :top].astype(mx.int32)
    return [chosen, ids, mx.take_along_axis(scores, ids, axis=-1)]
