"""Whether the default is never slower than no drafts or any other fixed choice, over HTTP."""

import asyncio
import contextlib
import itertools
import math
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from benchmarks import Row, Rows
from benchmarks.servers import ours, running
from mlx_mtp.bench.answer import TimedRead, parse_answer
from mlx_mtp.bench.client import HttpServer
from mlx_mtp.bench.measure import Asking
from mlx_mtp.bench.prompts import PromptSource
from mlx_mtp.errors import BenchError, UsageError
from mlx_mtp.models.hub import BUNDLED_MODEL

_DEFAULT, _NONE = "default", "none"
_FIXED = {
    _NONE: ("--drafts", "none"),
    **{f"mtp {n}": ("--drafts", "mtp", "--mtp-num-draft-tokens", str(n)) for n in range(1, 5)},
    "copy": ("--drafts", "copy"),
}
_CELLS = (
    *("story 1", "story 8", "story 16", "same 4", "edit 8", "random 8"),
    *("story 4", "story 32", "agent 4", "closed 16", "story 8 poisson", "agent 4 poisson"),
)
_QUICK = 6  # number of cells with --quick, the first ones
_REQUESTS = 8  # minimum number of requests per round: fewer streams send several, one after another
_REPEATS = 4  # requests per "same" story, one batch of streams after another
_LOAD = 0.7  # share of the capacity without drafts at which "poisson" requests arrive
_CALIBRATION_SECONDS = 90.0  # maximum time to wait for a server's calibration
# Patterns of the sentences in texts to edit.
_SENTENCES = (
    "{name} found a {color} {thing} near the {place}.",
    "The {color} {animal} walked slowly through the {place}.",
    "Every morning {name} visits the {place} with a {animal}.",
    "In the {place} there is an old {thing} that nobody uses.",
    "The {thing} on the table belongs to {name}.",
    "{name} painted the {thing} {color}.",
)
_EDITED = {
    "name": ("Anna", "Ben", "Clara", "Emil", "Greta", "Ivan", "Leo", "Mina"),
    "color": ("red", "blue", "green", "yellow", "white", "black", "brown"),
    "thing": ("lamp", "map", "bell", "key", "coat", "letter", "clock", "basket"),
    "place": ("forest", "lake", "village", "bridge", "harbor", "castle", "market"),
    "animal": ("fox", "owl", "bear", "otter", "hare", "horse", "goat"),
}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": text,
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}},
        },
    }
    for name, text, key in (
        ("get_weather", "The weather in a city.", "city"),
        ("read_file", "The text of a file.", "path"),
    )
]
Body = dict[str, Any]
Round = dict[str, float]
"""The speed of each choice in one round of a cell."""


class _Cell(NamedTuple):
    work: str
    streams: int
    poisson: bool

    @property
    def name(self) -> str:
        return f"{self.work} {self.streams}{' poisson' * self.poisson}"


class _Client(HttpServer):
    """Sends requests, each after its own wait."""

    def send(self, bodies: Sequence[Body], waits: Sequence[float]) -> tuple[int, float, float]:
        """Returns tokens, seconds until the last answer has ended, and mean seconds per answer."""

        async def one(body: Body, wait: float) -> tuple[int, float]:
            await asyncio.sleep(wait)
            reads, sent = list[TimedRead](), time.perf_counter()
            await self._stream(body, reads)
            return parse_answer(sent, reads, 0).num_tokens, time.perf_counter() - sent

        async def all_of_them() -> list[tuple[int, float]]:
            return await asyncio.gather(*map(one, bodies, waits))

        began = time.perf_counter()
        counts, seconds = zip(*self._runner.run(all_of_them()))
        return sum(counts), time.perf_counter() - began, statistics.mean(seconds)


def never_slower(
    rounds: int = 8,
    cells: tuple[str, ...] = (),
    max_tokens: int = 120,
    quick: bool = False,
    seeds: tuple[int, ...] = (0,),
) -> Rows:
    """The default beside no drafts and every fixed choice, over HTTP, for several kinds of work.

    Each choice has its own server of the bundled model, started anew for each round: servers of the
    same choice differ by up to 9% for as long as they live, so rounds would not be independent.
    Step costs are calibrated in a seed's first round, and kept as a user's are; nothing else is
    warm. All servers get the same greedy requests, one server at a time; the orders of cells and
    servers are drawn anew for each round. A cell is a kind of work and a number of concurrent
    streams: different stories; the same stories, four times each; edits of a text; agents' turns
    with tools; short answers; a head with random weights. In "poisson" cells, requests arrive at
    70% of the capacity of the server without drafts, and the mean time of an answer is compared; in
    other cells, tokens per second. Ratios are geometric means of the rounds, with 95% bounds
    (Student's t). The best fixed choice is picked in every other round and compared in the rounds
    between. With fewer than eight streams, a round has several batches of requests.

    Args:
        rounds: number of rounds, at least 4
        cells: such as "story 16,edit 8"; all by default
        max_tokens: maximum number of tokens of an answer
        quick: measure only six cells
        seeds: seeds of prompts, orders and arrivals; each has all rounds
    """
    if rounds < 4:
        raise UsageError("--rounds is at least 4: the best choice is picked in half of them.")
    chosen = [_parsed(name) for name in cells or _CELLS[: _QUICK if quick else None]]
    speeds: dict[_Cell, list[Round]] = {cell: [] for cell in chosen}
    with tempfile.TemporaryDirectory() as folder:
        for seed, spoiled in itertools.product(seeds, (False, True)):
            group = [cell for cell in chosen if (cell.work == "random") == spoiled]
            if group:
                model = _with_random_head(Path(folder) / "random") if spoiled else BUNDLED_MODEL
                costs = Path(folder) / str(seed)
                yield from _measured(model, costs, group, rounds, max_tokens, seed, speeds)
    summaries = [_summary(cell, speeds[cell]) for cell in chosen]
    yield from summaries
    yield _overall(summaries)


def _parsed(name: str) -> _Cell:
    work, _, rest = name.partition(" ")
    streams, _, poisson = rest.partition(" ")
    if work not in WORK or not streams.isdigit() or poisson not in ("", "poisson"):
        raise UsageError(f"{name!r} is no cell; cells are like {', '.join(_CELLS)}.")
    return _Cell(work, int(streams), bool(poisson))


def _measured(
    model: Path,
    folder: Path,
    cells: Sequence[_Cell],
    rounds: int,
    max_tokens: int,
    seed: int,
    speeds: dict[_Cell, list[Round]],
) -> Iterator[Row]:
    chance = random.Random(seed)
    sources = {cell: PromptSource(chance.getrandbits(30)) for cell in cells}
    asking, capacity = Asking(max_tokens), dict[_Cell, float]()
    for number in range(rounds):
        with contextlib.ExitStack() as stack:
            clients = {
                name: stack.enter_context(_Client(url, asking, model="m", name=name))
                for name, url in _started(model, folder, stack)
            }
            for cell in chance.sample(cells, len(cells)):
                of = _round(cell, clients, sources[cell], chance, capacity, max_tokens)
                speeds[cell].append(of)
                yield {"seed": seed, "round": number + 1, "cell": cell.name} | of


def _round(
    cell: _Cell,
    clients: dict[str, _Client],
    source: PromptSource,
    chance: random.Random,
    capacity: dict[_Cell, float],  # requests per second without drafts; filled when it is needed
    max_tokens: int,
) -> Round:
    """Returns each client's tokens per second or, in a "poisson" cell, answers per second."""
    least = _REPEATS if cell.work == "same" else 2 if cell.poisson else 1
    count = cell.streams * max(least, -(-_REQUESTS // cell.streams))
    bodies = _bodies(cell, source, count, max_tokens)
    at_once = count if cell.poisson else cell.streams
    waits = [0.0] * at_once
    if cell.poisson:
        if cell not in capacity:
            others = _bodies(cell, source, cell.streams, max_tokens)
            _, took, _ = clients[_NONE].send(others, waits)
            capacity[cell] = cell.streams / took
        gaps = (chance.expovariate(_LOAD * capacity[cell]) for _ in bodies)
        waits = [*itertools.accumulate(gaps)]
    of = dict.fromkeys(clients, 0.0)
    for name in chance.sample([*clients], len(clients)):
        parts = [bodies[n : n + at_once] for n in range(0, count, at_once)]
        tokens, seconds, means = zip(*(clients[name].send(part, waits) for part in parts))
        of[name] = 1 / means[0] if cell.poisson else sum(tokens) / sum(seconds)
    return of


def _bodies(cell: _Cell, source: PromptSource, count: int, max_tokens: int) -> list[Body]:
    options = {"model": "m", "temperature": 0, "max_tokens": max_tokens, "stream": True}
    options |= {"stream_options": {"include_usage": True}}
    return [options | body for body in WORK[cell.work](source, count)]


def _started(model: Path, folder: Path, stack: contextlib.ExitStack) -> Iterator[tuple[str, str]]:
    """Start the servers; yields the name and address of each, once it has calibrated its costs."""
    for name, flags in {_DEFAULT: (), **_FIXED}.items():
        costs = folder / f"{model.name} {name}"
        calibrates = name in (_DEFAULT, "copy")
        given = ("--cache-dir", str(costs), *flags)
        given += () if calibrates else ("--calibration-seconds", "0")
        yield name, stack.enter_context(running(ours(name, model, *given)))
        end = time.perf_counter() + _CALIBRATION_SECONDS
        while calibrates and not [*costs.rglob("step-costs-*.json")]:
            if time.perf_counter() > end:
                raise BenchError(f"The server {name!r} has not calibrated its costs in time.")
            time.sleep(0.5)


def _with_random_head(target: Path) -> Path:
    """Returns a copy of the bundled model with random matrices of the same scale in its head."""
    shutil.copytree(BUNDLED_MODEL, target, dirs_exist_ok=True)
    mx.random.seed(0)
    for file in target.glob("*.safetensors"):
        tensors = mx.load(str(file))
        assert isinstance(tensors, dict)
        spoiled = {
            name: mx.random.normal(value.shape).astype(value.dtype) * mx.std(value)
            if "mtp." in name and value.ndim > 1
            else value
            for name, value in tensors.items()
        }
        mx.eval(spoiled)
        mx.save_safetensors(str(file), spoiled, metadata={"format": "pt"})
    return target


def _chat(*texts: str) -> Body:
    roles = itertools.cycle(("user", "assistant"))
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts)]}


def _stories(source: PromptSource, count: int) -> list[Body]:
    return [_chat(prompt.text) for prompt in source.next("story", count)]


def _same(source: PromptSource, count: int) -> list[Body]:
    """Returns requests for the same few stories again and again."""
    prompts = itertools.cycle(source.next("story", count // _REPEATS))
    return [_chat(prompt.text) for prompt in itertools.islice(prompts, count)]


def _edits(source: PromptSource, count: int) -> list[Body]:
    """Returns requests to repeat a text, or to list its sentences, that the model can copy."""
    bodies = []
    for number, prompt in enumerate(source.next("story", count)):
        chance = random.Random(prompt.seed)
        words = {name: chance.sample(each, len(_SENTENCES)) for name, each in _EDITED.items()}
        text = " ".join(
            sentence.format(**{name: each[place] for name, each in words.items()})
            for place, sentence in enumerate(chance.sample(_SENTENCES, len(_SENTENCES)))
        )
        tasks = ("repeat this text exactly", "write these sentences as a numbered list")
        bodies.append(_chat(f"{tasks[number % 2]}: {text}"))
    return bodies


def _agents(source: PromptSource, count: int) -> list[Body]:
    """Returns agents' turns after a tool call and its result, each of which needs another call."""
    bodies = []
    for place, prompt in enumerate(source.next("medium", count)):
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "read_file", "arguments": f'{{"path": "notes{place}.md"}}'},
        }
        bodies.append(
            {
                "tools": _TOOLS,
                "messages": [
                    {"role": "user", "content": f"Read the file notes{place}.md"},
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "call_1", "content": prompt.text},
                    {"role": "assistant", "content": prompt.text.split(". ")[0]},
                    {"role": "user", "content": "What is the weather in Paris in Celsius?"},
                ],
            }
        )
    return bodies


def _closed(source: PromptSource, count: int) -> list[Body]:
    """Returns requests for sums and sorted numbers."""
    bodies = []
    for place, prompt in enumerate(source.next("story", count)):
        numbers = random.Random(prompt.seed).sample(range(1, 100), 5)
        tasks = (
            f"What is {numbers[0]} + {numbers[1]}?",
            f"Sort these numbers: {', '.join(map(str, numbers))}.",
        )
        bodies.append(_chat(tasks[place % 2]))
    return bodies


WORK = {
    "story": _stories,
    "same": _same,
    "edit": _edits,
    "agent": _agents,
    "closed": _closed,
    "random": _stories,
}


def _summary(cell: _Cell, rounds: Sequence[Round]) -> Row:
    """Returns a cell's row: the default over no drafts, and over the best fixed choice."""
    over_none = [math.log(of[_DEFAULT] / of[_NONE]) for of in rounds]
    over_best, picked = [], []
    for compared, others in itertools.permutations((rounds[::2], rounds[1::2])):
        best = max(_FIXED, key=lambda name: sum(math.log(of[name]) for of in others))
        picked.append(best)
        over_best += [math.log(of[_DEFAULT] / of[best]) for of in compared]
    result: Row = {"cell": cell.name, "default": _mean(rounds, _DEFAULT)}
    result |= {name: _mean(rounds, name) / _mean(rounds, _NONE) for name in (*_FIXED,)[1:]}
    result |= {"best": " and ".join(dict.fromkeys(picked))}
    for name, logs in (("over none", over_none), ("over best", over_best)):
        low, high = _bounds(logs)
        mean = math.exp(statistics.mean(logs))
        result |= {name: mean, f"{name}, 95%": f"{low:.3f} to {high:.3f}", f"_{name}": logs}
    return result


def _mean(rounds: Sequence[Round], name: str) -> float:
    return math.exp(statistics.mean(math.log(of[name]) for of in rounds))


def _overall(rows: Sequence[Row]) -> str:
    """Returns a sentence with the geometric mean of all cells, and the worst cell."""
    logs = [statistics.mean(each) for each in zip(*(row["_over best"] for row in rows))]
    low, high = _bounds(logs)
    worst = min(rows, key=lambda row: float(row["over best"]))
    slowest = min(rows, key=lambda row: float(row["over none"]))
    return (
        f"Over the best fixed choice, all cells: {math.exp(statistics.mean(logs)):.3f} "
        f"({low:.3f} to {high:.3f}). The worst cell is {worst['cell']} "
        f"({worst['over best, 95%']}); over none it is {slowest['cell']} "
        f"({slowest['over none, 95%']})."
    )


def _bounds(logs: Sequence[float]) -> tuple[float, float]:
    """Returns the geometric mean's 95% bounds, by Student's t quantile (Fisher's expansion)."""
    n, z = len(logs) - 1, 1.96
    t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    margin = t * statistics.stdev(logs) / math.sqrt(n + 1)
    mean = statistics.mean(logs)
    return math.exp(mean - margin), math.exp(mean + margin)
