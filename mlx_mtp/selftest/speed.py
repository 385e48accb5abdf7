"""Tokens per second with MTP off and on, as much of it as the time allows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_mtp.bench.answer import Answer
from mlx_mtp.bench.offline import OFF, ChatTokenizer, EngineSubject
from mlx_mtp.bench.prompts import Prompt
from mlx_mtp.bench.runs import Cell, Order, Wave, measure
from mlx_mtp.bench.stats import Summary, summarize
from mlx_mtp.engine.request import Request
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.selftest.budget import Budget

ROWS = (1, 4)
_KIND = "story"
_MOST_TOKENS, _FEWEST_TOKENS = 64, 16
_MOST_ROUNDS = 3
_ROW_COST = 2.5
"""Of 4 rows beside 1, where nothing is known yet; a server's CPU has about this."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured.

    Args:
        summaries: of each engine in each cell, with ratios to MTP off.
        max_tokens: length of every answer.
        rounds: measured.
        skipped: what was left out, in words.
    """

    summaries: tuple[Summary, ...]
    max_tokens: int
    rounds: int
    skipped: tuple[str, ...]


class _OfLength:
    """An engine whose answers all have one length.

    Args:
        subject: the engine.
        tokenizer: its model's.
        max_tokens: the length.
    """

    _numbers = itertools.count()

    def __init__(self, subject: EngineSubject, tokenizer: ChatTokenizer, max_tokens: int) -> None:
        self.name = subject.name
        self._subject = subject
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def ask(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """See `Subject`."""
        sampling = SamplingParams(max_tokens=self._max_tokens, temperature=0.0, ignore_eos=True)
        encoded = [
            self._tokenizer.encode_chat([{"role": "user", "content": p.text}]) for p in prompts
        ]
        requests = [Request(f"speed-{next(self._numbers)}", ids, sampling) for ids in encoded]
        return self._subject.answers(requests)


def measure_speed(
    subjects: Sequence[EngineSubject],
    tokenizer: ChatTokenizer,
    budget: Budget,
    plain_rate: float,
) -> Speed:
    """Ask all of them the same in turns, in up to three rounds.

    Args:
        subjects: the first is MTP off.
        tokenizer: their model's.
        budget: the time there is.
        plain_rate: tokens per second of plain decoding, as seen so far.
    """
    cost = len(subjects) / plain_rate  # of a token in each, one row
    rows: tuple[int, ...] = ROWS
    tokens = int(budget.left() / (cost * (1 + _ROW_COST)))
    skipped = []
    if tokens < _FEWEST_TOKENS:
        rows, tokens = ROWS[:1], int(budget.left() / cost)
        skipped.append(f"speed at {ROWS[1]} rows (no time left)")
    if tokens < _FEWEST_TOKENS:
        return Speed((), 0, 0, ("speed (no time left)",))
    tokens = min(tokens, _MOST_TOKENS)
    timed = [_OfLength(subject, tokenizer, tokens) for subject in subjects]
    cells = tuple(Cell(_KIND, n) for n in rows)
    waves: list[Wave] = []
    rounds = 0
    lasted = 0.0
    while rounds < _MOST_ROUNDS and lasted <= budget.left():
        began = budget.spent()
        order = Order(cells, rounds=1, warmups=0, seed=rounds)
        turned = [*timed[rounds % len(timed) :], *timed[: rounds % len(timed)]]
        waves += [dataclasses.replace(w, round=rounds) for w in measure(turned, order)]
        lasted = budget.spent() - began
        rounds += 1
    if rounds < _MOST_ROUNDS:
        skipped.append(f"{_MOST_ROUNDS - rounds} of {_MOST_ROUNDS} rounds of speed")
    summaries = summarize(waves, [subject.name for subject in subjects], OFF)
    return Speed(tuple(summaries), tokens, rounds, tuple(skipped))
