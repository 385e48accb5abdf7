"""Step cost and speed of full-shape random-weight models on a GPU.

    python -m benchmarks.full_shape [--shape Qwen3.5-27B] [--cases 1x512,16x32768] [--depths 1,3]

For each case, rows x context, in one run: mlx-lm's BatchGenerator on the same weights, this engine
without a head, and with drafts. Random weights accept nothing, so whether a draft is accepted is
drawn at the rate given: the drafts, their verification and their rejection are computed as ever,
and the text means nothing. In 24 steps the number drawn varies by some 10%, so "expected" has the
tokens per second of as many as the rate gives in the long run. "added" is to a step of as many rows
at the first context. `--profile` shows launches and the GPU's milliseconds of a step, by torch,
whose profiler may slow down what is measured after it. Products are a part of it, without drafts
over the time of reading their weights once at `--bandwidth`. How much experts read is not known
here, as with random weights the tokens of a step choose alike: see `benchmarks.products`.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator

from benchmarks.shapes import add_shape, build, integers, shape_of
from benchmarks.timed import profiled, shares, table, within
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine import runner as runner_module
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.request import Request
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.engine.sequence import Sequence, Status
from mlx_mtp.models.model import LoadedModel, module_nbytes
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.speculative.draft_policy import FixedDrafts
from mlx_mtp.speculative.drafter import MTPDrafter
from mlx_mtp.speculative.verify import AcceptResult, accept

MakeRunner = Callable[[LoadedModel, MTPDrafter | None, int], ModelRunner]

PROMPT = 64
"""Tokens, which are computed."""
_ENDLESS = 1 << 20
_WARM_STEPS = 16  # the first of a shape compile kernels, also behind the first few
_PROFILED_STEPS = 4
_PARTS = ("products", "experts", "attention")  # of the GPU's time, that are shown
_MLX_LM_CONTEXT = 512  # At most; mlx-lm's own rows are shorter, which favours it.


class Steps(NamedTuple):
    """What decoding steps took."""

    ms: float  # median of a step
    rate: float  # tokens per second of all rows
    per_step: float  # tokens a step and row
    nbytes: int = 0  # of KV
    launches: float | None = None  # a step; None: not counted
    parts: dict[str, float] | None = None  # milliseconds of the GPU's a step


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
    model: LoadedModel,
    *,
    depth: int | None,
    contexts: list[int],
    overlap: bool = True,
    make_runner: MakeRunner = ModelRunner,
) -> EngineCore:
    """An engine whose rows have all been prefilled and stretched to these lengths."""
    config = EngineConfig(max_num_seqs=len(contexts), prefill_step_size=512)
    proposer = None if depth is None else MTPDrafter(model)
    runner = make_runner(model, proposer, model.vocab_size)
    core = EngineCore(Scheduler(config, FixedDrafts(depth or 0)), runner, overlap=overlap)
    sampling = SamplingParams(max_tokens=_ENDLESS, temperature=0.0)
    sequences = []
    for row in range(len(contexts)):
        tokens = mx.random.randint(10, model.vocab_size, (PROMPT,), key=mx.random.key(row))
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
    more = {s: context - PROMPT for s, context in zip(sequences, contexts)}
    batch.cache.offset = batch.cache.offset + mx.array([more[s] for s in batch.sequences])
    for sequence in sequences:
        sequence.num_cached += more[sequence]


def measure_engine(
    model: LoadedModel,
    *,
    depth: int | None,
    contexts: list[int],
    steps: int,
    overlap: bool = True,
    make_runner: MakeRunner = ModelRunner,
    profile: bool = False,
) -> Steps:
    """The steps of rows of these lengths."""
    given: dict[str, Any] = {"overlap": overlap, "make_runner": make_runner}
    core = decoding_core(model, depth=depth, contexts=contexts, **given)
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
    found = Steps(1e3 * statistics.median(times), rate, tokens / steps / len(contexts), nbytes)
    run = profiled(lambda: [core.step() for _ in range(_PROFILED_STEPS)]) if profile else None
    if run is None:
        return found
    parts = {part: ms / _PROFILED_STEPS for part, ms in run.parts.items()}
    return found._replace(launches=run.num_launches / _PROFILED_STEPS, parts=parts)


def measure_mlx_lm(plain: nn.Module, *, vocab: int, rows: int, steps: int) -> Steps:
    """Steps of mlx-lm's BatchGenerator; its rate is by their median, which favours it.

    Prompts are as short as ours are before they are stretched: on CUDA it loops over their tokens.
    """
    generator = BatchGenerator(plain, max_tokens=_ENDLESS, completion_batch_size=rows)
    prompts = [
        mx.random.randint(10, vocab, (PROMPT,), key=mx.random.key(row)).tolist()
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
    median = statistics.median(times)
    return Steps(1e3 * median, rows / median, 1.0)


def product_bytes(model: LoadedModel) -> int:
    """Bytes of weights that the products of a step without a head read."""
    nbytes = 0
    for module in model.causal_lm.modules():
        if isinstance(module, nn.QuantizedLinear) or module is model.output_layer:
            nbytes += module_nbytes(module)
        if getattr(module, "joins_shared", False):  # Its shared expert is one of the others.
            nbytes -= module_nbytes(module.shared_expert)
    return nbytes


def expected_rate(found: Steps, rows: int, depth: int, acceptance: float) -> float:
    """Tokens per second with as many tokens a step as an acceptance gives in the long run."""
    return rows * sum(acceptance**n for n in range(depth + 1)) / found.ms * 1e3


def run(shape: str, end: float, options: argparse.Namespace) -> None:
    """Print the table of one shape, up to a time (`perf_counter`)."""
    began = time.perf_counter()
    model, plain = build(shape_of(shape, options), options.bits)
    made = f"{mx.get_active_memory() / 1e9:.1f} GB, made in {time.perf_counter() - began:.0f} s"
    print(f"\n{shape}, {options.bits} bit, {made}, acceptance {options.acceptance}\n", flush=True)
    heads = ["rows", "context", "engine", "ms a step", "tokens a step", "tokens/s", "expected"]
    ratios = ["of mlx-lm", "expected of it", "step over off", "added, ms"]
    row = table(*heads, *ratios, *(["launches", "GPU, ms", *_PARTS] if options.profile else []))
    names: dict[str, int | None] = {"mlx-lm": 0, "off": None}
    names = names | {f"k = {depth}": depth for depth in options.depths}
    measured: dict[tuple[int, int, str], Steps] = {}
    cases = [(*case, name) for case in options.cases for name in names]
    for rows, context, name in within(end, cases):
        depth = names[name]
        if name != "mlx-lm":
            given: dict[str, Any] = {"contexts": [context] * rows, "steps": options.steps}
            found = measure_engine(model, depth=depth, profile=options.profile, **given)
        elif options.mlx_lm and context <= _MLX_LM_CONTEXT:
            sizes = {"rows": rows, "steps": options.steps}
            found = measure_mlx_lm(plain, vocab=model.vocab_size, **sizes)
        else:
            continue
        mx.clear_cache()
        measured[rows, context, name] = found
        expected = expected_rate(found, rows, depth or 0, options.acceptance)
        cells = [f"{found.ms:.2f}", f"{found.per_step:.2f}", f"{found.rate:.0f}"]
        cells.append(f"{expected:.0f}")
        theirs = measured.get((rows, context, "mlx-lm"))
        cells += ["", ""] if theirs is None else [f"{found.rate / theirs.rate:.2f}"]
        cells += [] if theirs is None else [f"{expected / theirs.rate:.2f}"]
        off = measured.get((rows, context, "off"))
        cells.append("" if off is None else f"{found.ms / off.ms:.2f}")
        first = next(each for (r, _, n), each in measured.items() if (r, n) == (rows, name))
        cells.append("" if first is found else f"{found.ms - first.ms:.1f}")
        if found.parts is not None:
            cells += [f"{found.launches:.0f}", f"{sum(found.parts.values()):.1f}"]
            cells += [f"{found.parts[part]:.2f}" for part in _PARTS]
            if name == "off":
                once = product_bytes(model) / options.bandwidth / 1e9
                cells[-len(_PARTS)] += f" ({found.parts['products'] / once:.2f})"
        row(rows, f"{context:,}", name, *cells)


def _cases(text: str) -> list[tuple[int, int]]:
    """Rows and context, of a command line: 1x512,16x32768."""
    parts = (case.split("x") for case in text.split(","))
    return [(int(rows), int(context)) for rows, context in parts]


def main() -> None:
    """Parse the command line, measure, print a table for each shape."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_shape(parser, nargs="+", default=["Qwen3-Next-80B-A3B-Instruct", "Qwen3.5-27B"])
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    cases = "1x512,16x512,16x32768,32x512"
    parser.add_argument("--cases", type=_cases, default=cases, help=f"rows x context: {cases}")
    parser.add_argument("--depths", type=integers, default=[3])
    parser.add_argument("--acceptance", type=float, default=0.9, help="synthetic, per position")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--mlx-lm", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s, with --profile")
    parser.add_argument("--seconds", type=float, default=540, help="begin no case after them")
    options = parser.parse_args()
    runner_module.accept = SyntheticAcceptance(options.acceptance)  # type: ignore[assignment, attr-defined]
    for shape, end in shares(options.seconds, options.shape):
        run(shape, end, options)


if __name__ == "__main__":
    main()
