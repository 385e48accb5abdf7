"""What optimistic acceptance gives and breaks, on held-out prompts of the bundled model's tasks.

The engine answers the same prompts with each share X of `--mtp-optimistic`, the head drafting;
answers are judged as in scripts/evaluate_demo_model.py. "as plain" is the share of answers that are
token for token those without it, "optimistic" that of tokens which are drafts in place of others.
Answers at a temperature are judged alike, so they are less often right without it too.

    python -m benchmarks.optimistic [--per-task 2] [--depth 3] [--rows 16] [--temperatures 0 1]
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mlx_mtp import backend

BACKEND = backend.prepare()
sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from demo_model.evaluate import config_of, generator_of
from demo_model.held_out import MAX_NEW_TOKENS, Question, answer_text, questions
from demo_model.mixture import OPEN_TASKS
from demo_model.tokenizer import load
from mlx_mtp.bench.report import render
from mlx_mtp.build import build_engine, run_requests
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.engine import Engine
from mlx_mtp.engine.request import Request
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.sampling.params import SamplingParams

SHARES = (0.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.01)
HEADINGS = ["X", "open text", "closed tasks", "as plain", "optimistic", "tokens a step", "speed"]


class Answers(NamedTuple):
    """To all prompts: their tokens, and counts over all of them."""

    tokens: list[tuple[int, ...]]
    steps: int  # after the first token of each
    optimistic: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second of processor time."""
        return sum(map(len, self.tokens)) / self.seconds


def main() -> None:
    """Measure and print a table for each temperature."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--per-task", type=int, default=2)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    given = parser.parse_args()
    tokenizer, path = load(), BUNDLED_MODEL
    form = config_of(path).tool_format
    asked = questions(tokenizer, form, given.per_task, generator_of(path))
    config = EngineConfig(given.depth, max_num_seqs=given.rows)
    model = load_model(path, enable_mtp=True)
    engine = build_engine(model, config, tokenizer.get_vocab_size(), model.eos_token_ids)
    ask(engine, asked[: given.rows], 0.0, 0.0)
    for temperature in given.temperatures:
        found = {share: ask(engine, asked, temperature, share) for share in SHARES}
        print(f"\ntemperature {temperature:g}\n\n{table(tokenizer, asked, found)}", flush=True)
    engine.stop()
    tasks = len({question.task for question in asked})
    print(
        f"\n{len(asked)} prompts of {tasks} tasks, k = {given.depth}, {given.rows} rows, {BACKEND}"
    )


def ask(engine: Engine, asked: Sequence[Question], temperature: float, share: float) -> Answers:
    """Answer all prompts, as many at once as the engine takes."""
    requests = [
        Request(
            str(number),
            question.prompt,
            SamplingParams(MAX_NEW_TOKENS, temperature=temperature, seed=number, optimistic=share),
        )
        for number, question in enumerate(asked)
    ]
    began, tokens = time.process_time(), [list[int]() for _ in asked]
    steps = optimistic = 0
    for _, output in run_requests(engine, requests):
        own = tokens[int(output.request_id)]
        steps += bool(own and output.token_ids)
        own += output.token_ids
        optimistic += len(output.optimistic)
    return Answers(list(map(tuple, tokens)), steps, optimistic, time.process_time() - began)


def table(tokenizer: object, asked: Sequence[Question], found: Mapping[float, Answers]) -> str:
    """A row for each share; a group's exact match is the mean of its tasks'."""
    plain, rows = found[0.0], []
    for share, answers in found.items():
        right: dict[str, list[bool]] = {}
        for question, tokens in zip(asked, answers.tokens):
            is_right = question.right(answer_text(tokenizer, list(tokens)))
            right.setdefault(question.task, []).append(is_right)
        means = {task: sum(each) / len(each) for task, each in right.items()}
        exact = [
            [mean for task, mean in means.items() if (task in OPEN_TASKS) == is_open]
            for is_open in (True, False)
        ]
        same = sum(a == b for a, b in zip(answers.tokens, plain.tokens)) / len(asked)
        count = sum(map(len, answers.tokens))
        rows.append(
            [
                f"{share:g}" if share else "off",
                *(f"{sum(each) / len(each):.3f}" for each in exact),
                f"{same:.3f}",
                f"{answers.optimistic / count:.2%}",
                f"{(count - len(asked)) / answers.steps:.2f}",
                f"{answers.rate / plain.rate:.2f}",
            ]
        )
    return render(HEADINGS, rows)


if __name__ == "__main__":
    main()
