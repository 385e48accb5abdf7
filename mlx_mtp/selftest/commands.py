"""The part of `mlx-mtp selftest` that runs engines: equality of tokens, acceptance and speed."""

import contextlib
from collections.abc import Sequence
from operator import eq
from time import perf_counter
from typing import NamedTuple

from mlx_mtp.bench.measure import Asking, measure, showing, summarize
from mlx_mtp.bench.offline import OFF, EngineSubject, engine_subject
from mlx_mtp.bench.prompts import PromptSource
from mlx_mtp.config import DraftTokens
from mlx_mtp.engine.request import RequestOutput
from mlx_mtp.errors import EngineError
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.selftest.report import Equality, Parting, Report
from mlx_mtp.text.tokenizer import Tokenizer

_DEPTHS: tuple[DraftTokens, ...] = (0, 1, 2, 3, "auto")
_AUTO_SHARE = 0.4  # share of the time that must be left for "auto", which calibrates first
_TIE = 1e-4  # log-probabilities closer than this can swap ranks in float32 with other shapes
_COMPARED_TOKENS = 48
_REFERENCE_SHARE, _FEWEST_REFERENCES = 0.15, 3
# Rows, and the assumed time of a step relative to a step of 1 row, about that of a server CPU.
_ROWS, _ROUNDS = {1: 1.0, 2: 1.6, 4: 2.5}, 3
_MOST_TIMED, _FEWEST_TIMED = 64, 16

# A prompt's token ids, and whether it is a chat: only chats say something about acceptance.
BuiltInPrompt = tuple[tuple[int, ...], bool]


class Reference(NamedTuple):
    """A plain greedy answer."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]  # log-probability of each token minus that of its runner-up


def check_engines(
    report: Report, model: LoadedModel, tokenizer: Tokenizer, seconds: float, began: float
) -> None:
    """Compare tokens, then measure speed, and add both to the report; stop if an engine fails.

    `seconds` is the time limit, counted from `began`, a time of `perf_counter`.
    """
    deadline, name, asking = began + seconds, OFF, Asking(max_tokens=8)
    prompts, expected, rate = built_in_prompts(tokenizer), list[Reference](), 0.0
    subjects: list[EngineSubject] = []
    with contextlib.ExitStack() as stack:
        try:
            for depth in _DEPTHS:
                subject = engine_subject(model, tokenizer, depth, asking, max_num_seqs=max(_ROWS))
                name = subject.name
                if depth == "auto" and deadline - perf_counter() <= _AUTO_SHARE * seconds:
                    report.skipped.append(f"{name} (no time left)")
                    continue
                with showing(f"selftest: {name} ..."):
                    subjects.append(stack.enter_context(subject))
                    if not expected:
                        expected, rate = references(subject, prompts, deadline)
                    if depth != "auto":
                        report.equality.append(compare(subject, prompts, expected, report.strict))
            if missing := len(prompts) - len(expected):
                report.skipped.insert(0, f"{missing} of {len(prompts)} prompts (no time left)")
            name = "speed"
            measure_speed(report, subjects, rate, deadline)
        except EngineError as error:
            report.equality.append(Equality(name, problem=str(error)))


def built_in_prompts(tokenizer: Tokenizer) -> list[BuiltInPrompt]:
    """Returns six short chats, and two prompts of ids that no tokenizer would produce."""
    source = PromptSource(seed=0)
    chats = [
        (tokenizer.encode_chat([{"role": "user", "content": prompt.text}]), True)
        for prompt in (*source.next("story", 2), *source.next("short", 4))
    ]
    size = tokenizer.vocab_size
    raw = [(tuple(step * i % size for i in range(1, 24)), False) for step in (7919, 104729)]
    return [chats[0], raw[0], *chats[1:], raw[1]]


def references(
    plain: EngineSubject, prompts: Sequence[BuiltInPrompt], deadline: float
) -> tuple[list[Reference], float]:
    """Decode prompts one by one, at least three; returns the answers, and tokens per second."""
    began = perf_counter()
    until = began + _REFERENCE_SHARE * max(0.0, deadline - began)
    answers: list[Reference] = []
    for number, (ids, _) in enumerate(prompts):
        if number >= _FEWEST_REFERENCES and perf_counter() > until:
            break
        ((_, outputs),) = plain.ask_token_ids([(ids, _sampling(top_logprobs=2))])
        tops = [logprobs.top for output in outputs for logprobs in output.logprobs]
        gaps = tuple(best[1] - second[1] for best, second in tops)
        answers.append(Reference(_tokens(outputs), gaps))
    return answers, sum(len(r.tokens) for r in answers) / (perf_counter() - began)


def compare(
    subject: EngineSubject,
    prompts: Sequence[BuiltInPrompt],
    expected: Sequence[Reference],
    strict: bool,
) -> Equality:
    """Submit all prompts together and compare; if `strict`, only ties excuse a difference."""
    prompts, identical = prompts[: len(expected)], 0
    partings, windows = list[Parting](), list[RequestOutput]()
    answers = subject.ask_token_ids([(ids, _sampling()) for ids, _ in prompts])
    for number, ((_, outputs), reference) in enumerate(zip(answers, expected, strict=True)):
        tokens = _tokens(outputs)
        same = [*map(eq, tokens, reference.tokens), False].index(False)
        identical += same
        if tokens != reference.tokens:
            gap = reference.gaps[same] if same < len(reference.gaps) else None
            partings.append(Parting(number, same, gap))
        if prompts[number][1]:
            windows += [output for output in outputs if output.num_draft_tokens]
    depth = max((output.num_draft_tokens for output in windows), default=0)
    return Equality(
        subject.name,
        answers=len(expected),
        tokens=sum(len(reference.tokens) for reference in expected),
        identical=identical,
        partings=partings,
        accepted=[
            sum(w.num_accepted_tokens > i for w in windows) / len(windows) for i in range(depth)
        ],
        ok=not strict or all(p.gap is not None and p.gap < _TIE for p in partings),
    )


def measure_speed(
    report: Report, subjects: Sequence[EngineSubject], plain_rate: float, deadline: float
) -> None:
    """Measure all subjects in turns, within the time left.

    `plain_rate` is the speed without MTP, in tokens per second.
    """
    left = deadline - perf_counter()
    cost = len(subjects) / plain_rate  # seconds of one token by every subject, in one row
    every, tokens = list(_ROWS), 0
    for count in range(len(every), 0, -1):
        rows = every[:count]
        if (tokens := int(left / (cost * sum(_ROWS[n] for n in rows)))) >= _FEWEST_TIMED:
            break
    else:
        report.skipped.append("speed (no time left)")
        return
    report.skipped += [f"speed at {n} rows (no time left)" for n in every[len(rows) :]]
    asking = Asking(max_tokens=min(tokens, _MOST_TIMED), ignore_eos=True)
    for subject in subjects:
        subject.asking = asking
    combinations = [("story", count) for count in rows]
    waves = measure(subjects, combinations, _ROUNDS, warmups=0, seed=0, deadline=deadline)
    rounds = len({wave.round for wave in waves})
    if rounds < _ROUNDS:
        report.skipped.append(f"{_ROUNDS - rounds} of {_ROUNDS} rounds of speed")
    summaries = summarize(waves, [subject.name for subject in subjects], OFF)
    report.speed = {"summaries": summaries, "max_tokens": asking.max_tokens, "rounds": rounds}


def _sampling(top_logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(_COMPARED_TOKENS, temperature=0.0, top_logprobs=top_logprobs)


def _tokens(outputs: Sequence[RequestOutput]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.token_ids)
