"""A measurement: subjects are asked the same prompts in turns, and the answers become figures."""

import contextlib
import io
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from mlx_mtp.bench.answer import Answer, Split
from mlx_mtp.bench.prompts import Prompt, PromptSource
from mlx_mtp.console import say
from mlx_mtp.errors import BenchError

# The figures of a subject in one cell: a row of the CSV. Rates are tokens per second, times s.
Summary = dict[str, Any]
Cell = tuple[str, int]  # The kind of the prompts, and how many are asked at once.


@dataclass(frozen=True, slots=True)
class Asking:
    """How every answer of a run is asked for."""

    max_tokens: int = 128
    temperature: float = 0.0  # Above 0 each prompt has a seed of its own.
    ignore_eos: bool = False
    timeout: float = 600.0  # Seconds of silence after which a server is given up.


class Subject(Protocol):
    """What is measured: a server, or an engine with its settings."""

    name: str

    def ask(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Ask all of them at once; returns when the last answer has ended."""


@dataclass(frozen=True, slots=True)
class Wave:
    """The answers of one subject that was asked a cell's prompts at once."""

    subject: str
    prompts: str
    concurrency: int
    round: int
    answers: tuple[Answer, ...]

    @property
    def cell(self) -> Cell:
        return self.prompts, self.concurrency

    @property
    def began(self) -> float:
        return min(answer.sent for answer in self.answers)

    @property
    def rate(self) -> float:
        """Tokens per second of all answers, from the first request to the last answer's end."""
        seconds = max(answer.ended for answer in self.answers) - self.began
        return sum(answer.num_tokens for answer in self.answers) / seconds


def measure(
    subjects: Sequence[Subject],
    cells: Sequence[Cell],
    rounds: int,
    warmups: int,
    seed: int,
    deadline: float = math.inf,
) -> list[Wave]:
    """Ask every subject the same, in turns, so that a machine that slows down slows them all.

    Another subject begins in each round. A round that would not end before `deadline` (of
    `perf_counter`) is not begun. Raises BenchError if a subject gives not one token of text.
    """
    source, waves, took = PromptSource(seed), list[Wave](), 0.0
    for number in range(-warmups, rounds):
        began = perf_counter()
        if began + took > deadline:
            break
        stage = "warming up" if number < 0 else f"round {number + 1} of {rounds}"
        for place, (kind, count) in enumerate(cells):
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
    """Show what is being done as the last line of a terminal; nothing elsewhere."""
    terminal = sys.stderr if sys.stderr.isatty() else io.StringIO()
    say(line, end="", file=terminal)
    try:
        yield
    finally:
        terminal.write("\r\x1b[K")
        terminal.flush()


def summarize(
    waves: Sequence[Wave], subjects: Sequence[str], reference: str | None = None
) -> list[Summary]:
    """A summary for each subject and cell, with ratios to the reference round by round."""
    by_cell: dict[tuple[str | None, Cell], list[Wave]] = {}
    for wave in waves:
        by_cell.setdefault((wave.subject, wave.cell), []).append(wave)
    cells = itertools.product(subjects, dict.fromkeys(wave.cell for wave in waves))
    return [
        _figures(by_cell[name, cell])
        | _ratios(by_cell[name, cell], by_cell.get((reference, cell), ()))
        for name, cell in cells
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
        **_with_range("rate", [wave.rate for wave in waves]),
        "request_rate": median(a.decoding_rate for a in answers),
        **percentiles("ttft", ttfts, (50, 95)),
        **percentiles("itl", gaps / tokens, (50, 95, 99), weights=tokens),
        **percentiles("gap", gaps, (50, 95, 99)),
        "num_drafts": drafts,
        "num_accepted": accepted,
        "accepted": accepted / drafts if drafts else None,
        "retries": sum(a.retries for a in answers),
    }


def _ratios(own: Sequence[Wave], theirs: Sequence[Wave]) -> Summary:
    pairs = [(a, b) for a in own for b in theirs if a.round == b.round]
    ttfts = [[median(x.ttft for x in wave.answers) for wave in pair] for pair in pairs]
    return {
        **_with_range("rate_ratio", [a.rate / b.rate for a, b in pairs]),
        **_with_range("ttft_ratio", [a / b for a, b in ttfts if a is not None and b]),
    }


def percentiles(
    name: str, values: np.ndarray, wanted: Sequence[int], weights: np.ndarray | None = None
) -> dict[str, float | None]:
    """Percentiles of values [N] by name, such as "ttft_p50"; None for each of no values.

    Weights [N] say how often each value counts; a percentile is then one of the values.
    """
    found: Sequence[float | None] = [None] * len(wanted)
    if len(values):
        how: dict[str, Any] = {} if weights is None else {"method": "inverted_cdf"}
        found = np.percentile(values, wanted, weights=weights, **how).tolist()
    return {f"{name}_p{p}": value for p, value in zip(wanted, found)}


def median(values: Iterable[float | None]) -> float | None:
    """The median of the values that are known; None where there are none."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _with_range(name: str, values: Sequence[float]) -> Summary:
    low, high = min(values, default=None), max(values, default=None)
    return {name: median(values), f"{name}_min": low, f"{name}_max": high}
