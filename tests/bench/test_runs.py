"""Who is asked what, and when; and the figures that come of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.bench.answer import Answer, Split
from mlx_mtp.bench.prompts import Prompt
from mlx_mtp.bench.runs import Cell, Order, Wave, measure
from mlx_mtp.bench.stats import percentiles, summarize
from mlx_mtp.errors import BenchError

CELLS = (Cell("short", 1), Cell("short", 4))


class Scripted:
    """Answers at once; notes what it was asked in a log that several share."""

    def __init__(self, name: str, log: list[tuple[str, tuple[str, ...]]], text: bool = True):
        self.name, self.log, self.text = name, log, text

    def ask(self, prompts: Sequence[Prompt]) -> list[Answer]:
        self.log.append((self.name, tuple(p.text for p in prompts)))
        return [make(0.0, [1.0, 2.0] if self.text else []) for _ in prompts]


def make(sent: float, times: Sequence[float], tokens: Sequence[float] = (), **more) -> Answer:
    """An answer whose chunks hold one token each, unless it is said how many."""
    tokens = tuple(tokens or [1.0] * len(times))
    fields = {
        "sent": sent,
        "ended": times[-1] if times else sent + 1,
        "times": tuple(times),
        "tokens": tokens,
        "num_tokens": int(sum(tokens)),
        "split": Split.SINGLE,
        "num_events": len(times),
    }
    return Answer(**fields | more)


def test_all_are_asked_the_same_in_turns():
    log: list[tuple[str, tuple[str, ...]]] = []
    subjects = [Scripted(name, log) for name in "ABC"]
    told: list[str] = []
    waves = measure(subjects, Order(CELLS, rounds=2, warmups=1, seed=7), told.append)
    assert len(log) == len(told) == 3 * 2 * 3
    turns = [log[i : i + 3] for i in range(0, len(log), 3)]
    for turn in turns:
        assert len({prompts for _, prompts in turn}) == 1
        assert sorted(name for name, _ in turn) == ["A", "B", "C"]
    # Whoever came first in a cell comes later in the next round.
    for place in range(2):
        firsts = [turns[2 * number + place][0][0] for number in range(3)]
        assert sorted(firsts) == ["A", "B", "C"]
    # No prompt is asked in two turns, and the warm-up doesn't count.
    texts = [text for turn in turns for text in turn[0][1]]
    assert len(set(texts)) == len(texts) == 3 * (1 + 4)
    assert len(waves) == 2 * 2 * 3
    assert {wave.round for wave in waves} == {0, 1}
    assert told[0].startswith("warming up: short, 1 at once, ")
    assert told[-1].startswith("round 2 of 2: short, 4 at once, ")


def test_a_subject_that_says_nothing_is_named():
    subjects = [Scripted("A", []), Scripted("B", [], text=False)]
    with pytest.raises(BenchError, match="B gave an empty answer"):
        measure(subjects, Order(CELLS, 1, 0, 7))


def test_the_figures_of_a_wave():
    answers = (
        make(10.0, [11.0, 11.5, 12.0], [1, 2, 1], prompt_tokens=20, num_drafts=4, num_accepted=1),
        make(10.0, [12.0, 14.0], [1, 3], prompt_tokens=30, num_drafts=4, num_accepted=3, retries=2),
    )
    (summary,) = summarize([Wave("S", Cell("short", 2), 0, answers)], ["S"])
    assert (summary.subject, summary.prompts, summary.concurrency) == ("S", "short", 2)
    assert (summary.rounds, summary.answers, summary.tokens) == (1, 2, 8)
    assert summary.rate == summary.rate_min == summary.rate_max == 8 / 4
    assert summary.ttft_p50 == 1.5
    assert summary.ttft_p95 == pytest.approx(1.95)
    assert summary.request_rate == (3.0 + 1.5) / 2
    assert summary.prompt_tokens == 25
    # Two tokens after 0.25 s each, one after 0.5 s, three after 2/3 s each.
    assert summary.itl_p50 == 0.5
    assert summary.itl_p95 == summary.itl_p99 == pytest.approx(2 / 3)
    assert summary.gap_p50 == 0.5
    assert summary.gap_p99 == pytest.approx(0.5 + 0.98 * 1.5)
    assert summary.tokens_per_chunk == 8 / 5
    assert summary.accepted == 0.5
    assert summary.retries == 2
    assert summary.rate_ratio is summary.ttft_ratio is None


def test_rounds_give_a_median_a_range_and_ratios_round_by_round():
    def wave(subject: str, number: int, seconds: float) -> Wave:
        return Wave(subject, Cell("short", 1), number, (make(0.0, [seconds / 2, seconds]),))

    mine, theirs = (1.0, 4.0, 2.0), (2.0, 2.0, 2.0)
    waves = [wave("A", i, s) for i, s in enumerate(theirs)]
    waves += [wave("B", i, s) for i, s in enumerate(mine)]
    b, a = summarize(waves, ["B", "A"], reference="A")
    assert (b.subject, a.subject) == ("B", "A")
    assert (b.rate, b.rate_min, b.rate_max) == (1.0, 0.5, 2.0)
    assert (b.rate_ratio, b.rate_ratio_min, b.rate_ratio_max) == (1.0, 0.5, 2.0)
    assert (b.ttft_ratio, b.ttft_ratio_min, b.ttft_ratio_max) == (1.0, 0.5, 2.0)
    assert a.rate_ratio == a.rate_ratio_min == a.ttft_ratio_max == 1.0


def test_the_worst_split_is_told():
    splits = (Split.TOLD, Split.TEXT, Split.SINGLE)
    answers = tuple(make(0.0, [1.0], split=split) for split in splits)
    (summary,) = summarize([Wave("S", Cell("short", 3), 0, answers)], ["S"])
    assert summary.split is Split.TEXT
    assert summary.itl_p50 is summary.gap_p99 is summary.request_rate is None


def test_answers_without_text_count_in_the_rate_alone():
    answers = (make(0.0, [1.0, 2.0]), make(0.0, [], num_tokens=1, ended=4.0))
    (summary,) = summarize([Wave("S", Cell("short", 2), 0, answers)], ["S"])
    assert summary.rate == 3 / 4
    assert summary.ttft_p95 == 1.0
    assert summary.answers == 2


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), min_size=1, max_size=30))
def test_weighted_percentiles_are_those_of_repeated_values(pairs):
    values, weights = map(np.array, zip(*pairs))
    repeated = np.repeat(values, weights)
    wanted = (0, 10, 50, 95, 99, 100)
    expected = [np.percentile(repeated, p, method="inverted_cdf") for p in wanted]
    assert percentiles(values, wanted, weights=weights.astype(float)) == expected


def test_percentiles_of_nothing():
    assert percentiles(np.array([]), (50, 95)) == [None, None]
    assert percentiles(np.array([]), (50,), weights=np.array([])) == [None]
