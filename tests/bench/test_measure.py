"""The order of the measured requests, and the figures computed from the answers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.bench.answer import Split, TimedAnswer
from mlx_mtp.bench.measure import Wave, measure, percentiles, summarize
from mlx_mtp.errors import BenchError

CELLS = (("short", 1), ("short", 4))


class Scripted:
    """A subject that answers immediately and records its prompts in a log shared by subjects."""

    def __init__(self, name, log, text=True):
        self.name, self.log, self.text = name, log, text

    def ask(self, prompts):
        self.log.append((self.name, tuple(p.text for p in prompts)))
        return [make(0.0, [1.0, 2.0] if self.text else []) for _ in prompts]


def make(sent, times, tokens=(), **more) -> TimedAnswer:
    """Returns an answer with one token per chunk unless `tokens` gives other counts."""
    tokens = tuple(tokens or [1.0] * len(times))
    fields = {"sent": sent, "ended": times[-1] if times else sent + 1, "times": tuple(times)}
    fields |= {"tokens": tokens, "num_tokens": int(sum(tokens)), "split": Split.SINGLE}
    return TimedAnswer(**fields | {"num_events": len(times)} | more)


def test_all_are_asked_the_same_in_turns(capsys):
    log = []
    waves = measure([Scripted(name, log) for name in "ABC"], CELLS, 2, 1, seed=7)
    assert len(log) == 3 * 2 * 3
    turns = [log[i : i + 3] for i in range(0, len(log), 3)]
    for turn in turns:
        assert len({prompts for _, prompts in turn}) == 1
        assert sorted(name for name, _ in turn) == ["A", "B", "C"]
    # In each cell, every subject goes first in one of the three rounds.
    for place in range(2):
        assert sorted(turns[2 * number + place][0][0] for number in range(3)) == ["A", "B", "C"]
    # No prompt is used in two turns, and the warm-up is not measured.
    texts = [text for turn in turns for text in turn[0][1]]
    assert len(set(texts)) == len(texts) == 3 * (1 + 4)
    assert len(waves) == 2 * 2 * 3
    assert {wave.round for wave in waves} == {0, 1}
    # Without a terminal, each request is reported on a line of its own.
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(log) and "\x1b" not in "".join(told)
    assert told[0].startswith("warming up: ") and told[-1].startswith("round 2 of 2: ")


def test_a_subject_that_says_nothing_is_named():
    subjects = [Scripted("A", []), Scripted("B", [], text=False)]
    with pytest.raises(BenchError, match="B gave an empty answer"):
        measure(subjects, CELLS, 1, 0, seed=7)


def test_a_round_that_would_not_end_in_time_is_not_begun(monkeypatch):
    now = iter([100.0, 103.0, 103.0, 106.5, 106.5])  # the clock before and after each round
    monkeypatch.setattr("mlx_mtp.bench.measure.perf_counter", lambda: next(now))
    waves = measure([Scripted("A", [])], [("short", 1)], 9, 0, seed=7, deadline=109.9)
    assert [wave.round for wave in waves] == [0, 1]


def wave(number, *answers, subject="S") -> Wave:
    return Wave(subject, "short", len(answers), number, answers)


def test_the_figures_of_a_wave():
    answers = (
        make(10.0, [11.0, 11.5, 12.0], [1, 2, 1], prompt_tokens=20, num_drafts=4, num_accepted=1),
        make(10.0, [12.0, 14.0], [1, 3], prompt_tokens=30, num_drafts=4, num_accepted=3, retries=2),
    )
    (summary,) = summarize([wave(0, *answers)], ["S"])
    expected = {"subject": "S", "prompts": "short", "concurrency": 2, "rounds": 1, "answers": 2}
    expected |= {"prompt_tokens": 25, "tokens": 8, "tokens_per_chunk": 8 / 5}
    expected |= {"split": Split.SINGLE, "retries": 2}
    expected |= {"rate": 8 / 4, "rate_min": 8 / 4, "rate_max": 8 / 4}
    expected |= {"request_rate": (3.0 + 1.5) / 2, "ttft_p50": 1.5, "ttft_p95": 1.95}
    # Two tokens after 0.25 s each, one after 0.5 s, and three after 2/3 s each.
    expected |= {"itl_p50": 0.5, "itl_p95": 2 / 3, "itl_p99": 2 / 3}
    expected |= {"gap_p50": 0.5, "gap_p95": 0.5 + 0.9 * 1.5, "gap_p99": 0.5 + 0.98 * 1.5}
    expected |= {"num_drafts": 8, "num_accepted": 4, "accepted": 0.5}
    ratios = {name: None for name in summary if "_ratio" in name}
    assert len(ratios) == 6
    assert summary == {
        name: pytest.approx(value) if isinstance(value, float) else value
        for name, value in (expected | ratios).items()
    }


def test_rounds_give_a_median_a_range_and_ratios_round_by_round():
    waves = []
    for name, seconds in (("A", (2.0, 4.0, 1.0)), ("B", (1.0, 4.0, 4.0))):
        waves += [wave(i, make(0.0, [s / 2, s]), subject=name) for i, s in enumerate(seconds)]
    b, a = summarize(waves, ["B", "A"], reference="A")
    assert (b["subject"], a["subject"]) == ("B", "A")
    for name, median, low, high in (
        ("rate", 0.5, 0.5, 2.0),
        ("rate_ratio", 1.0, 0.25, 2.0),
        ("ttft_ratio", 1.0, 0.5, 4.0),
    ):
        assert (b[name], b[f"{name}_min"], b[f"{name}_max"]) == (median, low, high)
    assert a["rate_ratio_min"] == a["ttft_ratio_max"] == 1.0
    # A time to first token of 0 s has no ratio.
    at_once = [wave(0, make(0.0, [0.0, 2.0]), subject="A")]
    (alone,) = summarize(at_once, ["A"], reference="A")
    assert (alone["rate_ratio"], alone["ttft_ratio"]) == (1.0, None)


def test_the_worst_split_is_shown_and_what_is_unknown_is_none():
    splits = (Split.TOLD, Split.TEXT, Split.SINGLE)
    (summary,) = summarize([wave(0, *(make(0.0, [1.0], split=split) for split in splits))], ["S"])
    assert summary["split"] is Split.TEXT
    for name in ("itl_p50", "gap_p99", "request_rate", "prompt_tokens", "accepted"):
        assert summary[name] is None
    # Answers without text count only in the rate.
    answers = (make(0.0, [1.0, 2.0]), make(0.0, [], num_tokens=1, ended=4.0))
    (summary,) = summarize([wave(0, *answers)], ["S"])
    assert (summary["rate"], summary["ttft_p95"], summary["answers"]) == (3 / 4, 1.0, 2)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), min_size=1, max_size=30))
def test_weighted_percentiles_are_those_of_repeated_values(pairs):
    values, weights = map(np.array, zip(*pairs))
    repeated = np.repeat(values, weights)
    wanted = (0, 10, 50, 95, 99, 100)
    expected = {f"x_p{p}": np.percentile(repeated, p, method="inverted_cdf") for p in wanted}
    assert percentiles("x", values, wanted, weights=weights.astype(float)) == expected
