"""The result of a self-test, as a table and as JSON."""

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
from mlx_mtp.bench.report import rate_and_ratio, render_table, write_json
from mlx_mtp.calibration.exactness import Exactness, decide_exact
from mlx_mtp.console import say
from mlx_mtp.flags import print_error
from mlx_mtp.inspect.found import quantization
from mlx_mtp.kernels import gpu
from mlx_mtp.machine import physical_memory
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.selftest.kernels import KernelCheck, name_of
from mlx_mtp.selftest.products import ROWS, Product
from mlx_mtp.selftest.steps import TOKENS

_SHOWN_PARTINGS = 3
_VERDICTS = {True: "ok", False: "FAILED"}


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference of an answer from its reference; numbers count from 0."""

    prompt: int
    token: int
    gap: float | None  # log-probability to the runner-up; None past the reference's end


@dataclass(frozen=True, slots=True)
class Equality:
    """An engine's answers compared with the references."""

    name: str
    answers: int = 0
    tokens: int = 0  # number of the references' tokens
    identical: int = 0  # number of tokens before the first differences
    partings: list[Parting] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)  # share of drafts in chats, by position
    ok: bool = False  # False if a difference is a failure, not a tie
    problem: str | None = None  # why there are no answers


@dataclass
class Report:
    """The result of a self-test."""

    machine: dict[str, Any]
    model: dict[str, Any]
    kernels: list[KernelCheck]
    strict: bool  # True if different tokens are a failure, except for ties
    products: list[Product] = field(default_factory=list)
    equality: list[Equality] = field(default_factory=list)
    windows: list[float] = field(default_factory=list)  # milliseconds per step, by `TOKENS`
    exact: Exactness | None = None  # None: not measured here
    memory: dict[str, Any] | None = None  # memory of the device, in bytes
    speed: dict[str, Any] | None = None  # None if an engine failed, or no time was left
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0  # duration without loading

    @property
    def failures(self) -> list[str]:
        kernels = [f"{k.name}, {k.shape}, {k.dtype}" for k in self.kernels if not k.ok]
        return kernels + [equality.name for equality in self.equality if not equality.ok]

    def as_dict(self) -> dict[str, Any]:
        failures, exact = self.failures, self.exact and self.exact.model_dump()
        fields = dataclasses.asdict(dataclasses.replace(self, exact=None))
        return {"ok": not failures, "failures": failures, **fields, "exact": exact}

    def render(self) -> str:
        title = ("mlx-mtp selftest", f"{self.seconds:.0f} s", _VERDICTS[not self.failures])
        return render_table(("", "result", "check"), [title, *self._rows()], left=3)

    def show(self) -> None:
        """Print the table, and the failures on standard error."""
        say(self.render())
        for failure in self.failures:
            print_error(f"failed: {failure}")

    def write(self, figures: Path | None, whole: Path | None) -> None:
        """Write the figures as JSON, and a file with table and figures to paste into an issue."""
        if figures is not None:
            write_json(figures, self.as_dict())
        if whole is not None:
            content = json.dumps(self.as_dict(), indent=1, default=str)
            whole.write_text(f"{self.render()}\n\n```json\n{content}\n```\n")

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
        if self.windows:
            counts, once = ", ".join(map(str, TOKENS)), self.windows[0]
            text = ", ".join(f"{took:.1f} ({took / once:.2f})" for took in self.windows)
            yield f"a step of {counts} tokens of one row, ms (over 1 token)", text, ""
        yield from self._exact_rows()
        for engine in self.equality:
            # If differences are not failures, the reader has to judge them.
            see = engine.ok and engine.partings and not self.strict
            name = f"same tokens as plain, one by one: {engine.name}"
            text = engine.problem or _tokens_text(engine)
            yield name, text, "see" if see else _VERDICTS[engine.ok]
        for engine in self.equality:
            if engine.accepted:
                shares = ", ".join(f"{share:.1%}" for share in engine.accepted)
                yield f"drafts accepted by position: {engine.name}", shares, ""
        for s in self.speed["summaries"] if self.speed else ():
            text = rate_and_ratio(s, 1)
            if s["ttft_p50"] is not None:
                text += f"; first token after {1e3 * s['ttft_p50']:.0f} ms"
            yield f"tokens/s, {s['concurrency']} at once: {s['subject']}", text, ""
        if memory := self.memory:
            text = f"{memory['limit'] / 1e9:.1f} GB ({memory['source']})"
            yield "memory", text, ""
            if memory["wired"]:
                yield "wired limit", memory["wired"], ""
            text = f"{memory['kept'] / 1e6:+.1f} MB, {memory['peak'] / 1e9:.2f} GB at most before"
            yield "memory after all engines have ended", text, ""
        for what in self.skipped:
            yield "skipped", what, ""

    def _exact_rows(self) -> Iterator[tuple[str, str, str]]:
        if self.exact is None:
            return
        faults = self.exact.faults
        for name in self.exact.checked:
            fault = faults.get(name)
            text = fault or "the same bits alone and beside others"
            yield f"exact: {name}", text, "see" if fault else "ok"
        for rows, cost in self.exact.costs.items():
            yield f"exact: cost of a step of {rows} tokens", f"{cost:+.1%}", ""
        word = "exact" if self.exact.default else "not exact"
        yield "answers, by default", f"{word}, checked in {self.exact.seconds:.1f} s", ""


def new_report(model: LoadedModel, kernels: list[KernelCheck], details: str) -> Report:
    """Returns a report of versions, hardware and model; `details` describes the backend."""
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
    return Report(machine, facts, kernels, decide_exact(model, None) or computes_exactly(dtype))


def computes_exactly(dtype: mx.Dtype) -> bool:
    """Returns True if products have full float32 precision: then runs differ only in ties."""
    # GPUs round inputs to TF32 unless MLX_ENABLE_TF32 is 0.
    rounded = gpu.backend() is not None and os.environ.get("MLX_ENABLE_TF32", "1") != "0"
    return dtype == mx.float32 and not rounded


def _tokens_text(engine: Equality) -> str:
    partings = []
    for p in engine.partings[:_SHOWN_PARTINGS]:
        behind = "past its end" if p.gap is None else f"runner-up {p.gap:.1e} behind"
        partings.append(f"answer {p.prompt + 1}, token {p.token + 1}, {behind}")
    if more := engine.partings[_SHOWN_PARTINGS:]:
        partings.append(f"{len(more)} more")
    text = f"{engine.identical} of {engine.tokens} ({engine.answers} answers)"
    return f"{text}; part at {'; '.join(partings)}" if partings else text
