"""Default drafts beside fixed choices on models of full shape, which replay known answers."""

import contextlib
import itertools
import random
import statistics
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from benchmarks import Rows, row
from benchmarks.calibrated import Watch, of_steps, watched
from benchmarks.cores import TellingDrafter, telling
from benchmarks.shapes import build, shape_of
from mlx_mtp.bench.measure import Asking
from mlx_mtp.bench.offline import EngineSubject
from mlx_mtp.build import build_engine
from mlx_mtp.config import EngineConfig
from mlx_mtp.sampling.params import SamplingParams

_DEFAULT, _NONE = "default", "none"
# Sources of drafts, and the number of the head's.
_CHOICES: dict[str, tuple[str, Any]] = {
    _DEFAULT: ("mtp,copy", "auto"),
    _NONE: ("none", 0),
    "mtp 1": ("mtp", 1),
    "mtp 3": ("mtp", 3),
    "copy": ("copy", "auto"),
}
_PROMPT = 64  # tokens of a prompt
_PASSAGES, _PASSAGE = 12, 40  # number and length of the passages of answers that repeat
_CHANGED = 0.3  # probability that a passage ends early, with a token of its own
_WARM = 2  # rounds that are not measured, as they compile kernels


def replayed(
    shape: str = "Qwen3.5-27B",
    layers: int = 0,
    tiny: bool = False,
    rows: tuple[int, ...] = (1, 4, 16),
    rounds: int = 6,
    tokens: int = 120,
    rate: float = 0.75,
    calibration_seconds: float = 120.0,
    seed: int = 0,
) -> Rows:
    """Default drafts beside fixed choices on a GPU, and what its steps should cost and took.

    The engines compute every step of a model with random weights. Sampled tokens are replaced by
    known answers, and the head's drafts by right ones at a given rate; the copied drafts are the
    engine's own. Answers are new, random tokens, or repeat passages of each other. The engines take
    turns in random order; ratios are medians over the rounds. Costs of the default's steps are
    relative to a step without drafts; measured ones are scaled as in `calibrated`.

    Args:
        rows: numbers of concurrent requests
        tokens: tokens of an answer
        rate: share of the head's drafts that are right
        calibration_seconds: maximum time to measure step costs; on CUDA kernels are compiled, too
    """
    model, _ = build(shape_of(shape, layers, tiny))
    teller, watch, chance = TellingDrafter(model, [[0]], rate), Watch(), random.Random(seed)
    tokenizer: Any = SimpleNamespace(encode_chat=lambda _: (1,) * _PROMPT)
    passages = [_new(chance, _PASSAGE, model.vocab_size) for _ in range(_PASSAGES)]
    with telling(teller), watched(watch), contextlib.ExitStack() as stack:
        engines = {}
        for name, (drafts, k) in _CHOICES.items():
            seconds = calibration_seconds if k == "auto" else 0.0
            config = EngineConfig(k, max(rows), drafts=drafts, calibration_seconds=seconds)
            drafter = teller if "mtp" in drafts else None
            engine = build_engine(model, config, model.vocab_size, (0,), drafter=drafter)
            subject = EngineSubject(name, engine, tokenizer, Asking(tokens))
            engines[name] = stack.enter_context(subject)
        watch.steps.clear()
        for count, repeats in itertools.product(rows, (False, True)):
            speeds = defaultdict[str, list[float]](list)
            for number in range(-_WARM, rounds):
                prompts, answers = (
                    [_new(chance, size, model.vocab_size) for _ in range(count)]
                    for size in (_PROMPT, tokens)
                )
                if repeats:
                    answers = [_repeating(chance, passages, tokens) for _ in range(count)]
                teller.tell([[*prompt, *ids, 0] for prompt, ids in zip(prompts, answers)])
                for name in chance.sample([*engines], len(engines)):
                    before = len(watch.steps)
                    speed = _speed(engines[name], prompts, answers)
                    if number < 0 or name != _DEFAULT:
                        del watch.steps[before:]
                    if number >= 0:
                        speeds[name].append(speed)
            ratios = {
                name: statistics.median(a / b for a, b in zip(each, speeds[_NONE]))
                for name, each in speeds.items()
            }
            answer, plain = "repeats" if repeats else "new", statistics.median(speeds[_NONE])
            figures = count, answer, plain, *(ratios[name] for name in _CHOICES if name != _NONE)
            names = "rows | answers | none, tokens/s | default | mtp 1 | mtp 3 | copy"
            yield row(names, *figures)
    for point in of_steps(watch.steps):
        yield row("source | rows x tokens | steps | estimated | measured", *point)


def _speed(engine: EngineSubject, prompts: list[list[int]], answers: list[list[int]]) -> float:
    """Returns the tokens per second of requests that are sent together."""
    requests = [
        (tuple(prompt), SamplingParams(len(ids), temperature=0.0, ignore_eos=True, seed=number))
        for number, (prompt, ids) in enumerate(zip(prompts, answers))
    ]
    began = time.perf_counter()
    results = engine.ask_token_ids(requests)
    seconds = time.perf_counter() - began
    got = [[token for output in outputs for token in output.token_ids] for _, outputs in results]
    assert got == answers
    return sum(map(len, answers)) / seconds


def _new(chance: random.Random, count: int, vocab_size: int) -> list[int]:
    return [chance.randrange(1, vocab_size) for _ in range(count)]


def _repeating(chance: random.Random, passages: list[list[int]], count: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < count:
        passage = chance.choice(passages)
        ids += passage
        if chance.random() < _CHANGED:
            del ids[len(ids) - chance.randrange(1, len(passage)) :]
            ids.append(passage[0])
    return ids[:count]
