#!/usr/bin/env python
"""Measure a demo model's checkpoint by this project's engine (or by PyTorch), beside PyTorch's own.

python scripts/evaluate_demo_model.py mlx_mtp/demo --readme mlx_mtp/demo/README.md

The figures go into the checkpoint's metrics.json. Exit status 1: the engine's differ from PyTorch's
by more than 2%.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

_BEGUN = time.monotonic()
_SHORT = 512
"""Tokens of the longest prompt that is written for tests."""


def log(line: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.monotonic() - _BEGUN:7.1f} s] {line}", flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("checkpoint", type=Path, help="directory that train_demo_model.py wrote")
    out.add_argument("--backend", choices=("engine", "torch"), default="engine")
    out.add_argument("--device", choices=("cuda", "cpu"), default="cpu", help="of PyTorch")
    out.add_argument(
        "--per-task",
        type=int,
        help="held-out questions of each task (default: as many as PyTorch was asked, or 32)",
    )
    out.add_argument(
        "--recall", type=int, help="texts of each length to find something in (default: --per-task)"
    )
    out.add_argument("--readme", type=Path, help="file whose table of figures is written anew")
    out.add_argument(
        "--prompts",
        type=Path,
        help="only write --per-task held-out prompts of each task, as `prompts` of this JSON file",
    )
    out.add_argument("--smoke", action="store_true", help="short answers, for a test of the way")
    return out


def main() -> int:
    """Exit status."""
    command_line = parser()
    arguments = command_line.parse_args()
    if arguments.per_task is not None and arguments.per_task < 1:
        command_line.error("--per-task is 1 or more")
    if arguments.smoke and arguments.recall is not None:
        command_line.error("--smoke hides one thing in a text of 64 tokens: leave out --recall")
    from demo_model import evaluate, report

    config = evaluate.config_of(arguments.checkpoint)
    if arguments.prompts is not None:
        return write_prompts(arguments)
    file = arguments.checkpoint / "metrics.json"
    metrics: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    asked_before = metrics["evaluation"].get("torch", {}).get("per_task", 32)
    per_task = arguments.per_task or asked_before
    asked = evaluate.settings_of(per_task, arguments.recall, arguments.smoke)
    if arguments.backend == "torch":
        figures = evaluate.measure_with_torch(
            arguments.checkpoint, config, arguments.device, asked, log
        )
    else:
        from mlx_mtp import backend

        backend.prepare()
        figures = evaluate.measure_with_engine(arguments.checkpoint, config, asked, log)
    metrics["evaluation"][arguments.backend] = figures
    file.write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    written = report.table(metrics["evaluation"])
    print(written)
    if arguments.readme is not None:
        text = arguments.readme.read_text(encoding="utf-8")
        arguments.readme.write_text(report.put_into(text, written), encoding="utf-8")
    return compare(metrics["evaluation"])


def compare(evaluation: dict[str, Any]) -> int:
    """1 if both sets of figures are there and differ."""
    from demo_model import report

    missing = [title for name, title in report.SOURCES.items() if name not in evaluation]
    if missing:
        log(f"not compared: no figures by {missing[0]} yet (--backend)")
        return 0
    found = report.disagreements(evaluation["torch"], evaluation["engine"])
    for line in found:
        log(f"they disagree: {line}")
    return 1 if found else 0


def write_prompts(arguments: argparse.Namespace) -> int:
    """Held-out prompts, all tasks in turn, with right answers: for the tests of the server."""
    from demo_model import evaluate
    from demo_model.chat import END, prompt_text, segments
    from demo_model.held_out import questions
    from demo_model.tokenizer import load

    config = evaluate.config_of(arguments.checkpoint)
    generator = evaluate.generator_of(arguments.checkpoint)
    found = questions(load(), config.tool_format, arguments.per_task or 32, generator)
    # A test computes each several times, without any speculation too.
    found = [question for question in found if len(question.prompt) <= _SHORT]
    seen: dict[str, int] = {}
    turns = []
    for question in found:
        turns.append(seen.get(question.task, 0))
        seen[question.task] = turns[-1] + 1
    in_turn = [q for _, q in sorted(zip(turns, found), key=lambda pair: pair[0])]
    prompts = [
        {
            "task": question.task,
            "prompt": prompt_text(question.chat, config.tool_format),
            "answer": segments(question.chat, config.tool_format)[-1][0].removesuffix(END),
        }
        for question in in_turn
    ]
    file: Path = arguments.prompts
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    content["prompts"] = prompts
    text = json.dumps(content, indent=0, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
    log(f"wrote {len(prompts)} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
