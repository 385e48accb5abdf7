"""From answers to figures: medians over rounds, percentiles over answers and tokens, ratios."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlx_mtp.bench.answer import Answer, Split
from mlx_mtp.bench.runs import Cell, Wave


@dataclass(frozen=True, slots=True)
class Summary:
    """One subject in one cell: a row of the CSV. Rates are tokens per second, times seconds.

    Args:
        subject: name of the server or engine.
        prompts: kind of the prompts.
        concurrency: how many were asked at once.
        rounds: waves.
        answers: of all waves.
        prompt_tokens: median of a prompt; None if the server doesn't say.
        tokens: of all answers.
        split: how the tokens of a chunk are known; the worst of all answers.
        tokens_per_chunk: tokens over stream events with text.
        rate, rate_min, rate_max: of a wave as a whole, median and range over the rounds.
        request_rate: decoding rate of one answer, median.
        ttft_p50, ttft_p95: time to the first token.
        itl_p50, itl_p95, itl_p99: inter-token latency, each token counted once.
        gap_p50, gap_p95, gap_p99: between chunks.
        num_drafts, num_accepted: draft tokens verified, and accepted, where the server tells.
        retries: connections refused before one was taken.
        rate_ratio, ttft_ratio, ...: to the reference, median and range over the rounds.
    """

    subject: str
    prompts: str
    concurrency: int
    rounds: int
    answers: int
    prompt_tokens: float | None
    tokens: int
    split: Split
    tokens_per_chunk: float
    rate: float
    rate_min: float
    rate_max: float
    request_rate: float | None
    ttft_p50: float
    ttft_p95: float
    itl_p50: float | None
    itl_p95: float | None
    itl_p99: float | None
    gap_p50: float | None
    gap_p95: float | None
    gap_p99: float | None
    num_drafts: int
    num_accepted: int
    retries: int
    rate_ratio: float | None = None
    rate_ratio_min: float | None = None
    rate_ratio_max: float | None = None
    ttft_ratio: float | None = None
    ttft_ratio_min: float | None = None
    ttft_ratio_max: float | None = None

    @property
    def cell(self) -> Cell:
        """Where it stands."""
        return Cell(self.prompts, self.concurrency)

    @property
    def accepted(self) -> float | None:
        """Share of the draft tokens; None where there were none, or nothing is told of them."""
        return self.num_accepted / self.num_drafts if self.num_drafts else None


def summarize(
    waves: Sequence[Wave], subjects: Sequence[str], reference: str | None = None
) -> list[Summary]:
    """A summary for each subject and cell.

    Args:
        waves: of all subjects; not empty.
        subjects: their names, in the order wanted.
        reference: the subject whose waves the ratios are to, round by round.
    """
    cells = dict.fromkeys(wave.cell for wave in waves)
    summaries = []
    for subject, cell in itertools.product(subjects, cells):
        own = [w for w in waves if (w.subject, w.cell) == (subject, cell)]
        summary = _summary(own)
        if reference is not None:
            theirs = [w for w in waves if (w.subject, w.cell) == (reference, cell)]
            summary = _with_ratios(summary, own, theirs)
        summaries.append(summary)
    return summaries


def _summary(waves: Sequence[Wave]) -> Summary:
    answers = [answer for wave in waves for answer in wave.answers]
    rates = [wave.rate for wave in waves]
    gaps, tokens = _gaps(answers)
    itl = percentiles(gaps / tokens, (50, 95, 99), weights=tokens)
    gap = percentiles(gaps, (50, 95, 99))
    ttft = percentiles(_known(a.ttft for a in answers), (50, 95))
    assert ttft[0] is not None and ttft[1] is not None, "a wave has text"
    return Summary(
        subject=waves[0].subject,
        prompts=waves[0].cell.kind,
        concurrency=waves[0].cell.concurrency,
        rounds=len(waves),
        answers=len(answers),
        prompt_tokens=_median(a.prompt_tokens for a in answers),
        tokens=sum(a.num_tokens for a in answers),
        split=max((a.split for a in answers), key=list(Split).index),
        tokens_per_chunk=sum(a.num_tokens for a in answers) / sum(a.num_events for a in answers),
        rate=float(np.median(rates)),
        rate_min=min(rates),
        rate_max=max(rates),
        request_rate=_median(a.decoding_rate for a in answers),
        ttft_p50=ttft[0],
        ttft_p95=ttft[1],
        itl_p50=itl[0],
        itl_p95=itl[1],
        itl_p99=itl[2],
        gap_p50=gap[0],
        gap_p95=gap[1],
        gap_p99=gap[2],
        num_drafts=sum(a.num_drafts for a in answers),
        num_accepted=sum(a.num_accepted for a in answers),
        retries=sum(a.retries for a in answers),
    )


def _gaps(answers: Iterable[Answer]) -> tuple[np.ndarray, np.ndarray]:
    """All chunk gaps, and the tokens in the chunk at the end of each."""
    pairs = [pair for a in answers for pair in zip(a.gaps, a.tokens[1:], strict=True)]
    gaps, tokens = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return gaps, tokens


def percentiles(
    values: np.ndarray, wanted: Sequence[int], weights: np.ndarray | None = None
) -> list[float | None]:
    """Percentiles; None for each of no values.

    Args:
        values: any number, [N].
        wanted: 0 to 100.
        weights: how often each value counts, [N]. With weights a percentile is one of the values;
            without, numpy interpolates between two.
    """
    if not len(values):
        return [None] * len(wanted)
    if weights is None:
        found = np.percentile(values, wanted)
    else:
        found = np.percentile(values, wanted, weights=weights, method="inverted_cdf")
    return [float(value) for value in found]


def ratios(
    own: Sequence[Wave], theirs: Sequence[Wave], value: Callable[[Wave], float | None]
) -> list[float]:
    """Of one subject's waves to another's of the same round, where both have the value."""
    by_round = {wave.round: value(wave) for wave in theirs}
    pairs = [(value(wave), by_round.get(wave.round)) for wave in own]
    return [mine / other for mine, other in pairs if mine is not None and other]


def _with_ratios(summary: Summary, own: Sequence[Wave], theirs: Sequence[Wave]) -> Summary:
    rate = ratios(own, theirs, lambda wave: wave.rate)
    ttft = ratios(own, theirs, lambda wave: _median(a.ttft for a in wave.answers))
    return replace(
        summary,
        rate_ratio=_median(rate),
        rate_ratio_min=min(rate, default=None),
        rate_ratio_max=max(rate, default=None),
        ttft_ratio=_median(ttft),
        ttft_ratio_min=min(ttft, default=None),
        ttft_ratio_max=max(ttft, default=None),
    )


def _known(values: Iterable[float | None]) -> np.ndarray:
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _median(values: Iterable[float | None]) -> float | None:
    return percentiles(_known(values), (50,))[0]
