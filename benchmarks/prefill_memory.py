"""Peak memory of long prompts in chunks: alone, and beside rows that decode.

Each case runs in a process of its own: the resident set's peak is the process's, and what earlier
work left behind would be freed meanwhile and taken from the case's peak. mlx's own peak is taken
step by step, so that the prompt's chunks and its joining the other rows are distinguished.

    python -m benchmarks.prefill_memory [--tokens 8192 16384 32768] [--rows 0 4] [--step 512]
                                        [--model DIR]

The bundled model by default, in float32; minutes on two cores.
"""

import argparse
import gc
import json
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from mlx_mtp import backend

backend.prepare()

import mlx.core as mx

from mlx_mtp.bench.report import render
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.memory import footprint
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.draft_policy import FixedDrafts
from mlx_mtp.speculative.drafter import MTPDrafter

SHORT_PROMPT, SHORT_ANSWER, ANSWER, DEPTH = 64, 4000, 6, 1
ROOT = Path(__file__).resolve().parents[1]
_MIB = 1 << 20


@dataclass(frozen=True)
class Peaks:
    """What one prompt took, in bytes, beside weights.

    Args:
        tokens: of the prompt.
        rows: that decoded beside it.
        caches: of all rows at the end, as `CacheMemory` has it.
        scores: of the last chunk's attention in one layer, [heads, chunk, tokens] in float32.
        before: mlx's peak of the short rows alone.
        prefill: mlx's peak while the prompt was computed.
        joined: mlx's peak of the steps after it, the join included.
        resident: peak of the process's resident set, weights and Python included.
    """

    tokens: int
    rows: int
    caches: int
    scores: int
    before: int
    prefill: int
    joined: int
    resident: int


def measure(model: LoadedModel, tokens: int, rows: int, step: int) -> Peaks:
    """Run one prompt of `tokens` tokens while `rows` short rows decode.

    Only in a process that has nothing else on the device: see `measure_apart`.
    """
    gc.collect()
    mx.synchronize()
    weights = mx.get_active_memory()

    def step_peak() -> int:
        mx.synchronize()
        mx.reset_peak_memory()
        core.step()
        mx.synchronize()
        return mx.get_peak_memory() - weights

    config = EngineConfig(max_num_seqs=rows + 1, prefill_step_size=step)
    runner = ModelRunner(model, MTPDrafter(model), model.vocab_size)
    core = EngineCore(Scheduler(config, FixedDrafts(DEPTH)), runner, overlap=True)
    others = [_sequence(model, SHORT_PROMPT, SHORT_ANSWER, f"short-{i}") for i in range(rows)]
    for sequence in others:
        core.scheduler.add(sequence)
    before = max([step_peak() for _ in range(6)], default=0) if rows else 0
    prompt = _sequence(model, tokens, ANSWER, "long")
    core.scheduler.add(prompt)
    prefill, joined = 0, 0
    while not prompt.finished:
        # The step that reads the first token has launched nothing of the joined batch yet.
        prefilling = not prompt.output
        peak = step_peak()
        prefill, joined = max(prefill, prefilling * peak), max(joined, (not prefilling) * peak)
    for sequence in others:
        core.scheduler.cancel(sequence.request_id)
    while not core.idle:
        core.step()
    demand = footprint(model, DEPTH)
    return Peaks(
        tokens,
        rows,
        sum(map(demand.caches.kv, [tokens + ANSWER, *[SHORT_PROMPT + SHORT_ANSWER] * rows]))
        + (rows + 1) * demand.caches.states_and_window(DEPTH),
        min(step, tokens) * demand.scores(tokens),
        before,
        prefill,
        joined,
        _resident(),
    )


def measure_apart(model: Path, cases: list[tuple[int, int]], step: int) -> list[Peaks]:
    """`measure` in a new process, one case after the other.

    Args:
        model: its directory.
        cases: (tokens, rows) of each.
        step: tokens of a prompt's chunk.

    Raises:
        subprocess.CalledProcessError: it failed; what it said is on this process's stderr.
    """
    command = [sys.executable, "-m", "benchmarks.prefill_memory", "--model", str(model.resolve())]
    for tokens, rows in cases:
        command += ["--case", str(tokens), str(rows)]
    command += ["--step", str(step)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return [Peaks(**json.loads(line)) for line in done.stdout.splitlines()]


def _sequence(model: LoadedModel, tokens: int, answer: int, name: str) -> Sequence:
    prompt = tuple((i * 7919) % model.vocab_size for i in range(tokens))
    sampling = SamplingParams(max_tokens=answer, temperature=0.0)
    return Sequence(Request(name, prompt, sampling), (), answer)


def _resident() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _table(found: list[Peaks]) -> str:
    header = ["prompt", "rows beside", "caches", "scores", "peak, prefill"]
    header += ["less caches and scores", "peak, joined", "resident"]
    rows = []
    for p in found:
        # While it is computed only its own caches are there, and what the short rows took.
        own = p.caches // (p.rows + 1) + p.before
        cells = [p.caches, p.scores, p.prefill, p.prefill - own - p.scores, p.joined, p.resident]
        rows.append([f"{p.tokens:,}", str(p.rows), *(f"{cell / _MIB:.0f} MiB" for cell in cells)])
    return render(header, rows)


def main() -> None:
    """Measure all cases and print the table."""
    parser = argparse.ArgumentParser(description="Peak memory of long prompts.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--step", type=int, default=512)
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--case", help=argparse.SUPPRESS, type=int, nargs=2, action="append")
    options = parser.parse_args()
    if options.case:
        model = load_model(options.model, enable_mtp=True)
        for tokens, rows in options.case:
            print(json.dumps(asdict(measure(model, tokens, rows, options.step))), flush=True)
        return
    found = []
    for rows in options.rows:
        for tokens in options.tokens:
            found += measure_apart(options.model, [(tokens, rows)], options.step)
            print(_table(found[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(_table(found))


if __name__ == "__main__":
    main()
