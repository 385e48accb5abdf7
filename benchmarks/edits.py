"""Edits of files without a model: what copies add to the head's drafts, and cost where they don't.

The prompt of a request holds a file and its change, and the answer is the file after it; both are
real, from the history of a git repository. The policy and the copies are the engine's own. Whether
the head's drafts are right is drawn, at a given rate for each, and a step takes what a price list
says. So this gives tokens per step and the speed to expect of models that can't be run here.

    python -m benchmarks.edits [--repository .] [--files 24] [--rates 0.6 0.75 0.9] [--rows 1 4 16]

Prose is the same with files that have nothing to do with the prompt. Price lists of models on one
H200 (full shapes, context 512, before the kernels for products of few rows) have a step's time by
the tokens that it verifies, and that of a pass of the head.
"""

import argparse
import difflib
import itertools
import random
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mlx_mtp import backend

backend.prepare()

from mlx_mtp.bench.report import check_writable, render, write_json
from mlx_mtp.calibration.calibrator import steps_to_measure
from mlx_mtp.config import MAX_DRAFT_TOKENS
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.speculative.costs import HOST, MTP, CostKey, StepCosts, StepShape
from mlx_mtp.speculative.draft_policy import AdaptiveDrafts, DraftRow
from mlx_mtp.speculative.ngram import NgramSource
from mlx_mtp.text.tokenizer import Tokenizer

_SHORTEST, _LONGEST = 300, 6000  # tokens of a file


class PriceList(NamedTuple):
    """Milliseconds."""

    verify: dict[int, float]  # by the tokens of all rows
    passes: tuple[float, float]  # of the head, at one row and for each row more

    def seconds(self, shape: StepShape) -> float:
        tokens, known = shape.rows + shape.drafts, sorted(self.verify)
        first, more = self.passes
        head = shape.passes * (first + more * (shape.rows - 1))
        above = next((n for n in known[1:] if n >= tokens), known[-1])
        below = known[known.index(above) - 1]
        slope = (self.verify[above] - self.verify[below]) / (above - below)
        return (self.verify[below] + slope * (tokens - below) + head) / 1e3


PRICES = {
    "80B on an H200": PriceList(
        {1: 18.4, 4: 23.2, 16: 38.0, 32: 51.3, 64: 70.1, 128: 116.4}, (0.75, 0.03)
    ),
    "27B on an H200": PriceList(
        {1: 19.8, 2: 25.5, 4: 44.2, 16: 48.5, 32: 64.3, 64: 75.4, 128: 95.7}, (0.75, 0.03)
    ),
    "bundled model, two cores": PriceList(
        {1: 10.0, 2: 12.5, 4: 15.8, 8: 21.0, 16: 32.0, 32: 49.0, 64: 84.0, 128: 150.0}, (1.5, 0.3)
    ),
}


class Text(NamedTuple):
    """A request: what it says, and the answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def edits(repository: Path, count: int, tokenizer: Tokenizer) -> list[Text]:
    """Files before and after commits that changed at least a line and at most 30%."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(repository), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    found: list[Text] = []
    names = ("*.py", "*.md", "*.js")
    for commit in git("log", "--no-merges", "--format=%H", "--", *names).split():
        changed = git("show", "--name-only", "--diff-filter=M", "--format=", commit, "--", *names)
        for name in changed.splitlines()[:1]:
            before, after = (git("show", f"{each}:{name}") for each in (f"{commit}~", commit))
            alike = difflib.SequenceMatcher(None, before.split("\n"), after.split("\n")).ratio()
            answer = tokenizer.encode(after)
            if not (0.7 <= alike < 1.0 and _SHORTEST <= len(answer) <= _LONGEST):
                continue
            lines = difflib.unified_diff(before.split("\n"), after.split("\n"), n=0, lineterm="")
            asked = "\n".join(line for line in lines if line.startswith(("+", "-")))
            prompt = f"{before}\n\nMake this change:\n{asked}\n\nThe whole file:\n"
            found.append(Text(tokenizer.encode(prompt), answer))
        if len(found) >= count:
            break
    return found


class Row(DraftRow):
    """A request that runs: `at` tokens of its answer have come, `unread` with the last step."""

    __slots__ = ("at", "text", "unread")

    def __init__(self, text: Text, source: NgramSource | None) -> None:
        super().__init__()
        self.text, self.at = text, 1
        self.unread: Sequence[int] = ()
        if source is not None:
            self.host["copy"] = source.drafter(text.prompt, None)
            self.host["copy"].extend(text.answer[:1])


class Window(NamedTuple):
    """What the policy reads of a row of a step."""

    drafting: Row
    source: str
    num_verified: int
    num_cached: int


class Result(NamedTuple):
    """Of a replay."""

    tokens: int
    steps: int  # of a row
    seconds: float


def shape_of(cell: CostKey) -> StepShape:
    """The shape of a cell's steps."""
    drafts = int(cell.rows * cell.size)
    return StepShape(cell.rows, drafts, int(cell.size) if cell.kind == MTP else 0)


def replay(
    texts: Sequence[Text],
    num_rows: int,
    prices: PriceList,
    rate: float,
    sources: Sequence[str],
    seed: int = 0,
) -> Result:
    """Answer all, so many at once; the policy reads each step's result a step later, as it does."""
    chance, costs = random.Random(seed), StepCosts()
    costs.load({cell: prices.seconds(shape_of(cell)) for cell in
                steps_to_measure({}, num_rows, (MTP, HOST))})  # fmt: skip
    policy = AdaptiveDrafts(costs, MAX_DRAFT_TOKENS if MTP in sources else 0)
    source = NgramSource(0) if HOST in sources else None
    waiting = iter(texts)
    rows = [Row(text, source) for text in itertools.islice(waiting, num_rows)]
    pending, total = dict.fromkeys(rows, 0), Result(0, 0, 0.0)
    unread: tuple[list[Window], StepShape, float] | None = None
    steady = False
    while rows:
        choice = policy.choose(rows, steady=steady)
        outcomes: list[Window] = []
        came: list[tuple[Row, Sequence[int]]] = []
        for row, wanted, drafts in zip(rows, choice.host, choice.head):
            left = len(row.text.answer) - row.at
            run: Sequence[int] = ()
            if wanted:
                # Behind what the last step has brought, though the policy has not seen that yet.
                run = row.host[row.source].run[len(row.unread) :][: min(wanted, left)]
            count = len(run) or pending[row]
            following = row.text.answer[row.at : row.at + count]
            right = zip(run, following) if run else ()
            hits = [a == b for a, b in right] or [chance.random() < rate for _ in range(count)]
            brought = min([*hits, False].index(False) + 1, left)
            outcomes.append(Window(row, "copy" if run else MTP, count, brought))
            came.append((row, row.text.answer[row.at : row.at + brought]))
            row.at += brought
            row.ahead, pending[row] = count + 1, drafts
        verified = sum(outcome.num_verified for outcome in outcomes)
        shape = StepShape(len(rows), verified, max(choice.head))
        took = prices.seconds(shape)
        tokens = sum(outcome.num_cached for outcome in outcomes)
        total = Result(total.tokens + tokens, total.steps + len(rows), total.seconds + took)
        if unread is not None:
            policy.observe(*unread)
        unread, steady = (outcomes, shape, took), True
        for row, new in came:
            for drafter in row.host.values() if row.unread else ():
                drafter.extend(row.unread)
            row.unread = new
        for place, row in enumerate(rows):
            if row.at == len(row.text.answer) and (text := next(waiting, None)) is not None:
                rows[place], steady = Row(text, source), False
                pending[rows[place]] = 0
        rows = [row for row in rows if row.at < len(row.text.answer)]
    return total


CONTENDERS = {"mtp": (MTP,), "copy": (HOST,), "both": (MTP, HOST)}


def table(
    texts: Sequence[Text], prices: PriceList, given: argparse.Namespace
) -> Iterator[tuple[list[str], dict[str, float]]]:
    """A row for each number of rows and rate: tokens a step of a row, and the speed over mtp's."""
    for num_rows, rate in itertools.product(given.rows, given.rates):
        found = {
            name: replay(texts, num_rows, prices, rate, sources)
            for name, sources in CONTENDERS.items()
        }
        speeds = {name: each.tokens / each.seconds for name, each in found.items()}
        cells = [
            f"{each.tokens / each.steps:.2f}, {speeds[name]:.0f}"
            + (f" ({speeds[name] / speeds['mtp']:.2f})" if name != "mtp" else "")
            for name, each in found.items()
        ]
        figures = {name: speeds[name] / speeds["mtp"] for name in speeds}
        yield [str(num_rows), f"{rate:.0%}", *cells], figures


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repository", type=Path, default=Path("."))
    parser.add_argument("--files", type=int, default=24)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.6, 0.75, 0.9])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--json", type=Path, help="write the ratios here")
    given = parser.parse_args()
    check_writable(given.json)
    texts = edits(given.repository, given.files, Tokenizer.load(BUNDLED_MODEL))
    lengths = [len(text.answer) for text in texts]
    print(f"{len(texts)} files of {min(lengths)} to {max(lengths)} tokens, median ", end="")
    print(f"{statistics.median(lengths):.0f}. Tokens a step, tokens per second (over mtp).")
    # Nothing of the answer is in the prompt but what two files of a project share.
    prose = [Text(a.prompt, b.answer) for a, b in zip(texts, [*texts[7:], *texts[:7]])]
    everything: dict[str, list[dict[str, float]]] = {}
    for name, prices in PRICES.items():
        for kind, each in (("edits", texts), ("another file", prose)):
            rows, figures = zip(*table(each, prices, given), strict=True)
            print(f"\n{name}: {kind}\n\n{render(['rows', 'rate', *CONTENDERS], rows)}", flush=True)
            everything[f"{name}, {kind}"] = list(figures)
    if given.json:
        write_json(given.json, everything)


if __name__ == "__main__":
    main()
