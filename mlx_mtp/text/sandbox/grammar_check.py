"""A process that tries grammars before the server compiles them itself.

llguidance bounds neither its time nor the depth of its stack: some grammars of a few hundred
characters take minutes, and others crash the process. This process tries each grammar in a fork,
which a timer kills if it takes too long; a crash ends only the fork. A question is a spec; the
answer is an error message or null.
"""

import contextlib
import dataclasses
import json
import os
import random
import resource
import signal
import threading
from collections.abc import Callable
from typing import IO, Any

import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from mlx_mtp.errors import UNKNOWN_RETRY_SECONDS, GrammarError, UnavailableError, is_fault
from mlx_mtp.sampling.grammar import Grammar, GrammarCompiler
from mlx_mtp.sampling.params import GrammarSpec
from mlx_mtp.text.sandbox import helper as helpers

MAX_COMPILE_SECONDS = 0.5
"""Processor time that a grammar may take; the slowest of 2,500 real schemas takes about 0.1 s."""
MAX_WAIT_SECONDS = 10.0
"""Wall-clock time that a grammar may take, on a machine whose processors are busy."""
STACK_BYTES = 2 << 20
"""Stack that a grammar may take in a trial. The server's thread for grammars has several times this
size, and 8,800 real schemas need less than half of it."""
_NO_VERDICT = ""
_TRIAL_TOKENS = 32
_SPARE_SECONDS = 2.0
_TOO_SLOW = f"It takes more than {MAX_COMPILE_SECONDS:g} s of processor time to compile."
_CRASHED = "It is too deeply nested, or takes too much memory."
# Signals that say nothing about the grammar: memory ran out, or the machine was stalled.
_NOT_ITS_FAULT = (signal.SIGKILL, signal.SIGTERM, signal.SIGALRM)


def compile_grammar(compiler: GrammarCompiler, spec: GrammarSpec) -> Grammar:
    """Compile a grammar; any error of llguidance becomes a GrammarError."""
    try:
        return compiler.compile(spec)
    except BaseException as error:
        if not is_fault(error):
            raise
        raise error if isinstance(error, GrammarError) else GrammarError(f"{error}.") from None


def try_grammar(helper: helpers.Helper, spec: GrammarSpec) -> None:
    """Try a grammar, and once more if the first trial has no verdict.

    Raises GrammarError if the grammar is wrong or takes too much time or memory, UnavailableError
    if there is no verdict.
    """
    for _ in range(2):
        with contextlib.suppress(helpers.HelperError, helpers.HelperUnavailableError):
            # If the fork's timers don't end it, the process was stopped: not the grammar's fault.
            error = helper.ask(dataclasses.asdict(spec), MAX_WAIT_SECONDS + _SPARE_SECONDS)
            if error is None:
                return
            if error != _NO_VERDICT:
                raise GrammarError(error)
    raise UnavailableError(
        "The process that checks grammars was ended, by a lack of memory or of processor time. "
        "Try again later.",
        retry_after=UNKNOWN_RETRY_SECONDS,
    )


def _answers(header: tuple[str, list[int]]) -> Callable[[Any], str | None]:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiler = GrammarCompiler(*header)
    return lambda spec: _in_a_fork(compiler, GrammarSpec(**spec))


def _in_a_fork(compiler: GrammarCompiler, spec: GrammarSpec) -> str | None:
    """Returns what is wrong with a grammar, None if nothing is, or _NO_VERDICT."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with open(writing, "w") as answers:
            # The timers' signals end the process.
            signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_SECONDS)
            signal.setitimer(signal.ITIMER_REAL, MAX_WAIT_SECONDS)
            threading.stack_size(STACK_BYTES)
            thread = threading.Thread(target=_try, args=(compiler, spec, answers))
            thread.start()
            thread.join()
        os._exit(0)
    os.close(writing)
    with open(reading) as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number in _NOT_ITS_FAULT:
            return _NO_VERDICT
        return _TOO_SLOW if number == signal.SIGPROF else _CRASHED
    return json.loads(answer or '"llguidance failed on it."')


def _try(compiler: GrammarCompiler, spec: GrammarSpec, answers: IO[str]) -> None:
    try:
        _random_walk(compile_grammar(compiler, spec))
        answers.write("null")
    except GrammarError as refused:
        json.dump(str(refused), answers)


def _random_walk(grammar: Grammar) -> None:
    """Generate some random tokens: a grammar can compile fast but be slow or too deep here."""
    if grammar.matcher is None:
        return
    choose, matcher = random.Random(0), grammar.matcher.deep_copy()
    mask = np.zeros((1, grammar.num_words), dtype=np.int32)
    for _ in range(_TRIAL_TOKENS):
        fill_next_token_bitmask(matcher, mask)
        if matcher.is_error() or matcher.is_stopped():
            return
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed) or not matcher.consume_token(int(choose.choice(allowed))):
            return


if __name__ == "__main__":
    helpers.answer_questions(_answers)
