"""Rate over concurrency, as a picture. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_mtp.bench.stats import Summary
from mlx_mtp.errors import UsageError

_INCHES = (11.0, 4.6)
_DPI = 144
_SHIFT = 0.04


def check_matplotlib() -> None:
    """Find out before anything is measured.

    Raises:
        UsageError: it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib.")


def write_plot(
    path: Path, summaries: Sequence[Summary], title: str, labels: Mapping[str, str]
) -> None:
    """A PNG: all streams together on the left, one stream on the right, a line per subject.

    Args:
        path: of the file.
        summaries: of one kind of prompts.
        title: above both.
        labels: more telling names of subjects.

    Raises:
        UsageError: the file can't be written.
    """
    # Without pyplot there is no window, no global state and no display to look for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    together, each = figure.subplots(1, 2)
    subjects = list(dict.fromkeys(s.subject for s in summaries))
    for number, subject in enumerate(subjects):
        own = [s for s in summaries if s.subject == subject]
        # Moved aside a little, or the bars would hide each other.
        shift = 2 ** (_SHIFT * (number - (len(subjects) - 1) / 2))
        _draw(together, each, labels.get(subject, subject), own, shift)
    figure.suptitle(title)
    together.set_title("all streams together (bars: range of the rounds)", fontsize="medium")
    each.set_title("one stream, after its first token (median)", fontsize="medium")
    for axes in (together, each):
        _finish(axes, sorted({s.concurrency for s in summaries}))
    together.legend()
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror}.") from None


def _draw(together: Any, each: Any, label: str, own: Sequence[Summary], shift: float) -> None:
    where = [s.concurrency * shift for s in own]
    below = [s.rate - s.rate_min for s in own]
    above = [s.rate_max - s.rate for s in own]
    together.errorbar(
        where, [s.rate for s in own], yerr=[below, above], marker="o", capsize=3, label=label
    )
    known = [(s.concurrency * shift, s.request_rate) for s in own if s.request_rate is not None]
    each.plot([c for c, _ in known], [rate for _, rate in known], marker="o")


def _finish(axes: Any, levels: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [str(level) for level in levels])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("streams at once")
    axes.set_ylabel("tokens per second")
    axes.grid(alpha=0.3)
