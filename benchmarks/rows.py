"""Rows of different lengths side by side: what a step costs, against what its parts cost apart.

    python -m benchmarks.rows                               # the bundled model, on this machine
    python -m benchmarks.rows --shape Qwen3-Next-80B-A3B-Instruct --layers 12    # on a GPU

Short rows decode beside a long one. Ideal is a step of the short rows and one of the long row, one
after the other, as if each were alone. KV is what is allocated, and how often that is what the rows
hold, each rounded up to 256 tokens. Rows are stretched to their lengths, so the text means nothing;
whether a draft is accepted is drawn at the rate given.
"""

import argparse
import platform
from pathlib import Path
from typing import Any

from mlx_mtp import backend

BACKEND = backend.prepare()

import mlx.core as mx

from benchmarks.full_shape import SyntheticAcceptance, measure_engine
from benchmarks.shapes import add_shape, build, integers, shape_of
from mlx_mtp.bench.report import check_writable, render, write_json
from mlx_mtp.engine import runner as runner_module
from mlx_mtp.engine.memory import footprint
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel


def measure(
    model: LoadedModel, short: list[int], long: int, depth: int, steps: int
) -> dict[str, Any]:
    """The short rows alone, the long one alone, and both together."""
    caches = footprint(model, depth).caches
    found: dict[str, Any] = {"short rows": len(short), "long row": long, "depth": depth}
    times = {}
    for name, contexts in (("short", short), ("long", [long]), ("both", [*short, long])):
        step = measure_engine(
            model,
            depth=depth,
            contexts=contexts,
            steps=steps,
            overlap=mx.default_device() != mx.cpu,
        )
        times[name] = step.ms
        found |= {f"{name} ms": round(step.ms, 2), f"{name} tok/s": round(step.rate, 1)}
        mx.clear_cache()
    own = sum(-(-(n + steps) // 256) * 256 for n in (*short, long))  # at the end, or more
    held = own * (caches.kv_per_token + caches.head_kv_per_token)
    found["of ideal"] = round((times["short"] + times["long"]) / times["both"], 2)
    return found | {
        "KV MB": round(step.nbytes / 1e6, 1),
        "of its rows": round(step.nbytes / held, 2),
    }


def main() -> None:
    """Parse the command line, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_shape(parser, help="random weights; none: the bundled model")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--rows", type=integers, default=[1, 3, 7, 15], help="short ones")
    parser.add_argument("--short", type=int, default=512, help="tokens of a short row")
    parser.add_argument("--long", type=integers, default=[8192, 24_576, 61_440])
    parser.add_argument("--depths", type=integers, default=[0, 2])
    parser.add_argument("--acceptance", type=float, default=0.9, help="synthetic, per position")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    check_writable(options.json)
    if options.shape:
        model, _ = build(shape_of(options.shape, options), options.bits)
    else:
        model = load_model(BUNDLED_MODEL, enable_mtp=True)
    runner_module.verify_window = SyntheticAcceptance(options.acceptance)  # type: ignore[assignment, attr-defined]
    lines = []
    for depth in options.depths:
        for long in options.long:
            for rows in options.rows:
                short = [options.short] * rows
                lines.append(measure(model, short, long, depth, options.steps))
                print(lines[-1], flush=True)
    print(render([*lines[0]], [[str(value) for value in line.values()] for line in lines]))
    print(f"\n{options.shape or 'the bundled model'}; {platform.platform()}, {BACKEND}")
    if options.json:
        write_json(options.json, lines)


if __name__ == "__main__":
    main()
