"""A measurement as files: CSV of the summaries, JSON of all that was measured."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_mtp import __version__
from mlx_mtp.bench.runs import Wave
from mlx_mtp.bench.stats import Summary
from mlx_mtp.errors import UsageError


@dataclass(frozen=True)
class Report:
    """One measurement.

    Args:
        command: what was run, as in "bench latency".
        settings: what it was told, the run's seed included; never a key.
        summaries: its figures.
        waves: what they come from.
        notes: what a reader must know.
        began: date and time, ISO 8601.
    """

    command: str
    settings: Mapping[str, Any]
    summaries: Sequence[Summary]
    waves: Sequence[Wave]
    notes: Sequence[str]
    began: str

    def write_csv(self, path: Path) -> None:
        """A row for each summary, its fields the columns; what is None is empty.

        Raises:
            UsageError: the file can't be written.
        """
        names = [f.name for f in dataclasses.fields(Summary)]
        with _writing(path) as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(dataclasses.asdict(summary) for summary in self.summaries)

    def write_json(self, path: Path) -> None:
        """Everything, each answer's times included.

        Raises:
            UsageError: the file can't be written.
        """
        content = {
            "mlx_mtp": __version__,
            "command": self.command,
            "began": self.began,
            "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
            "settings": dict(self.settings),
            "notes": list(self.notes),
            "summaries": [dataclasses.asdict(summary) for summary in self.summaries],
            "waves": [_wave(wave) for wave in self.waves],
        }
        with _writing(path) as file:
            json.dump(content, file, indent=1)
            file.write("\n")


def check_writable(*paths: Path | None) -> None:
    """Find out now, not after the measurement.

    Raises:
        UsageError: one of them can't be written.
    """
    for path in paths:
        if path is None:
            continue
        folder = path.parent
        if path.is_dir():
            raise UsageError(f"{path} is a directory; give a file.")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise UsageError(f"{path} can't be written.")


def _wave(wave: Wave) -> dict[str, Any]:
    """Times of the answers are counted from the wave's first request."""
    began = min(answer.sent for answer in wave.answers)
    answers = []
    for answer in wave.answers:
        fields = dataclasses.asdict(answer)
        fields["sent"] -= began
        fields["ended"] -= began
        fields["times"] = [at - began for at in answer.times]
        answers.append(fields)
    return {
        "subject": wave.subject,
        "prompts": wave.cell.kind,
        "concurrency": wave.cell.concurrency,
        "round": wave.round,
        "rate": wave.rate,
        "answers": answers,
    }


def _writing(path: Path) -> Any:
    try:
        return path.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror}.") from None
