"""`mlx-mtp selftest`: from a loaded model to the table."""

from __future__ import annotations

import argparse
import contextlib
import sys

from mlx_mtp.bench.offline import ChatTokenizer, EngineSubject, engine_name, make_engine
from mlx_mtp.bench.runs import Asking
from mlx_mtp.config import DraftTokens
from mlx_mtp.errors import EngineError
from mlx_mtp.kernels.cases import QWEN3_NEXT_80B
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.selftest.budget import Budget
from mlx_mtp.selftest.equality import (
    Equality,
    Recorder,
    built_in_prompts,
    compare,
    references,
)
from mlx_mtp.selftest.kernels import check_kernels, shapes_of
from mlx_mtp.selftest.machine import (
    compute_dtype,
    computes_exactly,
    describe_machine,
    describe_model,
)
from mlx_mtp.selftest.report import Report
from mlx_mtp.selftest.speed import ROWS, Speed, measure_speed

_DEPTHS = (1, 2, 3)
_CALIBRATION_SECONDS = 2.0
_WARM_UP = Asking(max_tokens=8)
_REFERENCE_SHARE = 0.15
_AUTO_SHARE = 0.4
"""Of the time, that must be left for "auto" to be measured too: it calibrates itself first."""


def run_selftest(
    options: argparse.Namespace, model: LoadedModel, tokenizer: ChatTokenizer, backend: str
) -> int:
    """Check and measure, and print the table; returns the exit status.

    Args:
        options: the command line's.
        model: with its head.
        tokenizer: its own.
        backend: what mlx computes on, in words.

    Raises:
        MlxMtpError: the model can't be tested, or the file not be written.
    """
    budget = Budget(options.seconds)
    _tell("kernels")
    shapes = {**shapes_of(model), "80B": QWEN3_NEXT_80B}
    kernels = check_kernels(shapes)
    strict = computes_exactly(compute_dtype(model))
    engines = _Engines(model, tokenizer, budget)
    engines.run()
    report = Report(
        machine=describe_machine(backend),
        model=describe_model(model),
        kernels=tuple(kernels),
        equality=tuple(engines.equality),
        strict=strict,
        speed=engines.speed,
        skipped=tuple(engines.skipped),
        seconds=budget.spent(),
    )
    print(report.table())
    if options.json is not None:
        report.write_json(options.json)
    for failure in report.failures:
        print(f"mlx-mtp: failed: {failure}", file=sys.stderr)
    return 1 if report.failures else 0


class _Engines:
    """The part that runs the engine.

    Args:
        model: with its head.
        tokenizer: its own.
        budget: the time there is.
    """

    def __init__(self, model: LoadedModel, tokenizer: ChatTokenizer, budget: Budget) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._budget = budget
        self.equality: list[Equality] = []
        self.speed: Speed | None = None
        self.skipped: list[str] = []
        self._doing = ""

    def run(self) -> None:
        """Compare tokens, then measure speed; an engine that fails ends it, and is noted."""
        with contextlib.ExitStack() as stack:
            try:
                subjects, rate = self._compared(stack)
                _tell("speed")
                self._doing = "speed"
                self.speed = measure_speed(subjects, self._tokenizer, self._budget, rate)
                self.skipped.extend(self.speed.skipped)
            except EngineError as error:
                self.equality.append(Equality(self._doing, 0, 0, 0, problem=str(error)))

    def _compared(self, stack: contextlib.ExitStack) -> tuple[list[EngineSubject], float]:
        """All engines, their tokens compared; and the rate of plain decoding."""
        plain, recorder = self._start(stack, 0)
        prompts = built_in_prompts(self._tokenizer)
        began = self._budget.spent()
        expected = references(plain, recorder, prompts, self._budget, _REFERENCE_SHARE)
        rate = sum(len(r.tokens) for r in expected) / (self._budget.spent() - began)
        if len(expected) < len(prompts):
            missing = len(prompts) - len(expected)
            self.skipped.append(f"{missing} of {len(prompts)} prompts (no time left)")
        prompts = prompts[: len(expected)]
        self.equality.append(compare(plain, recorder, prompts, expected))
        subjects = [plain]
        for depth in _DEPTHS:
            subject, recorder = self._start(stack, depth)
            subjects.append(subject)
            self.equality.append(compare(subject, recorder, prompts, expected))
        if self._budget.left() > _AUTO_SHARE * self._budget.seconds:
            subjects.append(self._start(stack, "auto")[0])
        else:
            self.skipped.append(f"{engine_name('auto')} (no time left)")
        return subjects, rate

    def _start(
        self, stack: contextlib.ExitStack, depth: DraftTokens
    ) -> tuple[EngineSubject, Recorder]:
        self._doing = engine_name(depth)
        _tell(self._doing)
        engine = make_engine(
            self._model,
            self._tokenizer,
            depth,
            max_num_seqs=max(ROWS),
            calibration_seconds=_CALIBRATION_SECONDS,
        )
        recorder = Recorder()
        subject = EngineSubject(
            self._doing, engine, self._tokenizer, _WARM_UP, observe=recorder.observe
        )
        return stack.enter_context(subject), recorder


def _tell(what: str) -> None:
    """Say where it stands, to those who wait at a terminal."""
    if sys.stderr.isatty():
        print(f"selftest: {what} ...", file=sys.stderr, flush=True)
