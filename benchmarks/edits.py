"""File edits without a model: real copied drafts, a simulated head, and simulated time."""

import difflib
import itertools
import random
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import Row, Rows
from mlx_mtp.calibration.calibrator import steps_to_measure
from mlx_mtp.config import MAX_DRAFT_TOKENS
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.speculative.costs import HOST, MTP, StepCosts, StepShape
from mlx_mtp.speculative.draft_policy import AdaptiveDrafts, HeadWindow, RowDrafting
from mlx_mtp.speculative.ngram import NgramSource
from mlx_mtp.text.tokenizer import Tokenizer

_SHORTEST, _LONGEST = 300, 6000  # tokens of a file
_SOURCES = {"head": (MTP,), "copies": (HOST,), "both": (MTP, HOST)}


class _Prices(NamedTuple):
    """Milliseconds of the parts of a step."""

    verify: dict[int, float]  # by the number of tokens of all rows
    passes: tuple[float, float] = (0.75, 0.03)  # of a head pass: one row, and each further row
    wait: float = 3.0  # for the host, if the step before was read first; assumed

    def seconds(self, shape: StepShape) -> float:
        tokens, known = shape.rows + shape.drafts, sorted(self.verify)
        first, more = self.passes
        head = shape.passes * (first + more * (shape.rows - 1))
        above = next((n for n in known[1:] if n >= tokens), known[-1])
        below = known[known.index(above) - 1]
        slope = (self.verify[above] - self.verify[below]) / (above - below)
        return (self.verify[below] + slope * (tokens - below) + head + shape.sync * self.wait) / 1e3


_CPU = {1: 10.0, 2: 12.5, 4: 15.8, 8: 21.0, 16: 32.0, 32: 49.0, 64: 84.0, 128: 150.0}
_PRICES = {
    "80B on an H200": _Prices({1: 18.4, 4: 23.2, 16: 38.0, 32: 51.3, 64: 70.1, 128: 116.4}),
    "27B on an H200": _Prices({1: 19.8, 2: 25.5, 4: 44.2, 16: 48.5, 32: 64.3, 64: 75.4, 128: 95.7}),
    "bundled model, two cores": _Prices(_CPU, (1.5, 0.3)),
}


class _Text(NamedTuple):
    """A request's prompt and its answer, as token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def edits(
    repository: Path = Path("."),
    files: int = 24,
    rates: tuple[float, ...] = (0.6, 0.75, 0.9),
    rows: tuple[int, ...] = (1, 4, 16),
) -> Rows:
    """Gain of copied drafts beside the head's drafts in file edits, in simulated time.

    A request's prompt holds a file and a change, and its answer is the changed file; both are real,
    from the history of a git repository. The draft policy and the copied drafts are the engine's
    own. Whether a draft of the head is right is drawn at random, and a step's time is taken from a
    price list: the time by the number of verified tokens, and that of a head pass. The lists of one
    H200 were measured at full shapes and context 512, before the kernels for products of few rows.
    Columns are tokens per step and row, tokens per second with the head alone, and ratios to that
    speed. "another file" is an answer that has nothing to do with the prompt.

    Args:
        files: number of files
        rates: probabilities that a draft of the head is right
        rows: number of concurrent answers
    """
    texts = _edits(repository, files, Tokenizer.load(BUNDLED_MODEL))
    lengths = [len(text.answer) for text in texts]
    ends = f"{min(lengths)} to {max(lengths)} tokens, median {statistics.median(lengths):.0f}"
    yield f"{len(texts)} files of {ends}"
    # The answer shares with the prompt only what two files of one project have in common.
    others = [_Text(a.prompt, b.answer) for a, b in zip(texts, [*texts[7:], *texts[:7]])]
    kinds = {"edits": texts, "another file": others}
    for name, kind, num_rows, rate in itertools.product(_PRICES, kinds, rows, rates):
        steps, speeds = dict[str, float](), dict[str, float]()
        for drafts, sources in _SOURCES.items():
            replayed = _replay(kinds[kind], num_rows, _PRICES[name], rate, sources)
            steps[f"{drafts}, a step"], speeds[drafts] = replayed
        line: Row = {"prices": name, "answer": kind, "rows": num_rows, "rate": rate}
        over = {f"{d} over head": speeds[d] / speeds["head"] for d in ("copies", "both")}
        yield line | steps | {"head, tokens/s": speeds["head"]} | over


def _edits(repository: Path, count: int, tokenizer: Tokenizer) -> list[_Text]:
    """Returns files before and after commits that changed at least one line and at most 30%."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(repository), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    texts: list[_Text] = []
    names = ("*.py", "*.md", "*.js")
    for commit in git("log", "--no-merges", "--format=%H", "--", *names).split():
        changed = git("show", "--name-only", "--diff-filter=M", "--format=", commit, "--", *names)
        for name in changed.splitlines()[:1]:
            before, after = (git("show", f"{each}:{name}") for each in (f"{commit}~", commit))
            old, new = before.split("\n"), after.split("\n")
            alike = difflib.SequenceMatcher(None, old, new).ratio()
            answer = tokenizer.encode(after)
            if not (0.7 <= alike < 1.0 and _SHORTEST <= len(answer) <= _LONGEST):
                continue
            lines = difflib.unified_diff(old, new, n=0, lineterm="")
            change = "\n".join(line for line in lines if line.startswith(("+", "-")))
            prompt = f"{before}\n\nMake this change:\n{change}\n\nThe whole file:\n"
            texts.append(_Text(tokenizer.encode(prompt), answer))
        if len(texts) >= count:
            break
    return texts


_Result = tuple[list[HeadWindow], StepShape, float]


class _Row(RowDrafting):
    """A running request with `at` tokens of its answer; `in_flight` are those of the last step."""

    __slots__ = ("at", "in_flight", "pending", "text")

    def __init__(self, text: _Text, source: NgramSource | None) -> None:
        super().__init__()
        self.text, self.at, self.pending = text, 1, 0  # pending drafts of the head
        self.in_flight: Sequence[int] = ()
        if source is not None:
            self.host["copy"] = source.drafter(text.prompt, None)
            self.host["copy"].extend(text.answer[:1])


def _replay(
    texts: Sequence[_Text], num_rows: int, prices: _Prices, rate: float, sources: Sequence[str]
) -> tuple[float, float]:
    """Answer `texts`, `num_rows` at a time; returns tokens per step and row, and per second.

    As in the engine, the policy reads the result of a step after the next step is launched, unless
    its choice is sync.
    """

    chance, costs = random.Random(0), StepCosts()
    cells = steps_to_measure({}, num_rows, (MTP, HOST))
    costs.load_table({cell: prices.seconds(cell.shape) for cell in cells})
    policy = AdaptiveDrafts(costs, MAX_DRAFT_TOKENS if MTP in sources else 0)
    source = NgramSource(0) if HOST in sources else None
    waiting = iter(texts)
    rows = [_Row(text, source) for text in itertools.islice(waiting, num_rows)]
    tokens, steps, time, steady = 0, 0, 0.0, False
    unread: list[tuple[_Result, list[tuple[_Row, Sequence[int]]]]] = []
    alone = False  # True if the last step was read before this one was planned
    while rows:
        choice = policy.choose(rows, steady=steady)
        windows: list[HeadWindow] = []
        verified, came = list[int](), list[Sequence[int]]()
        for row, to_copy, drafts in zip(rows, choice.host, choice.head):
            left = len(row.text.answer) - row.at
            run: Sequence[int] = ()
            if to_copy:
                # The copy begins after the last step's tokens, which the policy hasn't seen yet.
                run = row.host[row.source].next_run[len(row.in_flight) :][: min(to_copy, left)]
            count = len(run) or row.pending
            following = row.text.answer[row.at : row.at + count]
            hits = [a == b for a, b in zip(run, following)]
            hits = hits or [chance.random() < rate for _ in range(count)]
            gained = min([*hits, False].index(False) + 1, left)
            verified.append(count)
            if not run:
                windows.append((count, gained - 1))
            came.append(row.text.answer[row.at : row.at + gained])
            row.at += gained
            row.ahead, row.pending = (0 if choice.sync else count + 1), drafts
        shape = StepShape(len(rows), sum(verified), max(choice.head), max(verified), alone)
        seconds = prices.seconds(shape)
        tokens += sum(map(len, came))
        steps, time = steps + len(rows), time + seconds
        unread.append(((windows, shape, seconds), [*zip(rows, came)]))
        alone, steady = choice.sync, True
        while len(unread) > (not alone):
            result, emitted = unread.pop(0)
            policy.observe(*result)
            for row, new in emitted:
                row.in_flight = ()
                row.unread += new
        for row, new in unread[0][1] if unread else ():
            row.in_flight = new
        for place, row in enumerate(rows):
            if row.at == len(row.text.answer) and (text := next(waiting, None)) is not None:
                rows[place], steady = _Row(text, source), False
        rows = [row for row in rows if row.at < len(row.text.answer)]
    return tokens / steps, tokens / time
