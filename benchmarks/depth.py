"""Tokens per second with MTP off, at fixed depths and with `auto`, offline, on the bundled model.

The engine decodes greedy stories of at most 128 tokens. The contenders take turns, round after
round, each with a fresh set of requests and the costs and acceptance it has learned so far, so
that a machine that slows down slows them all. A second table does the same with a head whose
weights are random, so that no draft is right.

    python -m benchmarks.depth [--rounds 7] [--rows 1 4 16] [--depths 0 1 2 3 4] ...

On a machine that others use too, `OPENBLAS_NUM_THREADS=1` takes most of the noise away.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence as Many
from pathlib import Path

from mlx_mtp import backend

BACKEND = backend.prepare()

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from benchmarks.contenders import STORIES, Contender, Speeds, ratios, take_turns
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loaded import LoadedModel
from mlx_mtp.models.loader import load_model
from mlx_mtp.server.tokenizer import Tokenizer


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--depths", nargs="+", default=["0", "1", "2", "3", "4"])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write every speed here")
    given = parser.parse_args()
    tokenizer = Tokenizer.load(BUNDLED_MODEL)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in STORIES]
    off = load_model(BUNDLED_MODEL, enable_mtp=False)
    good = load_model(BUNDLED_MODEL, enable_mtp=True)
    spoiled = load_model(BUNDLED_MODEL, enable_mtp=True)
    spoil(spoiled)
    everything: dict[str, dict[int, Speeds]] = {}
    for title, model, depths in (
        ("the model's own head", good, (*given.depths, "auto")),
        ("a head of random weights", spoiled, ("0", "1", "auto")),
    ):
        found = {
            rows: measure(off, model, depths, prompts, rows, given.rounds, given.max_tokens)
            for rows in given.rows
        }
        everything[title] = found
        print(f"\n{title}\n\n{table(found)}", flush=True)
    print(f"\n{platform.platform()}, {BACKEND}, load {os.getloadavg()[0]:.1f}; tokens per second,")
    print(f"median of {given.rounds} rounds; in brackets the ratio to off in the same round: by")
    print("wall time / by processor time.")
    if given.json:
        given.json.write_text(json.dumps(everything, indent=1))


def spoil(model: LoadedModel) -> None:
    """Replace the head's matrices by random ones of the same size."""
    assert model.head is not None
    mx.random.seed(0)
    weights = {
        name: mx.random.normal(value.shape, dtype=value.dtype) * mx.std(value)
        if value.ndim > 1
        else value
        for name, value in tree_flatten(model.head.parameters())
    }
    model.head.update(tree_unflatten(list(weights.items())))


def measure(
    off: LoadedModel,
    model: LoadedModel,
    depths: Many[str],
    prompts: Many[tuple[int, ...]],
    num_rows: int,
    rounds: int,
    max_tokens: int,
) -> Speeds:
    """All contenders in turns."""
    contenders = {"off": Contender(off, "off", num_rows)}
    contenders |= {depth: Contender(model, depth, num_rows) for depth in depths}
    speeds = take_turns(contenders, prompts, num_rows, rounds, max_tokens)
    print(f"{num_rows} rows: auto chose {contenders['auto'].policy.choices()}", file=sys.stderr)
    accepted = [f"{name} {each.acceptance:.0%}" for name, each in contenders.items()]
    print(f"{num_rows} rows: drafts accepted: {', '.join(accepted[1:])}", file=sys.stderr)
    return speeds


def table(found: dict[int, Speeds]) -> str:
    """Markdown: a row per contender, a column per number of rows; then auto against the best."""
    names = list(next(iter(found.values())))
    lines = ["| depth | " + " | ".join(f"{rows} at once" for rows in found) + " |"]
    lines.append("|---" * (len(found) + 1) + "|")
    for name in names:
        cells = []
        for speeds in found.values():
            rate = statistics.median(wall for wall, _ in speeds[name])
            wall, cpu = ratios(speeds, name, "off")
            cells.append(f"{rate:.0f} ({wall:.2f} / {cpu:.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    cells = []
    for speeds in found.values():
        best = max(
            (name for name in names if name != "auto"), key=lambda n: ratios(speeds, n, "off")[1]
        )
        wall, cpu = ratios(speeds, "auto", best)
        cells.append(f"{best}: {wall:.3f} / {cpu:.3f}")
    lines.append("| auto over the best of the others | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
