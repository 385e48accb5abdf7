"""A measurement: subjects get the same prompts in turns; figures are computed from the answers."""

import contextlib
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from mlx_mtp.bench.answer import Split, TimedAnswer
from mlx_mtp.bench.prompts import Prompt, PromptSource
from mlx_mtp.console import say
from mlx_mtp.errors import BenchError

# A row of the CSV: a subject's figures for one combination. Rates are tokens/s, times seconds.
Summary = dict[str, Any]
Combination = tuple[str, int]  # the kind of the prompts, and how many are sent together


@dataclass(frozen=True, slots=True)
class Asking:
    """The parameters of all requests of a run."""

    max_tokens: int = 128
    temperature: float = 0.0  # Above 0, each prompt has a seed of its own.
    ignore_eos: bool = False
    timeout: float = 600.0  # seconds of silence after which a server is given up


class Subject(Protocol):
    """A server, or an engine with its settings, to measure."""

    name: str

    def ask(self, prompts: Sequence[Prompt]) -> list[TimedAnswer]:
        """Send all prompts at the same time; returns when the last answer has ended."""


@dataclass(frozen=True, slots=True)
class Wave:
    """The answers of one subject to the prompts of a combination, in one round."""

    subject: str
    prompts: str
    concurrency: int
    round: int
    answers: tuple[TimedAnswer, ...]

    @property
    def began(self) -> float:
        return min(answer.sent for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s of all answers, from the first request to the end of the last answer."""
        seconds = max(answer.ended for answer in self.answers) - self.began
        return sum(answer.num_tokens for answer in self.answers) / seconds


def measure(
    subjects: Sequence[Subject],
    combinations: Sequence[Combination],
    rounds: int,
    warmups: int,
    seed: int,
    deadline: float = math.inf,
) -> list[Wave]:
    """Send every subject the same prompts, in turns: a slower machine then affects all subjects.

    Each round begins with another subject. A round that would end after `deadline` (`perf_counter`,
    seconds) is not started, and waves of the `warmups` first rounds are not returned. Raises
    BenchError if a subject answers all prompts without text.
    """
    source, waves, took = PromptSource(seed), list[Wave](), 0.0
    for number in range(-warmups, rounds):
        began = perf_counter()
        if began + took > deadline:
            break
        stage = "warming up" if number < 0 else f"round {number + 1} of {rounds}"
        for place, (kind, count) in enumerate(combinations):
            prompts = source.next(kind, count)
            first = (number + place) % len(subjects)
            for subject in (*subjects[first:], *subjects[:first]):
                with showing(f"{stage}: {kind}, {count} at once, {subject.name}"):
                    answers = tuple(subject.ask(prompts))
                if not any(answer.times for answer in answers):
                    raise BenchError(f"{subject.name} gave an empty answer to every prompt.")
                if number >= 0:
                    waves.append(Wave(subject.name, kind, count, number, answers))
        took = perf_counter() - began
    return waves


@contextlib.contextmanager
def showing(line: str) -> Iterator[None]:
    """Show a line at the bottom of a terminal while the block runs; elsewhere print the line."""
    is_terminal = sys.stderr.isatty()
    say(line, end="" if is_terminal else "\n", file=sys.stderr)
    try:
        yield
    finally:
        if is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def summarize(
    waves: Sequence[Wave], subjects: Sequence[str], reference: str | None = None
) -> list[Summary]:
    """Returns a summary for each subject and combination, with ratios to the reference by round."""
    groups = defaultdict[tuple[str | None, Combination], list[Wave]](list)
    for wave in waves:
        groups[wave.subject, (wave.prompts, wave.concurrency)].append(wave)
    return [
        _figures(groups[name, each]) | _ratios(groups[name, each], groups[reference, each])
        for name, each in itertools.product(subjects, dict.fromkeys(each for _, each in groups))
    ]


def _figures(waves: Sequence[Wave]) -> Summary:
    answers, first = [answer for wave in waves for answer in wave.answers], waves[0]
    num_tokens = sum(answer.num_tokens for answer in answers)
    ttfts = np.array([a.ttft for a in answers if a.ttft is not None])
    drafts, accepted = sum(a.num_drafts for a in answers), sum(a.num_accepted for a in answers)
    gaps = np.array([gap for a in answers for gap in a.gaps])
    tokens = np.array([count for a in answers for count in a.tokens[1:]])
    return {
        "subject": first.subject,
        "prompts": first.prompts,
        "concurrency": first.concurrency,
        "rounds": len(waves),
        "answers": len(answers),
        "prompt_tokens": median(a.prompt_tokens for a in answers),
        "tokens": num_tokens,
        "split": max((a.split for a in answers), key=list(Split).index),
        "tokens_per_chunk": num_tokens / sum(a.num_events for a in answers),
        **_with_range("rate", [wave.tokens_per_second for wave in waves]),
        "request_rate": median(a.decoding_rate for a in answers),
        **percentiles("ttft", ttfts, (50, 95)),
        **percentiles("itl", gaps / tokens, (50, 95, 99), weights=tokens),
        **percentiles("gap", gaps, (50, 95, 99)),
        "num_drafts": drafts,
        "num_accepted": accepted,
        "accepted": accepted / drafts if drafts else None,
        "retries": sum(a.retries for a in answers),
    }


def _ratios(waves: Sequence[Wave], references: Sequence[Wave]) -> Summary:
    pairs = [(a, b) for a in waves for b in references if a.round == b.round]
    ttfts = [[median(x.ttft for x in wave.answers) for wave in pair] for pair in pairs]
    return {
        **_with_range("rate_ratio", [a.tokens_per_second / b.tokens_per_second for a, b in pairs]),
        **_with_range("ttft_ratio", [a / b for a, b in ttfts if a is not None and b]),
    }


def percentiles(
    name: str, values: np.ndarray, percents: Sequence[int], weights: np.ndarray | None = None
) -> dict[str, float | None]:
    """Returns percentiles of values [N] by name, such as "ttft_p50"; all None if N is 0.

    `weights` [N] are how often each value counts; with weights, each percentile is one of `values`.
    """
    results: Sequence[float | None] = [None] * len(percents)
    if len(values):
        options: dict[str, Any] = {} if weights is None else {"method": "inverted_cdf"}
        results = np.percentile(values, percents, weights=weights, **options).tolist()
    return {f"{name}_p{p}": value for p, value in zip(percents, results)}


def median(values: Iterable[float | None]) -> float | None:
    """Returns the median of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _with_range(name: str, values: Sequence[float]) -> Summary:
    low, high = min(values, default=None), max(values, default=None)
    return {name: median(values), f"{name}_min": low, f"{name}_max": high}
