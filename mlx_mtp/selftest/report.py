"""A self-test as one table, and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_mtp.bench.stats import Summary
from mlx_mtp.errors import UsageError
from mlx_mtp.selftest.equality import Equality, Parting
from mlx_mtp.selftest.kernels import KernelCheck
from mlx_mtp.selftest.machine import Machine, ModelFacts
from mlx_mtp.selftest.speed import Speed

_OK, _FAILED = "ok", "FAILED"
_SHOWN_PARTINGS = 3
Row = tuple[str, str, str]


@dataclass(frozen=True)
class Report:
    """What a self-test found.

    Args:
        machine, model: what was tested.
        kernels: the comparisons.
        equality: of each engine.
        strict: differences between tokens are failures, but for ties.
        speed: None if the engine failed before.
        skipped: what was left out, in words.
        seconds: that it took, loading apart.
    """

    machine: Machine
    model: ModelFacts
    kernels: tuple[KernelCheck, ...]
    equality: tuple[Equality, ...]
    strict: bool
    speed: Speed | None
    skipped: tuple[str, ...]
    seconds: float

    @property
    def failures(self) -> list[str]:
        """Names of the checks that failed."""
        kernels = [f"{k.name}, {k.shape}, {k.dtype}" for k in self.kernels if not k.ok]
        engines = [e.name for e in self.equality if not e.ok(strict=self.strict)]
        return kernels + engines

    def table(self) -> str:
        """Markdown, aligned so that it can be read in a terminal too."""
        rows = [("mlx-mtp selftest", f"{self.seconds:.0f} s", _FAILED if self.failures else _OK)]
        for part in (self._about(), self._kernel_rows(), self._equality_rows()):
            rows.extend(part)
        rows.extend(self._speed_rows())
        rows.extend(("skipped", what, "") for what in self.skipped)
        return _render(("", "result", "check"), rows)

    def write_json(self, path: Path) -> None:
        """Everything that is in the table, as numbers.

        Raises:
            UsageError: the file can't be written.
        """
        content: dict[str, Any] = {"ok": not self.failures, "failures": self.failures}
        content |= dataclasses.asdict(self)
        for check, told in zip(self.kernels, content["kernels"]):
            told["ok"] = check.ok
        for found, told in zip(self.equality, content["equality"]):
            told["ok"] = found.ok(strict=self.strict)
        try:
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path} can't be written: {error.strerror}.") from None

    def _about(self) -> Iterator[Row]:
        machine, model = self.machine, self.model
        yield "versions", ", ".join(f"{k} {v}" for k, v in machine.versions.items()), ""
        yield "system", machine.os, ""
        yield "device", f"{machine.device}, {machine.memory_text}", ""
        yield "backend", f"{machine.backend}: {machine.details}", ""
        stored = "" if model.quantization is None else f", {model.quantization}"
        yield "model", f"{model.path}, {model.model_type}, {model.dtype}{stored}", ""
        yield "head", f"from {model.head}", ""

    def _kernel_rows(self) -> Iterator[Row]:
        if self.machine.backend == "cpu":
            yield "GPU kernels", "no GPU: portable code in use", ""
        for check in self.kernels:
            name = f"{check.name}: {check.shape}, {check.dtype}"
            if not check.applies:
                yield name, "not for these sizes: portable code in use", ""
            elif check.problem is not None:
                yield name, check.problem, _FAILED
            else:
                yield name, f"off by {check.difference:.1e} at most", _verdict(check.ok)

    def _equality_rows(self) -> Iterator[Row]:
        for found in self.equality:
            name = f"same tokens as plain, one by one: {found.name}"
            # Where differences are no failure there is nothing to be judged, only a rate.
            judged = self.strict or found.problem is not None or not found.partings
            verdict = _verdict(found.ok(strict=self.strict)) if judged else "see"
            yield name, found.problem or _tokens_text(found), verdict
        for found in self.equality:
            if found.accepted:
                shares = ", ".join(f"{share:.1%}" for share in found.accepted)
                yield f"drafts accepted by position: {found.name}", shares, ""

    def _speed_rows(self) -> Iterator[Row]:
        if self.speed is None:
            return
        for s in self.speed.summaries:
            yield f"tokens/s, {s.concurrency} at once: {s.subject}", _rate(s), ""


def _verdict(ok: bool) -> str:
    return _OK if ok else _FAILED


def _tokens_text(found: Equality) -> str:
    text = f"{found.identical} of {found.tokens} ({found.answers} answers)"
    if not found.partings:
        return text
    shown = "; ".join(_parting_text(p) for p in found.partings[:_SHOWN_PARTINGS])
    more = len(found.partings) - _SHOWN_PARTINGS
    return f"{text}; part at {shown}" + (f"; {more} more" if more > 0 else "")


def _parting_text(parting: Parting) -> str:
    behind = "past its end" if parting.gap is None else f"runner-up {parting.gap:.1e} behind"
    return f"answer {parting.prompt + 1}, token {parting.token + 1}, {behind}"


def _rate(summary: Summary) -> str:
    ratio = "" if summary.rate_ratio is None else f" ({summary.rate_ratio:.2f})"
    return f"{summary.rate:.1f}{ratio}"


def _render(header: Row, rows: Iterable[Row]) -> str:
    # A pipe would end a cell.
    table = [tuple(cell.replace("|", "/") for cell in row) for row in (header, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(3)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths)) + " |" for row in table]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])
