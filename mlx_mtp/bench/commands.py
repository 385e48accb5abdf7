"""`mlx-mtp bench`: from the parsed command line to tables and files."""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_mtp.bench.arguments import API_KEY
from mlx_mtp.errors import UsageError

if TYPE_CHECKING:
    from mlx_mtp.bench.offline import ChatTokenizer
    from mlx_mtp.bench.report import Report
    from mlx_mtp.bench.runs import Cell, Subject
    from mlx_mtp.bench.stats import Summary
    from mlx_mtp.models.loaded import LoadedModel


def run_http(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Measure one server or two; returns the exit status.

    Raises:
        UsageError: the command line asks for what can't be.
        BenchError: a server can't be measured; the message says why.
    """
    check(options)
    from mlx_mtp.bench.client import HttpServer
    from mlx_mtp.bench.runs import Asking

    asking = Asking(options.max_tokens, options.temperature, options.ignore_eos, options.timeout)
    urls = options.urls if options.what == "compare" else [options.url]
    models = _for_each(options.model, len(urls), "--model")
    keys = _for_each(_keys(options, environ), len(urls), API_KEY.name)
    # A server compared with itself, or one model of it with another, still needs two names.
    names = ["A", "B"] if len(urls) == 2 else [None]
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(HttpServer(url, asking, api_key=key, model=model, name=name))
            for url, key, model, name in zip(urls, keys, models, names, strict=True)
        ]
        report = measured(options, servers, reference="A" if len(urls) == 2 else None)
    labels = {s.name: f"{s.name}: {s.model} at {s.url}" for s in servers}
    if len(servers) == 1:
        labels = {s.name: f"{s.model} at {s.url}" for s in servers}
    print("\n".join([*labels.values(), ""]))
    print(_table(options.what, report.summaries))
    finish(options, report, labels)
    return 0


def run_offline(
    options: argparse.Namespace,
    model: LoadedModel,
    tokenizer: ChatTokenizer,
    backend: str,
    draft_ids: Sequence[int] | None = None,
) -> int:
    """Measure the engine, MTP off and on; returns the exit status.

    Args:
        options: the command line's.
        model: with its head.
        tokenizer: its own.
        backend: what mlx computes on, in words.
        draft_ids: the only tokens that may be drafted; None: all.

    Raises:
        UsageError: the command line asks for what can't be.
        MlxMtpError: the engine failed.
    """
    from mlx_mtp.bench.offline import OFF, EngineSubject, engine_name, make_engine
    from mlx_mtp.bench.runs import Asking
    from mlx_mtp.bench.tables import contenders_table

    asking = Asking(options.max_tokens, options.temperature, options.ignore_eos)
    rows = max(options.concurrency)
    with contextlib.ExitStack() as stack:
        subjects = []
        for depth in (0, *options.depths):
            engine = make_engine(
                model,
                tokenizer,
                depth,
                max_num_seqs=rows,
                calibration_seconds=options.calibration_seconds,
                draft_ids=draft_ids,
            )
            subject = EngineSubject(engine_name(depth), engine, tokenizer, asking)
            subjects.append(stack.enter_context(subject))
        report = measured(options, subjects, reference=OFF)
    print(contenders_table(report.summaries, "engine"))
    print(f"\nTokens per second of all streams together; in brackets the ratio to {OFF}.")
    print(f"{model.path}, {model.model_type}; {backend}")
    finish(options, report, {})
    return 0


def _table(what: str, summaries: Sequence[Summary]) -> str:
    from mlx_mtp.bench.tables import compare_table, concurrency_table, latency_table

    if what == "compare":
        return compare_table(summaries, "A", "B")
    return (latency_table if what == "latency" else concurrency_table)(summaries)


def check(options: argparse.Namespace) -> None:
    """Find what would fail after the measurement before it.

    Raises:
        UsageError: a file can't be written, or matplotlib is missing.
    """
    from mlx_mtp.bench.plot import check_matplotlib
    from mlx_mtp.bench.report import check_writable

    plot = getattr(options, "plot", None)
    check_writable(options.csv, options.json, plot)
    if plot is not None:
        check_matplotlib()


def measured(
    options: argparse.Namespace, subjects: Sequence[Subject], reference: str | None
) -> Report:
    """Measure, telling on standard error where it stands.

    Args:
        options: the command line's.
        subjects: to measure.
        reference: the subject that ratios are to.
    """
    from mlx_mtp.bench.report import Report
    from mlx_mtp.bench.runs import Order, measure
    from mlx_mtp.bench.stats import summarize
    from mlx_mtp.bench.tables import footnotes

    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    began = datetime.now(UTC).isoformat(timespec="seconds")
    order = Order(tuple(_cells(options)), options.rounds, options.warmups, seed)
    with _progress() as tell:
        waves = measure(subjects, order, tell)
    summaries = summarize(waves, [subject.name for subject in subjects], reference)
    return Report(
        command=f"bench {options.what}",
        settings=_settings(options) | {"seed": seed},
        summaries=summaries,
        waves=waves,
        notes=footnotes(summaries),
        began=began,
    )


def finish(options: argparse.Namespace, report: Report, labels: Mapping[str, str]) -> None:
    """Print what must be known of the figures, and write the files that were asked for.

    Args:
        options: the command line's.
        report: what was measured.
        labels: names of subjects in the plot, where their own say too little.
    """
    for note in report.notes:
        print(f"Note: {note}")
    print(
        f"\n{options.rounds} rounds after {options.warmups} of warm-up, answers of at most "
        f"{options.max_tokens} tokens, temperature {options.temperature:g}, "
        f"--seed {report.settings['seed']}."
    )
    if options.csv is not None:
        report.write_csv(options.csv)
    if options.json is not None:
        report.write_json(options.json)
    if getattr(options, "plot", None) is not None:
        from mlx_mtp.bench.plot import write_plot

        title = f"mlx-mtp {report.command}"
        write_plot(options.plot, report.summaries, title, labels)


def _cells(options: argparse.Namespace) -> list[Cell]:
    from mlx_mtp.bench.runs import Cell

    if options.what == "latency":
        return [Cell(kind, 1) for kind in options.prompts]
    return [Cell(options.prompts, level) for level in options.concurrency]


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    unwritten = {"command", "run", "api_key", "csv", "json", "plot"}
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in unwritten
    }


def _keys(options: argparse.Namespace, environ: Mapping[str, str]) -> list[str] | None:
    """As given, or the one in the environment."""
    variable = environ.get(API_KEY.variable)
    if options.api_key is None and variable is not None:
        return [API_KEY.from_text(variable)]
    given: list[str] | None = options.api_key
    return given


def _for_each(given: Sequence[str] | None, count: int, flag: str) -> list[str | None]:
    """What was given for each server: nothing, one for all, or one each."""
    if given is None or len(given) == 1:
        return [given[0] if given else None] * count
    if len(given) != count:
        raise UsageError(f"{flag} is given {len(given)} times, for {count} server(s).")
    return [*given]


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """One line that is written over on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    width = 0

    def tell(line: str) -> None:
        nonlocal width
        sys.stderr.write("\r" + line.ljust(width))
        sys.stderr.flush()
        width = len(line)

    try:
        yield tell
    finally:
        sys.stderr.write("\r" + " " * width + "\r")
        sys.stderr.flush()
