"""Pauses of running streams while a long prompt is computed, without and with a bound.

Streams decode; a long prompt arrives. Until its first token the seconds between two outputs of each
stream are counted. Without a bound chunks have --prefill-step-size tokens; with one they are cut to
it by what they cost, which each engine here learns anew; "together" is with short chunks and the
streams' windows in one forward pass. "alone" is the stream's usual time.

    python -m benchmarks.pauses [--streams 8] [--prompt 8000] [--pause 100] [--model PATH]
    python -m benchmarks.pauses --shape Qwen3.5-27B --prompt 60000 --prefill-step-size 2048
"""

import argparse
import queue
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from mlx_mtp import backend

BACKEND = backend.prepare()

from benchmarks.shapes import add_shape, build, shape_of
from benchmarks.timed import table
from mlx_mtp.build import build_engine
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine import scheduler
from mlx_mtp.engine.request import Request, RequestOutput
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.sampling.params import SamplingParams

_ALONE_SECONDS = 2.0


def prompt(number: int, length: int) -> tuple[int, ...]:
    """Token ids that no other number has."""
    return tuple((7919 * i + 31 * number) % 4000 + 10 for i in range(length))


def measure(
    model: LoadedModel, streams: int, length: int, pause: float, step: int
) -> tuple[list[float], list[float], float]:
    """Gaps of the streams before the prompt comes and while it is computed, and its seconds."""
    config = EngineConfig(prefill_step_size=step, max_decode_pause=pause, num_draft_tokens=0)
    engine = build_engine(model, config, model.vocab_size, ())
    arrived = queue.SimpleQueue[tuple[float, Sequence[RequestOutput]]]()
    engine.start(lambda outputs: arrived.put((time.perf_counter(), outputs)))
    sampling = SamplingParams(max_tokens=100_000, temperature=0.0, ignore_eos=True)
    times: dict[str, list[float]] = {f"stream {n}": [] for n in range(streams)}

    def read(until: float) -> bool:
        """Note outputs for so long, or until the long prompt has its first token."""
        while (now := time.perf_counter()) < until:
            try:
                at, outputs = arrived.get(timeout=until - now)
            except queue.Empty:
                break
            for output in outputs:
                if output.error is not None:
                    raise output.error
                if output.request_id == "long":
                    return True
                times[output.request_id].append(at)
        return False

    for number, name in enumerate(times):
        engine.submit(Request(name, prompt(number, 100), sampling))
    while not all(times.values()):
        read(time.perf_counter() + 0.1)
    began = time.perf_counter()
    read(began + _ALONE_SECONDS)
    came = time.perf_counter()
    engine.submit(Request("long", prompt(streams, length), sampling))
    while not read(time.perf_counter() + 1.0):
        pass
    ended = time.perf_counter()
    engine.stop()

    def gaps(start: float, end: float) -> list[float]:
        rows = ([at for at in row if start <= at] for row in times.values())
        return [b - a for row in rows for a, b in pairwise(row) if a < end]

    return gaps(began, came), gaps(came, ended), ended - came


def main() -> None:
    """Parse the command line, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    add_shape(parser, help="random weights, on a GPU, in place of --model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of the long prompt")
    parser.add_argument("--pause", type=float, default=100.0, help="the bound, in milliseconds")
    parser.add_argument("--prefill-step-size", type=int, default=512)
    options = parser.parse_args()
    if options.shape:
        model = build(shape_of(options.shape, options), 4)[0].without_head()
    else:
        model = load_model(options.model, enable_mtp=False)
    print(f"{options.streams} streams beside a prompt of {options.prompt:,} tokens", flush=True)
    step = options.prefill_step_size
    for pause in (0.0, options.pause):  # compiles kernels, of each length of a chunk
        measure(model, options.streams, min(8 * step, options.prompt), pause, step)
    row = table("bound", "alone, ms", "p50", "p95", "most", "prompt, s", "tokens/s")
    few = scheduler.MOST_TOGETHER
    for pause, together in ((0.0, 0), (options.pause, 0), (options.pause, few)):
        scheduler.MOST_TOGETHER = together
        alone, beside, seconds = measure(model, options.streams, options.prompt, pause, step)
        cuts = statistics.quantiles(beside, n=20)
        figures = statistics.median(alone), statistics.median(beside), cuts[-1], max(beside)
        bound = f"{pause:g} ms" if pause else "none"
        bound += f", up to {few} tokens together" if together else ""
        times = (f"{1e3 * each:.0f}" for each in figures)
        row(bound, *times, f"{seconds:.1f}", f"{options.prompt / seconds:,.0f}")


if __name__ == "__main__":
    main()
