"""The table of figures, and whether PyTorch's and the engine's agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from demo_model.acceptance import DEPTH
from demo_model.evaluation import ALL, CLOSED, OPEN, TEMPERATURES

TOLERANCE = 0.02
GOAL, WORST = 0.98, 0.9
OPEN_ACCEPTANCE = (0.75, 0.9)
GROUPS = (OPEN, CLOSED, ALL)
SOURCES = {"torch": "PyTorch", "engine": "engine"}
BEGIN, END = (
    "<!-- figures: written by scripts/evaluate_demo_model.py -->",
    "<!-- end of figures -->",
)

Figures = Mapping[str, Any]


def table(evaluation: Mapping[str, Figures]) -> str:
    """Markdown: each task's exact match and acceptance, by each source that there is.

    Args:
        evaluation: figures by source, a key of `SOURCES`.
    """
    sources = [(title, evaluation[name]) for name, title in SOURCES.items() if name in evaluation]
    head = ["task"]
    for title, _ in sources:
        head.append(f"exact ({title})")
        for name in TEMPERATURES:
            head += [f"{name}: depth 1, 2, 3", "tokens a step"]
    lines = [_row(head), _row(["---"] * len(head))]
    tasks = sources[0][1]["tasks"]
    for task in [*sorted(set(tasks) - set(GROUPS)), *(g for g in GROUPS if g in tasks)]:
        cells = [f"**{task}**" if task in GROUPS else task]
        for _, figures in sources:
            found = figures["tasks"].get(task, {})
            cells.append(f"{found['exact']:.3f}" if found else "-")
            for name in TEMPERATURES:
                cells += _cells(found.get(name))
        lines.append(_row(cells))
    for title, figures in sources:
        if figures["recall"]:
            lines += ["", _recall(title, figures["recall"])]
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(figures: Figures | None) -> list[str]:
    if figures is None:
        return ["-", "-"]
    rates = " ".join(f"{figures[f'depth_{depth}']:.3f}" for depth in range(1, DEPTH + 1))
    return [rates, f"{figures['tokens_per_step']:.2f}"]


def _recall(title: str, recall: Mapping[str, float]) -> str:
    held = ", ".join(f"{share:.3f} at {length}" for length, share in recall.items())
    return f"Something hidden in a text of so many tokens is found ({title}): {held}."


def disagreements(torch: Figures, engine: Figures) -> list[str]:
    """Where the two differ by more than `TOLERANCE`, for all tasks, the open and the closed ones.

    Compared are exact match, tokens a step, and greedy acceptance at each depth. Sampled answers
    are drawn with other random numbers, so that of them only tokens a step are.
    """
    asked = [{t: f["count"] for t, f in each["tasks"].items()} for each in (torch, engine)]
    if asked[0] != asked[1]:
        return ["they were not asked the same: measure both again"]
    out = []
    for group in GROUPS:
        if group not in torch["tasks"]:
            continue
        ours, theirs = _compared(torch["tasks"][group]), _compared(engine["tasks"][group])
        for what, a in ours.items():
            b = theirs[what]
            if abs(a - b) > TOLERANCE * max(a, b):
                out.append(f"{group}, {what}: {a:.4f} by PyTorch, {b:.4f} by the engine")
    return out


def _compared(figures: Figures) -> dict[str, float]:
    out = {"exact": figures["exact"]}
    for name in TEMPERATURES:
        out[f"{name}, tokens a step"] = figures[name]["tokens_per_step"]
    for depth in range(1, DEPTH + 1):
        out[f"greedy, depth {depth}"] = figures["greedy"][f"depth_{depth}"]
    return out


def shortcomings(torch: Figures) -> list[str]:
    """Which of the model's goals it misses."""
    tasks = torch["tasks"]
    out = []
    mean = tasks[ALL]["exact"]
    if mean < GOAL:
        out.append(f"exact match is {mean:.3f} on average; the goal is {GOAL}")
    for task, figures in sorted(tasks.items()):
        if task not in GROUPS and figures["exact"] < WORST:
            out.append(f"{task}: exact match is {figures['exact']:.3f}; the least is {WORST}")
    if OPEN in tasks:
        greedy = tasks[OPEN]["greedy"]
        low, high = OPEN_ACCEPTANCE
        if not low <= greedy["depth_1"] <= high:
            out.append(
                f"open text is accepted at {greedy['depth_1']:.3f} (depth 1, greedy); "
                f"{low} to {high} is wanted: see --distill and --lean"
            )
        if greedy["depth_3"] > greedy["depth_1"]:
            out.append("open text's acceptance does not fall with depth")
    return out


def put_into(text: str, figures: str) -> str:
    """A README with its figures replaced.

    Raises:
        ValueError: it has no place for them.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README has no lines {BEGIN!r} and {END!r} to write between")
    return f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}"
