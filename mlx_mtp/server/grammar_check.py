"""A process that tries grammars out before the server compiles them itself.

llguidance bounds neither its time nor the depth of its stack: some grammars of a few hundred
characters take minutes, and others crash the process. Here each is tried in a fork of its own,
which a timer kills when it takes too long; a crash ends only the fork. Run as a module it reads a
tokenizer and then specs from standard input, one JSON text a line, and answers with errors or null.
"""

import contextlib
import dataclasses
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from mlx_mtp.errors import EngineError, GrammarError
from mlx_mtp.sampling.grammar import Grammar, GrammarCompiler
from mlx_mtp.sampling.params import GrammarSpec

MAX_COMPILE_SECONDS = 0.5
"""Processor time that a grammar may take; of 2,500 real schemas the slowest takes some 0.1 s."""
MAX_WAIT_SECONDS = 10.0
"""The same by the clock, for a machine that has no processor to spare."""
STACK_BYTES = 2 << 20
"""Stack that a grammar may take here. The server's threads have several times as much, and 8,800
real schemas need less than half."""
_TRIAL_TOKENS = 32
_DEATHS: dict[int, str] = {
    signal.SIGPROF: f"It takes more than {MAX_COMPILE_SECONDS:g} s of processor time to compile.",
    signal.SIGALRM: f"It takes more than {MAX_WAIT_SECONDS:g} s to compile.",
}


def compile_grammar(compiler: GrammarCompiler, spec: GrammarSpec) -> Grammar:
    """Compile a grammar; whatever llguidance raises on a client's text is a GrammarError."""
    try:
        return compiler.compile(spec)
    except Exception as error:
        raise error if isinstance(error, GrammarError) else GrammarError(f"{error}.") from None


class GrammarChecker:
    """The process, from the server's side: for one thread, started when it is first needed."""

    def __init__(self, tokenizer_json: str, eos_token_ids: Sequence[int]) -> None:
        self._header = json.dumps([tokenizer_json, list(eos_token_ids)])
        self._process: subprocess.Popen[str] | None = None

    def check(self, spec: GrammarSpec) -> None:
        """Try a grammar out; EngineError: the process has ended, the next call starts another."""
        answer = ""
        with contextlib.suppress(OSError):
            process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            print(json.dumps(dataclasses.asdict(spec)), file=process.stdin, flush=True)
            answer = process.stdout.readline()
        if not answer:
            self.close()
            raise EngineError("The process that checks grammars has ended; try again.")
        error = json.loads(answer)
        if error is not None:
            raise GrammarError(error)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(OSError):
                self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # ctrl-C is for the server: this one ends when its input does.
            start_new_session=True,
        )
        print(self._header, file=self._process.stdin, flush=True)
        return self._process


def serve(source: IO[str], answers: IO[str]) -> None:
    """The process's side: until `source` ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiler = GrammarCompiler(*json.loads(source.readline()))
    while line := source.readline():
        error = _in_a_fork(compiler, GrammarSpec(**json.loads(line)))
        print(json.dumps(error), file=answers, flush=True)


def _in_a_fork(compiler: GrammarCompiler, spec: GrammarSpec) -> str | None:
    """What is wrong with a grammar; None: nothing. A child that dies has not found it right."""
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
        crashed = "It is too deeply nested, or takes too much memory."
        return _DEATHS.get(os.WTERMSIG(status), crashed)
    return json.loads(answer or '"llguidance failed on it."')


def _try(compiler: GrammarCompiler, spec: GrammarSpec, answers: IO[str]) -> None:
    try:
        _walk(compile_grammar(compiler, spec))
        answers.write("null")
    except GrammarError as refused:
        json.dump(str(refused), answers)


def _walk(grammar: Grammar) -> None:
    """Some random tokens: what is expensive or deep may show only here, not in compiling."""
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
    serve(sys.stdin, sys.stdout)
