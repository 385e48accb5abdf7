"""Step cost of full-shape random-weight models on one or several ranks.

    mlx.launch -n 2 --backend nccl -- python -m benchmarks.ranks --shape Qwen3.5-397B-A17B

Without mlx.launch it measures one rank. Acceptance is synthetic, as in `benchmarks.full_shape`;
"expected" are the tokens per second of as many tokens a step as it gives in the long run.
"""

import argparse
import sys
import time
from functools import partial

import mlx.core as mx

from benchmarks.full_shape import PROMPT, SyntheticAcceptance, expected_rate, measure_engine
from benchmarks.shapes import add_shape, build_part, integers, shape_of
from benchmarks.timed import table, within
from mlx_mtp.distributed import all_reduce, world
from mlx_mtp.engine import runner as runner_module
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.models.family import text_config
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.ranks.follower import follow
from mlx_mtp.ranks.leader import LeaderPrefixes, LeaderRunner
from mlx_mtp.ranks.links import Link, Links, connect
from mlx_mtp.ranks.messages import Begin
from mlx_mtp.speculative.drafter import MTPDrafter


def _led(
    links: Links, model: LoadedModel, drafter: MTPDrafter | None, vocab_size: int
) -> ModelRunner:
    links.send(Begin(vocab_size, drafter is not None, None))
    return LeaderRunner(model, drafter, vocab_size, LeaderPrefixes(links))


def _time_sums(hidden: int, count: int = 200) -> float:
    """Microseconds of a sum over ranks in a chain, of a row's hidden state."""
    x = mx.ones((1, hidden), dtype=mx.bfloat16)
    for _ in range(2):
        began = time.perf_counter()
        for _ in range(count):
            x = all_reduce(x) * 0.5
        mx.eval(x)
    return (time.perf_counter() - began) / count * 1e6


def main() -> None:
    """Measure on rank 0; the other ranks follow it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_shape(parser, default="Qwen3.5-27B")
    parser.add_argument("--rows", type=integers, default=[1, 4, 16])
    parser.add_argument("--depths", type=integers, default=[3, 1, 2])
    parser.add_argument("--acceptance", type=float, default=0.9, help="synthetic, per position")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=540, help="begin no case after them")
    options = parser.parse_args()
    end = time.perf_counter() + options.seconds
    mx.random.seed(0)  # Each rank cuts its part out of the same model.
    config, ranks = shape_of(options.shape, options), world()
    inner = text_config(config)
    runner_module.accept = SyntheticAcceptance(options.acceptance)  # type: ignore[assignment, attr-defined]
    print(f"rank {ranks.rank} of {ranks.size} makes its weights", flush=True)
    model = build_part(config, 4, ranks.rank, ranks.size)
    make_runner, links = ModelRunner, None
    if ranks.size > 1:
        links = connect(ranks, {"shape": options.shape}, 0, sys.exit)
        sums = _time_sums(inner["hidden_size"])
    if isinstance(links, Link):
        follow(model, links)
        return
    print(
        f"{options.shape}, {inner['num_hidden_layers']} layers, {ranks.size} ranks: "
        f"{mx.get_active_memory() / 1e9:.1f} GB a rank",
        flush=True,
    )
    if links is not None:
        make_runner = partial(_led, links)  # type: ignore[assignment]
        print(f"a sum over ranks: {sums:.0f} us", flush=True)
    print("The first prompt compiles kernels.\n", flush=True)
    row = table("rows", "engine", "ms a step", "tokens a step", "tokens/s", "expected")
    cases = [(rows, depth) for depth in (None, *options.depths) for rows in options.rows]
    for rows, depth in within(end, cases):
        given = {"contexts": [PROMPT] * rows, "steps": options.steps}
        found = measure_engine(model, depth=depth, make_runner=make_runner, **given)
        told = "off" if depth is None else f"k = {depth}"
        expected = expected_rate(found, rows, depth or 0, options.acceptance)
        figures = f"{found.ms:.2f}", f"{found.per_step:.2f}", f"{found.rate:.0f}"
        row(rows, told, *figures, f"{expected:.0f}")
    if links is not None:
        links.close()
        time.sleep(1.0)  # Until they have read that.


if __name__ == "__main__":
    main()
