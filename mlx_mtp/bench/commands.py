"""The command `mlx-mtp bench`: runs a measurement and writes its tables and files."""

import argparse
import contextlib
import importlib.util
import os
import platform
import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from mlx_mtp import __version__
from mlx_mtp.bench import report
from mlx_mtp.bench.arguments import CALIBRATION_SECONDS
from mlx_mtp.bench.client import HttpServer
from mlx_mtp.bench.measure import Asking, Subject, measure, summarize
from mlx_mtp.console import hanging, say, width_of
from mlx_mtp.errors import UsageError
from mlx_mtp.options import CLIENT_KEY
from mlx_mtp.prepare import prepare_command
from mlx_mtp.settings import resolve

_NOT_SETTINGS = {"command", "api_key", "csv", "json", "plot", "environ", "run"}


def _check_files(options: argparse.Namespace) -> None:
    """Raise UsageError if a file can't be written or plotted; call it before the measurement."""
    plot = getattr(options, "plot", None)
    report.check_writable(options.csv, options.json, plot)
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib.")


def run_http(options: argparse.Namespace) -> int:
    """Measure one server or two; returns the exit status, or raises UsageError or BenchError."""
    _check_files(options)
    asking = Asking(options.max_tokens, options.temperature, options.ignore_eos, options.timeout)
    comparing = options.what == "compare"
    urls = options.urls if comparing else [options.url]
    # Two names even if a server is compared with itself, or two models of one server.
    names = ["A", "B"] if comparing else [None]
    models = _for_each(options.model, urls, "--model")
    keys = options.api_key
    if keys is None:
        among = argparse.Namespace(command="bench")
        key = resolve(among, [CLIENT_KEY], options.environ).api_key
        keys = None if key is None else [key]
    keys = _for_each(keys, urls, CLIENT_KEY.name)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(HttpServer(url, asking, name=name, model=model, api_key=key))
            for url, name, model, key in zip(urls, names, models, keys, strict=True)
        ]
        prefixes = [f"{server.name}: " if comparing else "" for server in servers]
        labels = {s.name: f"{prefix}{s.model} at {s.url}" for s, prefix in zip(servers, prefixes)}
        _measure_and_report(options, servers, reference="A" if comparing else None, labels=labels)
    return 0


def run_offline(options: argparse.Namespace) -> int:
    """Measure the engine with MTP off and on; returns the exit status, or raises UsageError."""
    seconds = options.calibration_seconds
    if seconds and "auto" not in options.depths:
        raise UsageError("--calibration-seconds is for the depth auto: add it to --depths.")
    options.calibration_seconds = CALIBRATION_SECONDS if seconds is None else seconds
    _check_files(options)
    info = prepare_command(options)

    from mlx_mtp import build
    from mlx_mtp.bench.offline import OFF, engine_subject

    model, tokenizer = build.load(options, enable_mtp=True)
    draft_ids = build.draft_ids(model, tokenizer, options)
    asking = Asking(options.max_tokens, options.temperature, options.ignore_eos)
    more = (max(options.concurrency), options.calibration_seconds, draft_ids, options.exact)
    with contextlib.ExitStack() as stack:
        subjects = [
            stack.enter_context(engine_subject(model, tokenizer, depth, asking, *more))
            for depth in (0, *options.depths)
        ]
        caption = f"\n\nTokens per second of all streams together; in brackets the ratio to {OFF}."
        caption += f"\n{model.path}, {model.model_type}; {info}"
        _measure_and_report(options, subjects, reference=OFF, caption=caption)
    return 0


def _measure_and_report(
    options: argparse.Namespace,
    subjects: Sequence[Subject],
    *,
    reference: str | None = None,
    caption: str = "",
    labels: Mapping[str, str] | None = None,
) -> None:
    """Measure, print `report.summary_table` with notes, and write the files asked for.

    Ratios are relative to the subject `reference`; `labels` are longer names of the subjects.
    """
    if options.what == "latency":
        combinations = [(kind, 1) for kind in options.prompts]
    else:
        combinations = [(options.prompts, level) for level in options.concurrency]
    options.seed = random.getrandbits(32) if options.seed is None else options.seed
    began = datetime.now(UTC).isoformat(timespec="seconds")
    waves = measure(subjects, combinations, options.rounds, options.warmups, options.seed)
    summaries = summarize(waves, [subject.name for subject in subjects], reference)
    notes = report.footnotes(summaries)
    table = report.summary_table(summaries, options.what)
    heading = [*labels.values(), ""] if labels else []
    how = (
        f"\nRounds: {options.rounds}, after {options.warmups} of warm-up; answers of at most "
        f"{options.max_tokens} tokens; temperature {options.temperature:g}; --seed {options.seed}."
    )
    remarks = [*report.drafts_by_source(waves), *(f"Note: {note}" for note in notes)]
    lines = [*heading, table + caption, *(["", *remarks] if remarks else []), how]
    say(hanging("", "\n".join(lines), width_of()))
    if options.csv is not None:
        report.write_csv(options.csv, summaries)
    if options.json is not None:
        content = {
            "mlx_mtp": __version__,
            "command": f"bench {options.what}",
            "began": began,
            "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
            "settings": {k: v for k, v in vars(options).items() if k not in _NOT_SETTINGS},
            "notes": notes,
            "summaries": summaries,
            "waves": [report.wave_fields(wave) for wave in waves],
        }
        report.write_json(options.json, content)
    if getattr(options, "plot", None) is not None:
        report.write_plot(options.plot, summaries, f"mlx-mtp bench {options.what}", labels or {})


def _for_each(values: Sequence[str] | None, urls: Sequence[str], flag: str) -> list[str | None]:
    if values is None or len(values) == 1:
        return [values[0] if values else None] * len(urls)
    if len(values) != len(urls):
        raise UsageError(f"{flag} is given {len(values)} times, for {len(urls)} server(s).")
    return [*values]
