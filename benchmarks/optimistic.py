"""What optimistic acceptance gives and breaks, on held-out prompts of the bundled model's tasks."""

import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from benchmarks import Rows, row
from demo_model.evaluate import config_of, generator_of
from demo_model.held_out import MAX_NEW_TOKENS, answer_text, questions
from demo_model.mixture import OPEN_TASKS
from demo_model.tokenizer import load
from mlx_mtp.bench.measure import Asking
from mlx_mtp.bench.offline import EngineSubject
from mlx_mtp.bench.prompts import Prompt
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.build import build_engine
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.server.tokenizer import Tokenizer

_SHARES = (0.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.01)


def optimistic(
    per_task: int = 2, depth: int = 3, rows: int = 16, temperatures: tuple[float, ...] = (0.0, 1.0)
) -> Rows:
    """What optimistic acceptance gives and breaks, on held-out prompts of the bundled model.

    The engine answers the same prompts with each share X of `--mtp-optimistic`, the head drafting;
    answers are judged as in scripts/evaluate_demo_model.py: "open text" and "closed tasks" are
    exact match. "as plain" is the share of answers that are token for token those without it,
    "optimistic" that of tokens which are drafts in place of others, "speed" tokens per second of
    processor time over those without it. Answers at a temperature are judged alike, so they are
    less often right without it too.

    Args:
        per_task: prompts of each task
        depth: drafts a step
        rows: answers at once
    """
    tokenizer, form = load(), config_of(BUNDLED_MODEL).tool_format
    held_out = questions(tokenizer, form, per_task, generator_of(BUNDLED_MODEL))
    model = load_model(BUNDLED_MODEL, enable_mtp=True)
    config = EngineConfig(depth, max_num_seqs=rows)
    engine = build_engine(model, config, tokenizer.get_vocab_size(), model.eos_token_ids)
    subject = EngineSubject("", engine, Tokenizer.load(BUNDLED_MODEL), Asking())
    with subject:
        subject.ask([Prompt("Say hello.", seed=0)] * rows)  # The first steps of a batch are slow.
        for temperature in temperatures:
            plain, plain_rate = list[tuple[int, ...]](), 0.0
            for share in _SHARES:
                given: dict[str, Any] = {"temperature": temperature, "optimistic": share}
                began = time.process_time()
                answers = subject.run(
                    [
                        (question.prompt, SamplingParams(MAX_NEW_TOKENS, seed=number, **given))
                        for number, question in enumerate(held_out)
                    ]
                )
                seconds = time.process_time() - began
                outputs = [[out for out in outs if out.token_ids] for _, outs in answers]
                tokens = [tuple(t for out in outs for t in out.token_ids) for outs in outputs]
                count, steps = sum(map(len, tokens)), sum(len(outs) - 1 for outs in outputs)
                plain, plain_rate = plain or tokens, plain_rate or count / seconds
                right: dict[str, list[bool]] = defaultdict(list)
                for question, each in zip(held_out, tokens):
                    right[question.task].append(question.right(answer_text(tokenizer, [*each])))
                exact = {True: list[float](), False: list[float]()}
                for task, judged in right.items():
                    exact[task in OPEN_TASKS].append(statistics.mean(judged))
                drafts = sum(len(out.optimistic) for outs in outputs for out in outs)
                figures = [statistics.mean(exact[is_open]) for is_open in (True, False)]
                figures += [statistics.mean(a == b for a, b in zip(tokens, plain))]
                figures += [drafts / count, (count - len(tokens)) / steps]
                names = "temperature | X | open text | closed tasks | as plain | optimistic"
                names += " | tokens a step | speed"
                yield row(names, temperature, share, *figures, count / seconds / plain_rate)
    yield f"{len(held_out)} prompts of {len({q.task for q in held_out})} tasks"
