"""A self-test as one table, and as JSON."""

import dataclasses
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mtp import __version__
from mlx_mtp.bench.report import rate_and_ratio, render, write_json
from mlx_mtp.console import say
from mlx_mtp.flags import print_error
from mlx_mtp.inspect.found import quantization
from mlx_mtp.kernels import gpu
from mlx_mtp.machine import physical_memory
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.selftest.kernels import KernelCheck, name_of
from mlx_mtp.selftest.products import ROWS, Product

_SHOWN_PARTINGS = 3
_VERDICTS = {True: "ok", False: "FAILED"}


@dataclass(frozen=True, slots=True)
class Parting:
    """Where an answer left the reference; numbers are from 0."""

    prompt: int
    token: int
    gap: float | None  # How far the runner-up was behind; None past the reference's end.


@dataclass(frozen=True, slots=True)
class Equality:
    """An engine's answers beside the references."""

    name: str
    answers: int = 0
    tokens: int = 0  # Of the references.
    identical: int = 0  # Of these, before the answers parted.
    partings: list[Parting] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)  # Share of the chats' drafts, by position.
    ok: bool = False  # Where a difference is a failure, only ties excuse it.
    problem: str | None = None  # Why there are no answers.


@dataclass
class Report:
    """What a self-test found."""

    machine: dict[str, Any]
    model: dict[str, Any]
    kernels: list[KernelCheck]
    strict: bool  # Differences between tokens are failures, but for ties.
    products: list[Product] = field(default_factory=list)
    equality: list[Equality] = field(default_factory=list)
    speed: dict[str, Any] | None = None  # None if the engine failed before, or no time was left.
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0  # Without loading.

    @property
    def failures(self) -> list[str]:
        kernels = [f"{k.name}, {k.shape}, {k.dtype}" for k in self.kernels if not k.ok]
        return kernels + [equality.name for equality in self.equality if not equality.ok]

    def content(self) -> dict[str, Any]:
        failures = self.failures
        return {"ok": not failures, "failures": failures, **dataclasses.asdict(self)}

    def table(self) -> str:
        title = ("mlx-mtp selftest", f"{self.seconds:.0f} s", _VERDICTS[not self.failures])
        return render(("", "result", "check"), [title, *self._rows()], left=3)

    def show(self) -> None:
        """Print the table, and on standard error what failed."""
        say(self.table())
        for failure in self.failures:
            print_error(f"failed: {failure}")

    def write(self, figures: Path | None, whole: Path | None) -> None:
        """What was measured as JSON, and the table with it in a file to paste into an issue."""
        if figures is not None:
            write_json(figures, self.content())
        if whole is not None:
            found = json.dumps(self.content(), indent=1, default=str)
            whole.write_text(f"{self.table()}\n\n```json\n{found}\n```\n")

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        machine, model = self.machine, self.model
        yield "versions", ", ".join(f"{k} {v}" for k, v in machine["versions"].items()), ""
        yield "system", machine["os"], ""
        yield "device", f"{machine['device']}, {machine['memory'] / (1 << 30):.0f} GiB", ""
        yield "backend", f"{machine['backend']}: {machine['details']}", ""
        stored = "" if model["quantization"] is None else f", {model['quantization']}"
        yield "model", f"{model['path']}, {model['model_type']}, {model['dtype']}{stored}", ""
        yield "head", f"from {model['head']}", ""
        if machine["backend"] == "cpu":
            yield "GPU kernels", "no GPU: portable code in use", ""
        for check in self.kernels:
            name, verdict = f"{check.name}: {check.shape}, {check.dtype}", _VERDICTS[check.ok]
            if check.applies:
                text = check.problem or f"off by {check.difference:.1e} at most"
                if check.microseconds is not None:
                    text += f"; {check.microseconds:.0f} us, without it {check.portable:.0f}"
                yield name, text, verdict
            else:
                yield name, "not for these sizes: portable code in use", ""
        if self.products:
            counts = ", ".join(map(str, ROWS))
            yield "products of a layer", f"microseconds (over reading once) at {counts} rows", ""
        for product in self.products:
            pairs = zip(product.microseconds, product.reading, strict=True)
            text = ", ".join(f"{took:.0f} ({took / once:.1f})" for took, once in pairs)
            for what, times in (("mlx", product.theirs), ("kernel, not used", product.unused)):
                text += f"; {what} {', '.join(f'{took:.0f}' for took in times)}" if times else ""
            if product.problem:
                text += f"; kernel not used: {product.problem}"
            if not product.independent:
                text += "; a row's bits depend on the others"
            yield f"{product.name}, {product.layers} layers", text, ""
        for found in self.equality:
            # Where differences are no failure there is nothing to judge, only a rate.
            see = found.ok and found.partings and not self.strict
            name = f"same tokens as plain, one by one: {found.name}"
            text = found.problem or _tokens_text(found)
            yield name, text, "see" if see else _VERDICTS[found.ok]
        for found in self.equality:
            if found.accepted:
                shares = ", ".join(f"{share:.1%}" for share in found.accepted)
                yield f"drafts accepted by position: {found.name}", shares, ""
        for s in self.speed["summaries"] if self.speed else ():
            yield f"tokens/s, {s['concurrency']} at once: {s['subject']}", rate_and_ratio(s, 1), ""
        for what in self.skipped:
            yield "skipped", what, ""


def new_report(model: LoadedModel, kernels: list[KernelCheck], details: str) -> Report:
    """A report with versions, hardware and model; `details` are the backend in words."""
    info, dtype = mx.device_info(), model.causal_lm.model.norm.weight.dtype
    versions = {name: metadata.version(name) for name in ("mlx", "mlx-lm")}
    machine = {
        "versions": {"mlx-mtp": __version__, **versions, "Python": platform.python_version()},
        "os": platform.platform(),
        "device": info.get("device_name") or info.get("architecture") or platform.machine(),
        "memory": info.get("memory_size") or info.get("total_memory") or physical_memory(),
        "backend": gpu.backend() or "cpu",
        "details": details,
    }
    facts = {
        "path": str(model.path),
        "model_type": model.model_type,
        "dtype": name_of(dtype),
        "quantization": quantization(model.config) if "quantization" in model.config else None,
        "head": model.head_source,
    }
    return Report(machine, facts, kernels, model.is_exact() or computes_exactly(dtype))


def computes_exactly(dtype: mx.Dtype) -> bool:
    """Whether products are float32 with all their digits, so that only ties may part two runs."""
    # GPUs round their inputs to TF32 unless MLX_ENABLE_TF32 is 0.
    rounded = gpu.backend() is not None and os.environ.get("MLX_ENABLE_TF32", "1") != "0"
    return dtype == mx.float32 and not rounded


def _tokens_text(found: Equality) -> str:
    shown = []
    for p in found.partings[:_SHOWN_PARTINGS]:
        behind = "past its end" if p.gap is None else f"runner-up {p.gap:.1e} behind"
        shown.append(f"answer {p.prompt + 1}, token {p.token + 1}, {behind}")
    if more := found.partings[_SHOWN_PARTINGS:]:
        shown.append(f"{len(more)} more")
    text = f"{found.identical} of {found.tokens} ({found.answers} answers)"
    return f"{text}; part at {'; '.join(shown)}" if shown else text
