"""A model's figures: how often it is right, and how often its drafts are accepted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from demo_model.acceptance import Windows
from demo_model.held_out import (
    MAX_NEW_TOKENS,
    RECALL_LENGTHS,
    Question,
    answer_text,
    questions,
    recall_questions,
)
from demo_model.mixture import OPEN_TASKS, Settings
from demo_model.network.config import ModelConfig

TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
OPEN, CLOSED, ALL = "open text", "closed tasks", "all"


@dataclass(frozen=True)
class Answered:
    """What a backend made of a prompt.

    Args:
        tokens: of the answer, its end token included.
        windows: of the speculative decoder.
    """

    tokens: list[int]
    windows: Windows


Backend = Callable[[Sequence[Sequence[int]], float], list[Answered]]
"""Answers to prompts at a temperature, in their order."""
Log = Callable[[str], None]


@dataclass(frozen=True)
class EvaluationSettings:
    """How much is asked.

    Args:
        per_task: questions of each task.
        per_length: texts of each length that something is hidden in; 0: none.
        lengths: of these.
        max_new_tokens: of an answer.
    """

    per_task: int = 32
    per_length: int = 32
    lengths: tuple[int, ...] = RECALL_LENGTHS
    max_new_tokens: int = MAX_NEW_TOKENS


def evaluate(
    backend: Backend,
    tokenizer: Any,
    config: ModelConfig,
    settings: EvaluationSettings,
    generator: Settings,
    log: Log,
) -> dict[str, Any]:
    """Ask all tasks' held-out questions, greedily and at temperature 1, and the recall lengths."""
    asked = questions(tokenizer, config.tool_format, settings.per_task, generator)
    log(f"{len(asked)} held-out questions of {len({q.task for q in asked})} tasks")
    tasks: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, temperature in TEMPERATURES.items():
        answered = backend([question.prompt for question in asked], temperature)
        if name == "greedy":
            _judge(tokenizer, asked, answered, tasks)
        for task, windows in _by_task(asked, answered).items():
            tasks[task][name] = windows.figures()
        for group in (OPEN, CLOSED):
            if group in tasks:
                log(f"{name}, {group}: {tasks[group][name]}")
        if name == "greedy":
            weak = (
                f"{task} {found['exact']}" for task, found in tasks.items() if found["exact"] < 0.97
            )
            log(f"exact: {', '.join(weak)}")
    recall = {}
    for length in settings.lengths if settings.per_length else ():
        hidden = recall_questions(tokenizer, config.tool_format, length, settings.per_length)
        found = backend([question.prompt for question in hidden], 0.0)
        right = [q.right(answer_text(tokenizer, a.tokens)) for q, a in zip(hidden, found)]
        recall[str(length)] = round(sum(right) / len(right), 4)
        log(f"recall at {length} tokens: {recall[str(length)]:.3f}")
    return {"per_task": settings.per_task, "tasks": dict(tasks), "recall": recall}


def groups(task: str) -> tuple[str, ...]:
    """The rows of the table that a task counts in."""
    return task, OPEN if task in OPEN_TASKS else CLOSED, ALL


def _judge(
    tokenizer: Any,
    asked: Sequence[Question],
    answered: Sequence[Answered],
    tasks: dict[str, dict[str, Any]],
) -> None:
    right: dict[str, list[bool]] = defaultdict(list)
    for question, answer in zip(asked, answered):
        text = answer_text(tokenizer, answer.tokens)
        is_right = question.right(text)
        right[question.task].append(is_right)
        examples = tasks[question.task].setdefault("wrong", [])
        if not is_right and len(examples) < 2:
            ending = question.chat.messages[-2]["content"][-200:]
            examples.append({"asked": ending, "wanted": _wanted(question), "got": text[:400]})
    shares = {task: sum(each) / len(each) for task, each in right.items()}
    for task, each in right.items():
        tasks[task] |= {"count": len(each), "exact": round(shares[task], 4)}
    # A group's figure is the mean over its tasks, however many questions each has.
    for group in (OPEN, CLOSED, ALL):
        inside = [share for task, share in shares.items() if group in groups(task)]
        count = sum(len(each) for task, each in right.items() if group in groups(task))
        if inside:
            tasks[group] |= {"count": count, "exact": round(sum(inside) / len(inside), 4)}


def _wanted(question: Question) -> str:
    last = question.chat.messages[-1]
    return str(last["content"] or last.get("tool_calls"))[:400]


def _by_task(asked: Sequence[Question], answered: Sequence[Answered]) -> dict[str, Windows]:
    out: dict[str, Windows] = defaultdict(Windows)
    for question, answer in zip(asked, answered):
        for group in groups(question.task):
            out[group].add(answer.windows)
    return out
