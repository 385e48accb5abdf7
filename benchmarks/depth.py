"""Tokens per second with MTP off, at fixed depths and with `auto`, offline, on the bundled model.

The engine decodes greedy answers of at most 128 tokens: stories, copies of a text (`copy`), stories
and copies side by side (`mix`), or other tasks with one right answer (`closed`). The contenders
take turns, round after round, each with a fresh set of requests and the costs and acceptance it has
learned so far, so that a machine that slows down slows them all. A second table does the same with
a head whose weights are random, so that no draft is right. Contenders of a fixed depth draft with
the head alone; `mtp` is `auto` without copies.

    python -m benchmarks.depth [--rounds 7] [--rows 1 4 16] [--depths 0 1 2 3 4] [--work mix] ...

On a machine that others use too, `OPENBLAS_NUM_THREADS=1` takes most of the noise away.
"""

import argparse
import itertools
import os
import platform
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_mtp import backend

BACKEND = backend.prepare()

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from benchmarks.contenders import Contender, Work, take_turns
from mlx_mtp.bench.measure import Summary
from mlx_mtp.bench.prompts import Prompt, PromptSource
from mlx_mtp.bench.report import check_writable, render, write_json
from mlx_mtp.config import DraftTokens
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.models.loader import load_model
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.text.tokenizer import Tokenizer

OFF = "off"
OWN, SPOILED = "own head of the model", "spoiled head: random weights"
_SENTENCES = 5  # of a text to copy


def _copy(_: int, prompt: Prompt) -> str:
    (source,) = PromptSource(prompt.seed).next("medium", 1)
    return "Repeat this text exactly: " + ". ".join(source.text.split(". ")[:_SENTENCES]) + "."


def _mix(number: int, prompt: Prompt) -> str:
    return prompt.text if number % 2 else _copy(number, prompt)


def _closed(number: int, prompt: Prompt) -> str:
    """Sorting and sums, with numbers that depend on the prompt."""
    chance = random.Random(prompt.seed)
    numbers = [chance.randint(1, 99) for _ in range(5)]
    listed = ", ".join(map(str, numbers))
    tasks = (f"What is {numbers[0]} + {numbers[1]}?", f"Sort these numbers: {listed}.")
    return tasks[number % len(tasks)]


WORK: dict[str, Work | None] = {"story": None, "copy": _copy, "mix": _mix, "closed": _closed}
Found = dict[int, dict[str, Summary]]
"""Figures by rows at once and contender."""


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--depths", nargs="+", default=["0", "1", "2", "3", "4"])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--work", choices=WORK, default="story")
    parser.add_argument("--heads", choices=["own", "spoiled", "both"], default="both")
    parser.add_argument("--json", type=Path, help="write every speed here")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("--rounds is at least 2: auto is compared with the best of other rounds.")
    check_writable(given.json)
    everything: dict[str, Found] = {}
    for title, depths in ((OWN, (*given.depths, "mtp", "auto")), (SPOILED, ("0", "1", "auto"))):
        if given.heads not in ("both", title.split()[0]):
            continue
        model = load_model(BUNDLED_MODEL, enable_mtp=True)
        if title == SPOILED:
            spoil(model)
        found = {
            rows: measure(model, depths, rows, given.rounds, given.max_tokens, WORK[given.work])
            for rows in given.rows
        }
        everything[title] = found
        print(f"\n{title}\n\n{table(found)}", flush=True)
    print(f"\n{platform.platform()}, {BACKEND}, load {os.getloadavg()[0]:.1f}; tokens per second,")
    print(f"median of {given.rounds} rounds; in brackets the ratio to off in the same round: by")
    print("wall time / by processor time.")
    for rows, figures in everything.get(OWN, {}).items():
        print(f"{rows} at once, {given.work}: auto over the best fixed depth {over_best(figures)}")
    print(
        "(the best of one half of the rounds, compared in the other half; quartiles of the rounds)"
    )
    if given.json:
        write_json(given.json, everything)


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
    mx.eval(model.head.parameters())  # Here: the engines have threads of their own.


def measure(
    model: LoadedModel,
    depths: Sequence[str],
    num_rows: int,
    rounds: int,
    max_tokens: int,
    work: Work | None,
) -> dict[str, Summary]:
    """All contenders in turns."""
    tokenizer = Tokenizer.load(BUNDLED_MODEL)
    plain = model.without_head()
    contenders = [Contender(OFF, plain, tokenizer, 0, num_rows, max_tokens, work=work)]
    for name in depths:
        depth: DraftTokens = int(name) if name.isdigit() else "auto"
        drafts = "mtp" if name == "mtp" else "mtp,copy"
        parts = model, tokenizer, depth, num_rows, max_tokens
        contenders.append(Contender(name, *parts, work=work, drafts=drafts))
    found = take_turns(contenders, num_rows, rounds, OFF)
    accepted = [f"{name} {s['accepted']:.0%}" for name, s in found.items() if s["num_drafts"]]
    print(f"{num_rows} rows: drafts accepted: {', '.join(accepted)}", file=sys.stderr)
    return found


def table(found: Found) -> str:
    """A row per contender, a column per number of rows; then auto against the best."""
    names = list(next(iter(found.values())))
    rows = [
        [name, *(f"{s['rate']:.0f} ({s['rate_ratio']:.2f} / {s['cpu_ratio']:.2f})" for s in own)]
        for name, own in ((name, [figures[name] for figures in found.values()]) for name in names)
    ]
    last = ["auto over the best depth", *map(over_best, found.values())]
    return render(["depth", *(f"{count} at once" for count in found)], [*rows, last])


def over_best(figures: dict[str, Summary]) -> str:
    """The ratio of auto to the best depth, by wall time and by processor time.

    That of all rounds' time, with the quartiles of the single rounds, which vary far more. The
    best of several depths is also the luckiest in the rounds that it was chosen by. So half of the
    rounds is compared with the depth that was best in the other half, and the other way round.
    """
    depths = [name for name in figures if name not in ("auto", "mtp")]
    rounds = range(len(figures["auto"]["rates"]))
    compared_rates: dict[str, list[tuple[float, float]]] = {"rates": [], "cpu_rates": []}
    found = []
    for compared, others in itertools.permutations((rounds[::2], rounds[1::2])):
        speeds = {each: sum(figures[each]["cpu_rates"][n] for n in others) for each in depths}
        best = max(depths, key=lambda each: speeds[each])
        found.append(best)
        for kind, pairs in compared_rates.items():
            pairs += [(figures["auto"][kind][n], figures[best][kind][n]) for n in compared]
    parts = []
    for pairs in compared_rates.values():
        ours, theirs = (statistics.harmonic_mean(rates) for rates in zip(*pairs))
        low, _, high = statistics.quantiles((a / b for a, b in pairs), n=4)
        parts.append(f"{ours / theirs:.3f} ({low:.2f} to {high:.2f})")
    return f"{', '.join(dict.fromkeys(found))}: {' / '.join(parts)}"


if __name__ == "__main__":
    main()
