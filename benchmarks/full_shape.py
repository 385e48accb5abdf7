"""Step cost and speed of full-shape random-weight models on a GPU.

    python -m benchmarks.full_shape --shape Qwen3-Next-80B-A3B-Instruct --bits 4

Three tables for each model, all in one run: mlx-lm's BatchGenerator on the same weights; this
engine end to end at a synthetic acceptance; and the cost of a step at long contexts. Random weights
accept nothing, so whether a draft is accepted is drawn at the rate given: the drafts, their
verification and their rejection are computed as ever, and the text means nothing.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator

from benchmarks.shapes import build, integers
from mlx_mtp.bench.report import check_writable, write_json
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine import runner as runner_module
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence, Status
from mlx_mtp.models.few_rows import use_few_rows
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.models.published import SHAPES
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.acceptance import AcceptResult, accept
from mlx_mtp.speculative.proposer import MTPProposer
from mlx_mtp.speculative.worth import FixedDepth

_PROMPT = 64
_ENDLESS = 1 << 20
_WARM_STEPS = 16  # the first of a shape compile kernels, also behind the first few


@dataclass
class Measured:
    """One line of the tables.

    Args:
        engine: "mlx-lm", "off" (no head) or "mtp".
        step_ms: median time of a step.
        tokens_per_second: all rows together, over the measured steps.
        tokens_per_step: of one row.
    """

    shape: str
    bits: int
    engine: str
    rows: int
    depth: int
    context: int
    step_ms: float
    tokens_per_second: float
    tokens_per_step: float


class SyntheticAcceptance:
    """Stands in for `accept`: each draft in turn agrees with a given probability."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.keys = self._keys()

    @staticmethod
    def _keys() -> Iterator[mx.array]:
        key = mx.random.key(0)
        while True:
            yield from mx.random.split(key, 257)[:256]
            key = mx.random.split(key, 2)[1]

    def __call__(self, targets: mx.array, window: mx.array, **limits: mx.array) -> AcceptResult:
        """As `accept`, over targets of which a share is set to what was drafted."""
        drafts = window[:, 1:]
        if drafts.size:
            drawn = mx.random.uniform(shape=drafts.shape, key=next(self.keys))
            agreed = (drawn < self.rate) & (drafts >= 0)
            other = mx.where(targets[:, :-1] == drafts, targets[:, :-1] ^ 1, targets[:, :-1])
            forged = mx.where(agreed, drafts, other)
            targets = mx.concatenate([forged, targets[:, -1:]], axis=1)
        return accept(targets, window, **limits)


def decoding_core(
    model: LoadedModel, *, depth: int | None, contexts: list[int], overlap: bool = True
) -> EngineCore:
    """An engine whose rows have all been prefilled and stretched to these lengths."""
    config = EngineConfig(max_num_seqs=len(contexts), prefill_step_size=512)
    proposer = None if depth is None else MTPProposer(model)
    runner = ModelRunner(model, proposer, model.vocab_size)
    core = EngineCore(Scheduler(config, FixedDepth(depth or 0)), runner, overlap=overlap)
    sampling = SamplingParams(max_tokens=_ENDLESS, temperature=0.0)
    sequences = []
    for row in range(len(contexts)):
        tokens = mx.random.randint(10, model.vocab_size, (_PROMPT,), key=mx.random.key(row))
        request = Request(str(row), tuple(map(int, tokens)), sampling)
        sequences.append(Sequence(request, (), _ENDLESS))
        core.add(sequences[-1])
    while any(s.status is not Status.DECODING for s in sequences):
        core.step()
    for _ in range(2):
        core.step()
    _stretch(runner, sequences, contexts)
    return core


def _stretch(runner: ModelRunner, sequences: list[Sequence], contexts: list[int]) -> None:
    """Pretend that rows are as long as that; most of what is attended to is zero then."""
    batch = runner.batches.decoding
    assert batch is not None
    more = {s: context - _PROMPT for s, context in zip(sequences, contexts)}
    batch.cache.offset = batch.cache.offset + mx.array([more[s] for s in batch.sequences])
    for sequence in sequences:
        sequence.num_cached += more[sequence]


def measure_engine(
    model: LoadedModel, *, depth: int | None, contexts: list[int], steps: int, overlap: bool = True
) -> tuple[float, float, float, int]:
    """Median milliseconds of a step, tokens a second, tokens a step and row, bytes of KV."""
    core = decoding_core(model, depth=depth, contexts=contexts, overlap=overlap)
    for _ in range(_WARM_STEPS):
        core.step()
    times, tokens = [], 0
    started = last = time.perf_counter()
    for _ in range(steps):
        tokens += sum(len(output.token_ids) for output in core.step())
        now = time.perf_counter()
        times.append(now - last)
        last = now
    rate = tokens / (last - started)
    batch = core.runner.batches.decoding
    assert batch is not None
    nbytes = sum(a.nbytes for c in batch.cache.attention() for a in c.arrays())
    return 1e3 * statistics.median(times), rate, tokens / steps / len(contexts), nbytes


def measure_mlx_lm(plain: nn.Module, *, vocab: int, rows: int, context: int, steps: int) -> float:
    """Median milliseconds of a step of mlx-lm's BatchGenerator."""
    generator = BatchGenerator(plain, max_tokens=_ENDLESS, completion_batch_size=rows)
    prompts = [
        mx.random.randint(10, vocab, (context,), key=mx.random.key(row)).tolist()
        for row in range(rows)
    ]
    generator.insert(prompts)
    while len(generator.next()[1]) < rows:
        pass
    for _ in range(_WARM_STEPS):
        generator.next()
    times = []
    last = time.perf_counter()
    for _ in range(steps):
        generator.next()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    generator.close()
    return 1e3 * statistics.median(times)


def run(options: argparse.Namespace) -> list[Measured]:
    """All measurements of one shape, printed as they come."""
    model, plain = build(SHAPES[options.shape], options.bits)
    print(
        f"# {options.shape}, {options.bits} bit: {mx.get_active_memory() / 1e9:.1f} GB", flush=True
    )
    if options.few_rows:
        use_few_rows(model.model, model.dtype)
    runner_module.accept = SyntheticAcceptance(options.acceptance)  # type: ignore[assignment, attr-defined]
    found: list[Measured] = []

    def add(engine: str, rows: int, depth: int, context: int, *values: float) -> None:
        line = Measured(options.shape, options.bits, engine, rows, depth, context, *values)
        found.append(line)
        print(
            f"{engine:7} rows {rows:2} depth {depth} context {context:6}: "
            f"{line.step_ms:7.2f} ms {line.tokens_per_second:8.1f} tok/s "
            f"{line.tokens_per_step:.2f} a step",
            flush=True,
        )

    for context in options.contexts:
        for rows in options.rows:
            if options.mlx_lm and context <= options.mlx_lm_context:
                ms = measure_mlx_lm(
                    plain, vocab=model.vocab_size, rows=rows, context=context, steps=options.steps
                )
                add("mlx-lm", rows, 0, context, ms, rows / ms * 1e3, 1.0)
                mx.clear_cache()
            for depth in (None, *options.depths):
                values = measure_engine(
                    model, depth=depth, contexts=[context] * rows, steps=options.steps
                )[:3]
                add("off" if depth is None else "mtp", rows, depth or 0, context, *values)
                mx.clear_cache()
    return found


def main() -> None:
    """Parse the command line, measure, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=[*SHAPES], default="Qwen3-Next-80B-A3B-Instruct")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--rows", type=integers, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--depths", type=integers, default=[0, 1, 2, 3, 4])
    parser.add_argument("--contexts", type=integers, default=[512, 8192, 32768])
    parser.add_argument("--acceptance", type=float, default=0.9, help="synthetic, per position")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--few-rows", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--mlx-lm", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--mlx-lm-context", type=int, default=512, help="no longer ones for mlx-lm")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    check_writable(options.json)
    if mx.default_device() != mx.gpu:
        sys.exit("This needs a GPU; on a CPU use `mlx-mtp bench`.")
    found = run(options)
    if options.json:
        write_json(options.json, [asdict(line) for line in found])


if __name__ == "__main__":
    main()
