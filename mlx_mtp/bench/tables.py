"""Figures as Markdown tables, aligned so that they can be read in a terminal too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from mlx_mtp.bench.answer import Split
from mlx_mtp.bench.stats import Summary

Column = tuple[str, Callable[[Summary], str]]
NOTHING = "-"


def render(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines of equal width; all columns but the first are flush right."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cell.ljust(width) for cell, width in zip(cells, widths))
        others = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:])]
        return f"| {' | '.join([first, *others])} |"

    rule = [f":{'-' * (widths[0] - 1)}", *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    return "\n".join([line(table[0]), line(rule), *(line(row) for row in table[1:])])


def latency_table(summaries: Sequence[Summary]) -> str:
    """A row for each kind of prompt."""
    return _by_columns(
        summaries,
        ("prompts", lambda s: s.prompts),
        ("prompt tokens", lambda s: _number(s.prompt_tokens, 0)),
        ("answers", lambda s: str(s.answers)),
        ("TTFT p50", lambda s: _ms(s.ttft_p50)),
        ("p95", lambda s: _ms(s.ttft_p95)),
        ("per token p50", lambda s: _ms(s.itl_p50)),
        ("p95", lambda s: _ms(s.itl_p95)),
        ("p99", lambda s: _ms(s.itl_p99)),
        ("tokens a chunk", lambda s: _number(s.tokens_per_chunk, 2)),
        ("tokens/s", lambda s: _number(s.request_rate, 1)),
        ("accepted", lambda s: _share(s.accepted)),
    )


def concurrency_table(summaries: Sequence[Summary]) -> str:
    """A row for each number of streams."""
    return _by_columns(
        summaries,
        ("at once", lambda s: str(s.concurrency)),
        ("tokens/s", lambda s: _number(s.rate, 1)),
        ("range", lambda s: f"{s.rate_min:.1f} to {s.rate_max:.1f}"),
        ("each", lambda s: _number(s.request_rate, 1)),
        ("TTFT p50", lambda s: _ms(s.ttft_p50)),
        ("p95", lambda s: _ms(s.ttft_p95)),
        ("per token p50", lambda s: _ms(s.itl_p50)),
        ("p95", lambda s: _ms(s.itl_p95)),
        ("accepted", lambda s: _share(s.accepted)),
    )


def compare_table(summaries: Sequence[Summary], first: str, second: str) -> str:
    """A row for each number of streams, both servers in it."""
    of_first = {s.cell: s for s in summaries if s.subject == first}
    rows = []
    for b in (s for s in summaries if s.subject == second):
        a = of_first[b.cell]
        rows.append(
            [
                str(b.concurrency),
                _number(a.rate, 1),
                _number(b.rate, 1),
                _ratio(b.rate_ratio, b.rate_ratio_min, b.rate_ratio_max),
                _ms(a.ttft_p50),
                _ms(b.ttft_p50),
                _ratio(b.ttft_ratio, b.ttft_ratio_min, b.ttft_ratio_max),
            ]
        )
    header = ["at once", "A tokens/s", "B tokens/s", "B / A (range)"]
    return render([*header, "A TTFT p50", "B TTFT p50", "B / A (range)"], rows)


def contenders_table(summaries: Sequence[Summary], what: str) -> str:
    """A row for each subject, a column for each number of streams.

    Args:
        summaries: with ratios.
        what: the subjects are.
    """
    cells = list(dict.fromkeys(s.cell for s in summaries))
    header = [what, *(f"{cell.concurrency} at once" for cell in cells), "drafts accepted"]
    rows = []
    for subject in dict.fromkeys(s.subject for s in summaries):
        own = [s for s in summaries if s.subject == subject]
        drafts, accepted = sum(s.num_drafts for s in own), sum(s.num_accepted for s in own)
        share = accepted / drafts if drafts else None
        rows.append([subject, *(_rate_and_ratio(s) for s in own), _share(share)])
    return render(header, rows)


def footnotes(summaries: Sequence[Summary]) -> list[str]:
    """What a reader of the figures must know of how they came about."""
    subjects = dict.fromkeys(s.subject for s in summaries)
    # One remark may hold for several subjects.
    about: dict[str, list[str]] = {}
    for subject in subjects:
        for remark in _remarks([s for s in summaries if s.subject == subject]):
            about.setdefault(remark, []).append(subject)
    if len(subjects) == 1:
        return list(about)
    return [f"{'; '.join(names)}: {remark}" for remark, names in about.items()]


def _remarks(own: Sequence[Summary]) -> Iterator[str]:
    """On one subject's figures."""
    if any(s.split is Split.CHUNKS for s in own):
        yield (
            "the server sends no usage: its tokens are a count of chunks, and too few where a "
            "chunk holds more than one."
        )
    if any(s.split is Split.TEXT for s in own):
        yield (
            "chunks hold several tokens and the server doesn't say how many: time per token is "
            "estimated from the length of each chunk's text (rates are not)."
        )
    if any(s.tokens_per_chunk < 0.99 for s in own):
        yield "usage counts fewer tokens than chunks came; the figures are by usage."
    if any(s.gap_p50 is None for s in own):
        yield "some answers came in one chunk: there is no time per token for them."
    retries = sum(s.retries for s in own)
    if retries:
        yield f"{retries} connections were refused and tried again, which TTFT includes."


def _by_columns(summaries: Sequence[Summary], *columns: Column) -> str:
    rows = [[show(summary) for _, show in columns] for summary in summaries]
    return render([title for title, _ in columns], rows)


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    milliseconds = 1000 * seconds
    return f"{milliseconds:.{1 if milliseconds < 100 else 0}f} ms"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def _ratio(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def _rate_and_ratio(summary: Summary) -> str:
    ratio = "" if summary.rate_ratio is None else f" ({summary.rate_ratio:.2f})"
    return f"{summary.rate:.0f}{ratio}"
