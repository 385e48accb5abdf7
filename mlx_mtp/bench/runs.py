"""The order of a measurement: who is asked what, and when. No HTTP and no model here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mlx_mtp.bench.answer import Answer
from mlx_mtp.bench.prompts import Prompt, PromptSource
from mlx_mtp.errors import BenchError


@dataclass(frozen=True, slots=True)
class Asking:
    """How every answer of a run is asked for.

    Args:
        max_tokens: of an answer.
        temperature: 0 is greedy; above it each prompt brings its seed.
        ignore_eos: go on to `max_tokens`; not every server knows it.
        timeout: seconds of silence after which a server is given up.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    timeout: float = 600.0


class Subject(Protocol):
    """What is measured: a server, or an engine with its settings."""

    @property
    def name(self) -> str:
        """In tables."""

    def ask(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Ask all of them at once; returns when the last answer has ended."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of a table: what is asked, and how many at once."""

    kind: str
    concurrency: int


@dataclass(frozen=True, slots=True)
class Wave:
    """Prompts that were asked at once, and their answers.

    Args:
        subject: who was asked, by name.
        cell: what.
        round: from 0.
        answers: one per prompt.
    """

    subject: str
    cell: Cell
    round: int
    answers: tuple[Answer, ...]

    @property
    def rate(self) -> float:
        """Tokens per second of all answers, from the first request to the last answer's end."""
        began = min(answer.sent for answer in self.answers)
        ended = max(answer.ended for answer in self.answers)
        return sum(answer.num_tokens for answer in self.answers) / (ended - began)


@dataclass(frozen=True, slots=True)
class Order:
    """How often everything is done.

    Args:
        cells: what to measure.
        rounds: waves that count, for each subject and cell.
        warmups: waves before them that don't.
        seed: of the prompts.
    """

    cells: tuple[Cell, ...]
    rounds: int
    warmups: int
    seed: int


def measure(
    subjects: Sequence[Subject], order: Order, tell: Callable[[str], None] = lambda _: None
) -> list[Wave]:
    """Ask every subject the same, in turns, so that a machine that slows down slows them all.

    Who comes first in a cell changes from round to round.

    Args:
        subjects: with different names.
        order: what is asked, and how often.
        tell: called before each wave, for those who wait.

    Raises:
        BenchError: a subject failed, or gave not one token of text.
    """
    source = PromptSource(order.seed)
    waves: list[Wave] = []
    for number in range(-order.warmups, order.rounds):
        for place, cell in enumerate(order.cells):
            prompts = source.next(cell.kind, cell.concurrency)
            first = (number + place) % len(subjects)
            for subject in (*subjects[first:], *subjects[:first]):
                tell(_line(number, order, cell, subject))
                answers = tuple(subject.ask(prompts))
                if not any(answer.times for answer in answers):
                    raise BenchError(f"{subject.name} gave an empty answer to every prompt.")
                if number >= 0:
                    waves.append(Wave(subject.name, cell, number, answers))
    return waves


def _line(number: int, order: Order, cell: Cell, subject: Subject) -> str:
    stage = "warming up" if number < 0 else f"round {number + 1} of {order.rounds}"
    return f"{stage}: {cell.kind}, {cell.concurrency} at once, {subject.name}"
