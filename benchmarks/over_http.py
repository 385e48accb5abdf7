"""Concurrent streams over HTTP, requested by the client of `mlx-mtp bench`."""

import contextlib
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx

from benchmarks import Rows, row
from benchmarks.servers import Contender, mlx_lm, ours, running
from benchmarks.timed import medians
from mlx_mtp.bench.answer import TimedAnswer
from mlx_mtp.bench.client import HttpServer
from mlx_mtp.bench.measure import Asking, measure, summarize
from mlx_mtp.bench.prompts import Prompt, PromptSource
from mlx_mtp.bench.report import drafts_by_source, footnotes
from mlx_mtp.models.hub import BUNDLED_MODEL

_OFF = "MTP off"


def concurrency(
    concurrency: tuple[int, ...] = (1, 4, 16), rounds: int = 3, max_tokens: int = 128
) -> Rows:
    """Tokens per second of this server, MTP off and on, beside mlx_lm.server.

    All servers run at the same time with the bundled model in float32. They get requests for the
    same greedy stories in turns, one server at a time. Rates are of all streams together, medians
    of the rounds; ratios are to MTP off in the same round.

    Args:
        concurrency: number of concurrent streams
        max_tokens: maximum number of tokens of an answer
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers = []
        for contender in contenders(Path(folder)):
            url = stack.enter_context(running(contender))
            given = {"model": contender.model, "name": contender.name}
            servers.append(stack.enter_context(HttpServer(url, Asking(max_tokens), **given)))
        waves = measure(servers, [("story", n) for n in concurrency], rounds, warmups=1, seed=0)
    summaries = summarize(waves, [server.name for server in servers], _OFF)
    for of in summaries:
        figures = of["rate"], of["rate_min"], of["rate_max"], of["rate_ratio"], of["accepted"]
        names = "server | at once | tokens/s | least | most | over MTP off | accepted | _all"
        yield row(names, of["subject"], of["concurrency"], *figures, of)
    yield "\n".join([*drafts_by_source(waves), *footnotes(summaries)])


def contenders(folder: Path) -> list[Contender]:
    """Returns the servers of `concurrency`; their files are put into an empty folder."""
    # Step costs that earlier runs measured would make this run hard to repeat.
    fresh = ("--cache-dir", str(folder / "costs"))
    mtp = [
        ours(name, BUNDLED_MODEL, "--enable-mtp", "--mtp-num-draft-tokens", depth, *fresh)
        for name, depth in (*((f"MTP, k = {k}", str(k)) for k in (1, 2, 3)), ("MTP, auto", "auto"))
    ]
    plain = ours(_OFF, BUNDLED_MODEL, "--no-enable-mtp")
    return [mlx_lm(_in_float32(folder / "float32")), plain, *mtp]


def _in_float32(target: Path) -> Path:
    # mlx_lm.server has no --dtype, and mlx runs MoE on the CPU only in float32.
    shutil.copytree(BUNDLED_MODEL, target, ignore=shutil.ignore_patterns("*.safetensors", "*.py"))
    for file in BUNDLED_MODEL.glob("model*.safetensors"):
        tensors = mx.load(str(file))
        assert isinstance(tensors, dict)
        wide = {name: value.astype(mx.float32) for name, value in tensors.items()}
        mx.save_safetensors(str(target / file.name), wide, metadata={"format": "pt"})
    return target


def first_token(starts: int = 5, requests: int = 6, pause: float = 0.2) -> Rows:
    """Time to first token while step costs are measured, over the time when they are not.

    Servers of the bundled model start one after the other, in turns one with an empty folder for
    step costs, which measures them whenever it is idle, and one that measures nothing. Answers of
    the former after it has measured everything are left out.

    Args:
        starts: number of servers of each kind
        requests: maximum number of requests to a server
        pause: seconds before each request
    """
    times: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for _ in range(starts):
        for seconds in ("30", "0"):
            for number, ttft in enumerate(_first_tokens(seconds, requests, pause)):
                times[seconds, number == 0].append(1e3 * ttft)
    for is_first in (True, False):
        measuring, idle = (statistics.median(times[s, is_first] or [0.0]) for s in ("30", "0"))
        count, kind = len(times["30", is_first]), "a server's first" if is_first else "later"
        names = "requests | number | measuring, ms | not, ms | ratio"
        yield row(names, kind, count, measuring, idle, measuring / (idle or 1.0))


def _first_tokens(seconds: str, requests: int, pause: float) -> Iterator[float]:
    with tempfile.TemporaryDirectory() as name:
        flags = ("--cache-dir", name, "--calibration-seconds", seconds)
        with (
            running(ours("ours", BUNDLED_MODEL, *flags)) as url,
            HttpServer(url, Asking(max_tokens=8), model="m") as server,
        ):
            for prompt in PromptSource(0).next("short", requests):
                time.sleep(pause)
                if list(Path(name).rglob("step-costs-*.json")):
                    return  # Everything is measured.
                (answer,) = server.ask([prompt])
                assert answer.ttft is not None
                yield answer.ttft


def beside(
    drafts: tuple[int, ...] = (0, 2),
    short: int = 6,
    long: int = 24_000,
    tokens: int = 200,
    rounds: int = 3,
) -> Rows:
    """Speed of short streams beside a long one, against an ideal from the speed of each alone.

    Each round measures the short streams alone, the long one alone, and both together, while all of
    them decode; rates are tokens per second of one stream. Ideal is a step of the short rows
    followed by a step of the long row.

    Args:
        drafts: drafts per step; 0 is MTP off
        short: number of streams with prompts of some 500 tokens
        long: tokens of the long stream's prompt
        tokens: tokens of each answer
    """
    asking = Asking(tokens, ignore_eos=True)
    few, one = [_of_length(500, n) for n in range(short)], [_of_length(long, short)]
    for depth in drafts:
        flags = ["--calibration-seconds", "0", "--mtp-num-draft-tokens", str(depth)]
        rows = []
        with (
            running(ours("", BUNDLED_MODEL, *(flags if depth else ["--no-enable-mtp"]))) as url,
            HttpServer(url, asking, model="m") as server,
        ):
            _rates(server.ask([*few, *one]))  # Puts the prompts into the prefix cache.
            for _ in range(rounds):
                alone = statistics.mean(_rates(server.ask(few)))
                (long_alone,) = _rates(server.ask(one))
                *both, _ = _rates(server.ask([*few, *one]))
                together = statistics.mean(both)
                ideal = 1 / (1 / alone + 1 / long_alone)
                names = "drafts | short alone | long alone | short, both | of ideal"
                rows.append(row(names, depth, alone, long_alone, together, together / ideal))
                yield rows[-1]
        yield "Medians:"
        yield medians(rows)


def _of_length(tokens: int, seed: int) -> Prompt:
    # One of these words, with its space, has some 1.4 tokens of the bundled model.
    words = " ".join(each.text for each in PromptSource(seed).next("long", -(-tokens // 3000)))
    return Prompt(" ".join(words.split(" ")[: int(tokens / 1.4)]), seed=0)


def _rates(answers: Sequence[TimedAnswer]) -> list[float]:
    """Returns the tokens per second of each answer during the time in which all of them decode."""
    began, ended = max(a.times[0] for a in answers), min(a.times[-1] for a in answers)
    return [
        sum(count for at, count in zip(a.times, a.tokens) if began < at <= ended) / (ended - began)
        for a in answers
    ]
