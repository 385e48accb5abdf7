"""Peak memory of long prompts that are prefilled in chunks."""

import gc
import itertools
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from benchmarks import Rows, row
from benchmarks.cores import core_of, random_ids, row_of
from mlx_mtp.engine.memory import footprint
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model

SHORT_PROMPT, SHORT_ANSWER, ANSWER, DEPTH = 64, 4000, 6, 1
_ROOT = Path(__file__).resolve().parents[1]
_MIB = 1 << 20
_APART = """
import json, sys
from mlx_mtp import backend
backend.prepare()
from benchmarks import prompt_memory
print(json.dumps(prompt_memory.peaks(*json.loads(sys.argv[1]))))
"""


class Peaks(NamedTuple):
    """Memory that one prompt took, in bytes, without weights except in `resident`."""

    caches: int  # of all rows at the end, as `CacheMemory` computes it
    scores: int  # of the last chunk's attention in one layer, [heads, chunk, tokens] in float32
    before: int  # mlx's peak with only the short rows
    prefill: int  # mlx's peak while the prompt was computed
    joined: int  # mlx's peak during the steps after the prefill, the join included
    resident: int  # peak of the process's resident set, weights and Python included


def prefill_memory(
    tokens: tuple[int, ...] = (8192, 16384, 32768),
    rows: tuple[int, ...] = (0, 4),
    step: int = 512,
    model: Path = BUNDLED_MODEL,
) -> Rows:
    """Peak memory of long prompts in chunks, in MiB: alone, and beside rows that decode.

    mlx's peak is taken step by step, to tell the prompt's chunks from the steps after it has joined
    the other rows. "scores" are one layer's attention scores of the last chunk. The default, the
    bundled model in float32, takes minutes on two cores.

    Args:
        tokens: tokens of the prompt
        rows: number of rows that decode beside it
        step: tokens of a chunk
        model: directory of a checkpoint
    """
    for count, length in itertools.product(rows, tokens):
        p = measure_apart(model, length, count, step)
        # During its prefill there are only the prompt's own caches and the short rows' memory.
        rest = p.prefill - p.caches // (count + 1) - p.before - p.scores
        nbytes = p.caches, p.scores, p.prefill, rest, p.joined, p.resident
        names = "prompt | rows beside | caches | scores | peak, prefill | less caches and scores"
        names = f"{names} | peak, joined | resident"
        yield row(names, length, count, *(each / _MIB for each in nbytes))


def measure_apart(model: Path, tokens: int, rows: int, step: int) -> Peaks:
    """Runs `peaks` in a process of its own.

    The peak of the resident set is that of a whole process, and memory left by earlier work could
    be freed during the run, which would lower the measured peak.

    Raises:
        subprocess.CalledProcessError: the process failed; its stderr is this process's stderr.
    """
    given = json.dumps([str(model.resolve()), tokens, rows, step])
    command = [sys.executable, "-c", _APART, given]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=_ROOT)
    return Peaks(*json.loads(done.stdout))


def peaks(path: str, tokens: int, rows: int, step: int) -> Peaks:
    """Run one prompt of `tokens` tokens while `rows` short rows decode; see `measure_apart`."""
    model = load_model(Path(path), enable_mtp=True)
    gc.collect()
    mx.synchronize()
    weights = mx.get_active_memory()
    core = core_of(model, DEPTH, max_num_seqs=rows + 1, prefill_step_size=step)

    def step_peak() -> int:
        mx.synchronize()
        mx.reset_peak_memory()
        core.step()
        mx.synchronize()
        return mx.get_peak_memory() - weights

    short = random_ids(model.vocab_size, SHORT_PROMPT, 0)
    others = [row_of(f"short-{i}", short, SHORT_ANSWER) for i in range(rows)]
    for other in others:
        core.scheduler.add(other)
    before = max([step_peak() for _ in range(6)]) if rows else 0
    prompt = row_of("long", random_ids(model.vocab_size, tokens, 1), ANSWER)
    core.scheduler.add(prompt)
    prefill, joined = 0, 0
    while not prompt.finished:
        # The step that reads the first token has launched nothing of the joined batch yet.
        prefilling = not prompt.output
        peak = step_peak()
        prefill, joined = max(prefill, prefilling * peak), max(joined, (not prefilling) * peak)
    for other in others:
        core.scheduler.cancel(other.request_id)
    while not core.idle:
        core.step()
    demand = footprint(model, DEPTH)
    lengths = [tokens + ANSWER, *[SHORT_PROMPT + SHORT_ANSWER] * rows]
    states = (rows + 1) * demand.caches.states_and_window(DEPTH)
    caches = sum(map(demand.caches.kv, lengths)) + states
    scores = min(step, tokens) * demand.score_bytes(tokens)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resident <<= 0 if sys.platform == "darwin" else 10
    return Peaks(caches, scores, before, prefill, joined, resident)
