"""The output of a measurement: tables for a terminal or in Markdown, CSV, JSON and a plot."""

import csv
import dataclasses
import io
import json
import os
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_mtp.bench.answer import Split
from mlx_mtp.bench.measure import Summary, Wave
from mlx_mtp.console import columns, width_of
from mlx_mtp.errors import UsageError

NOTHING = "-"
_TABLES = {
    "latency": (
        "prompts | prompt tokens | answers | TTFT p50 | p95 | per token p50 | p95 | p99 | "
        "tokens a chunk | tokens/s | accepted",
        "{prompts} | {prompt_tokens:.0f} | {answers} | {ttft_p50:ms} | {ttft_p95:ms} | "
        "{itl_p50:ms} | {itl_p95:ms} | {itl_p99:ms} | {tokens_per_chunk:.2f} | "
        "{request_rate:.1f} | {accepted:.1%}",
    ),
    "concurrency": (
        "at once | tokens/s | range | each | TTFT p50 | p95 | per token p50 | p95 | accepted",
        "{concurrency} | {rate:.1f} | {rate_min:.1f} to {rate_max:.1f} | {request_rate:.1f} | "
        "{ttft_p50:ms} | {ttft_p95:ms} | {itl_p50:ms} | {itl_p95:ms} | {accepted:.1%}",
    ),
    "compare": (
        "at once | A tokens/s | B tokens/s | B / A (range) | A TTFT p50 | B TTFT p50 | "
        "B / A (range)",
        "{concurrency} | {of_a[rate]:.1f} | {rate:.1f} | "
        "{rate_ratio:.2f} ({rate_ratio_min:.2f} to {rate_ratio_max:.2f}) | "
        "{of_a[ttft_p50]:ms} | {ttft_p50:ms} | "
        "{ttft_ratio:.2f} ({ttft_ratio_min:.2f} to {ttft_ratio_max:.2f})",
    ),
}
_REMARKS: dict[str, Callable[[Summary], bool]] = {
    "the server sends no usage: its tokens are a count of chunks, and too few where a chunk holds "
    "more than one.": lambda s: s["split"] is Split.CHUNKS,
    "chunks hold several tokens and the server doesn't say how many: time per token is estimated "
    "from the length of each chunk's text (rates are not).": lambda s: s["split"] is Split.TEXT,
    "usage counts fewer tokens than chunks came; the figures are by usage.": (
        lambda s: s["tokens_per_chunk"] < 0.99
    ),
    "some answers came in one chunk: there is no time per token for them.": (
        lambda s: s["gap_p50"] is None
    ),
    "{retries} connections were refused and tried again, which TTFT includes.": (
        lambda s: s["retries"] > 0
    ),
}


class _CellFormatter(string.Formatter):
    """Formats None as "-"; the format `ms` shows seconds as milliseconds."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return NOTHING
        if format_spec == "ms":
            return f"{1000 * value:.{1 if value < 0.1 else 0}f} ms"
        return format(value, format_spec)


def render_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Returns a table, in Markdown unless standard output is a terminal.

    The first `left` columns are aligned left, the others right.
    """
    if (width := width_of()) is not None:
        return columns(header, rows, left, width)
    # A vertical bar would end a cell.
    lines = [[cell.replace("|", "/") for cell in row] for row in (header, *rows)]
    aligned = []
    for number, column in enumerate(zip(*lines)):
        width = max(map(len, column))
        rule, align = "-" * (width - 1), str.ljust if number < left else str.rjust
        rule = f":{rule}" if number < left else f"{rule}:"
        aligned.append([align(cell, width) for cell in (column[0], rule, *column[1:])])
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*aligned))


def summary_table(summaries: Sequence[Summary], what: str) -> str:
    """Returns the table of a `bench` command; for `compare`, A's summaries are the first half."""
    if what == "offline":
        levels = dict.fromkeys(f"{s['concurrency']} at once" for s in summaries)
        rows = []
        for subject in dict.fromkeys(s["subject"] for s in summaries):
            of_subject = [s for s in summaries if s["subject"] == subject]
            drafts, accepted = (
                sum(s[key] for s in of_subject) for key in ("num_drafts", "num_accepted")
            )
            share = f"{accepted / drafts:.1%}" if drafts else NOTHING
            rows.append([subject, *(rate_and_ratio(s, 0) for s in of_subject), share])
        return render_table(["engine", *levels, "drafts accepted"], rows)
    header, row = (line.split(" | ") for line in _TABLES[what])
    if what == "compare":
        half = len(summaries) // 2
        pairs = zip(summaries[:half], summaries[half:], strict=True)
        summaries = [{**b, "of_a": a} for a, b in pairs]
    return render_table(
        header, [[_CellFormatter().vformat(cell, (), s) for cell in row] for s in summaries]
    )


def rate_and_ratio(summary: Summary, digits: int) -> str:
    """Returns tokens per second, and in brackets the ratio to the reference if there is one."""
    ratio = summary["rate_ratio"]
    return f"{summary['rate']:.{digits}f}" + ("" if ratio is None else f" ({ratio:.2f})")


def footnotes(summaries: Sequence[Summary]) -> list[str]:
    """Returns remarks on how the figures were measured, each with the subjects it is about."""
    only_one = len({s["subject"] for s in summaries}) == 1
    notes = []
    for remark, applies in _REMARKS.items():
        if about := [s for s in summaries if applies(s)]:
            names = "; ".join(dict.fromkeys(s["subject"] for s in about))
            text = remark.format(retries=sum(s["retries"] for s in about))
            notes.append(text if only_one else f"{names}: {text}")
    return notes


def drafts_by_source(waves: Sequence[Wave]) -> list[str]:
    """Returns a line per subject and draft source: counts, and the share accepted by position."""
    totals = defaultdict[tuple[str, str], list[Counter[int]]](lambda: [Counter(), Counter()])
    for subject, answer in ((wave.subject, answer) for wave in waves for answer in wave.answers):
        for source in answer.drafts:
            for sums, counts in zip(totals[subject, source], (answer.drafts, answer.accepted)):
                sums.update(dict(enumerate(counts[source])))
    lines = []
    for (subject, source), (drafts, accepted) in sorted(totals.items()):
        shares = " ".join(f"{accepted[n] / drafts[n]:.0%}" for n in sorted(drafts) if drafts[n])
        total = f"{accepted.total():,} of {drafts.total():,}"
        lines.append(f"{subject}: {total} drafts of {source} accepted, by position {shares}.")
    return lines


def check_writable(*paths: Path | None) -> None:
    """Raise UsageError if a file can't be written; call it before the measurement."""
    for path in filter(None, paths):
        if path.is_dir():
            raise UsageError(f"{path} is a directory; give a file.")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"{path} can't be written.")


def write_csv(path: Path, summaries: Sequence[Summary]) -> None:
    """Write a row per summary; None becomes an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(summaries[0]))
    writer.writeheader()
    writer.writerows(summaries)
    _write_bytes(path, text.getvalue().encode())


def write_json(path: Path, content: Any) -> None:
    """Write JSON; values of other types, such as paths, become text."""
    _write_bytes(path, json.dumps(content, indent=1, default=str).encode() + b"\n")


def wave_fields(wave: Wave) -> dict[str, Any]:
    """Returns a wave as a dict for JSON, with times in seconds from its first request."""
    fields = dataclasses.asdict(wave)
    for answer in fields["answers"]:
        answer |= {key: answer[key] - wave.began for key in ("sent", "ended")}
        answer["times"] = [at - wave.began for at in answer["times"]]
    return fields | {"rate": wave.tokens_per_second}


def write_plot(
    path: Path, summaries: Sequence[Summary], title: str, labels: Mapping[str, str]
) -> None:
    """Write a PNG with a line per subject: the rate of all streams, and beside it of one stream."""
    # Without pyplot there is no global state, and no display is needed.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.6), dpi=144, layout="constrained")
    figure.suptitle(title)
    together, each = figure.subplots(1, 2)
    together.set_title("all streams together (bars: range of the rounds)", fontsize="medium")
    each.set_title("one stream, after its first token (median)", fontsize="medium")
    subjects = list(dict.fromkeys(s["subject"] for s in summaries))
    for index, subject in enumerate(subjects):
        points = [s for s in summaries if s["subject"] == subject]
        # Shift each subject a little, so their error bars don't overlap.
        shift = 2 ** (0.04 * (index - (len(subjects) - 1) / 2))
        x = [s["concurrency"] * shift for s in points]
        rates = np.array([(s["rate"], s["rate_min"], s["rate_max"]) for s in points]).T
        bars, label = abs(rates[1:] - rates[0]), labels.get(subject, subject)
        together.errorbar(x, rates[0], yerr=bars, marker="o", capsize=3, label=label)
        each.plot(x, [s["request_rate"] or float("nan") for s in points], marker="o")
    levels = sorted({s["concurrency"] for s in summaries})
    for axes in (together, each):
        axes.set_xscale("log", base=2)
        axes.set_xticks(levels, map(str, levels))
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set(xlabel="streams at once", ylabel="tokens per second")
        axes.grid(alpha=0.3)
    together.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png")
    _write_bytes(path, image.getvalue())


def _write_bytes(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror}.") from None
