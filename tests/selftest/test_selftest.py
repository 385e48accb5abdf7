"""`mlx-mtp selftest`: the bundled model passes, and faults are found and named."""

import argparse
import json
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mtp.bench import measure
from mlx_mtp.cli import main as cli
from mlx_mtp.engine.request import RequestOutput
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.kernels import gpu
from mlx_mtp.kernels.gdn_types import GDNShape
from mlx_mtp.models.gemm.routes import Routes, set_routes
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.selftest import commands, kernels
from mlx_mtp.selftest import report as reports
from mlx_mtp.selftest.commands import Reference, compare, measure_speed
from mlx_mtp.selftest.kernels import KernelCheck, check_kernels
from mlx_mtp.selftest.products import measure_products
from mlx_mtp.selftest.report import Equality, Parting, Report
from mlx_mtp.selftest.run import run_selftest
from mlx_mtp.speculative import verify
from mlx_mtp.text.tokenizer import Tokenizer
from tests.bench.test_measure import Scripted


@pytest.fixture
def selftest(demo_model, monkeypatch, capsys, tmp_path):
    """Returns a function: status, output, errors and JSON of the self-test; by default with 0 s."""
    monkeypatch.setattr(kernels, "QWEN3_NEXT_80B", GDNShape(1, 32, 2, 8))
    monkeypatch.setattr(commands, "_COMPARED_TOKENS", 24)
    path = tmp_path / "found.json"

    def run(seconds: str | None = None) -> tuple[int, str, str, dict]:
        if seconds is None:
            options = argparse.Namespace(seconds=0.0, json=path, report=None)
            status = run_selftest(options, demo_model, Tokenizer.load(BUNDLED_MODEL), "mlx on it")
        else:
            files = ["--json", str(path), "--report", str(tmp_path / "report.md")]
            status = cli.main(["selftest", "--seconds", seconds, *files], {})
        shown = capsys.readouterr()
        return status, shown.out, shown.err, json.loads(path.read_text())

    return run


def test_the_bundled_model_passes(selftest, tmp_path):
    status, out, err, found = selftest("2")
    assert status == 0 and err.splitlines()[0] == "selftest: kernels ...", out
    assert found["ok"] is True and found["failures"] == []
    assert set(found["machine"]["versions"]) == {"mlx-mtp", "mlx", "mlx-lm", "Python"}
    assert {k["shape"] for k in found["kernels"]} == {"this model", "80B"}
    assert all(k["ok"] and k["difference"] < gpu.TOLERANCE for k in found["kernels"])
    assert found["products"][0]["name"].startswith("4 of 16 experts, 256 -> 64, float32")
    assert all(len(p["microseconds"]) == len(p["reading"]) == 5 for p in found["products"])
    assert "microseconds (over reading once) at 1, 2, 4, 8, 16 rows" in out
    assert len(found["windows"]) == 5 and found["exact"] is None
    # A CPU's copies of weights (`kernels.cpu`) are made in the first step, and kept.
    assert found["memory"]["kept"] < 1 << 23 < found["memory"]["limit"]
    names = [e["name"] for e in found["equality"]]
    assert names == ["MTP off", "MTP, k = 1", "MTP, k = 2", "MTP, k = 3"]
    for depth, equality in enumerate(found["equality"]):
        assert equality["tokens"] > 0 and equality["ok"]
        assert len(equality["accepted"]) == depth
    assert out.startswith("| ") and "| mlx-mtp selftest " in out
    table, _, rest = (tmp_path / "report.md").read_text().partition("\n\n```json\n")
    assert table + "\n" == out and json.loads(rest.removesuffix("\n```\n")) == found


def test_without_time_little_is_done_and_a_wrong_token_is_found(selftest, monkeypatch):
    """The wrong token comes from accepting a draft that the model disagrees with."""

    def credulous(targets, window, **more):
        # The model's token after each position is replaced by the draft there.
        drafted = mx.concatenate([window[:, 1:], targets[:, -1:]], axis=1)
        return verify.verify_window(drafted, window, **more)

    monkeypatch.setattr("mlx_mtp.engine.runner.verify_window", credulous)
    monkeypatch.setattr(reports, "computes_exactly", lambda _: True)
    monkeypatch.setattr(commands, "_DEPTHS", (0, 3, "auto"))
    status, out, err, found = selftest()
    assert status == 1 and "part at answer" in out
    assert err.endswith("\nmlx-mtp: failed: MTP, k = 3\n")
    skipped = ["5 of 8 prompts", "MTP, auto", "speed"]
    assert found["skipped"] == [f"{what} (no time left)" for what in skipped]


def test_an_engine_that_fails_is_a_failed_check(selftest, monkeypatch):
    def broken(*_args, **_more):
        raise RuntimeError("the device is ill")

    monkeypatch.setattr(ModelRunner, "_decode", broken)
    status, out, err, _ = selftest()
    assert status == 1 and "the device is ill" in out
    assert err.endswith("\nmlx-mtp: failed: MTP off\n")


def compared(answers, references, are_chats=(True, True), strict=True) -> Equality:
    """Returns the result for scripted answers: steps of tokens, drafts and accepted drafts."""
    prompts = [((1,), is_chat) for _, is_chat in zip(answers, are_chats)]

    def output(tokens, drafts, accepted):
        counts = {"num_draft_tokens": drafts, "num_accepted_tokens": accepted}
        return RequestOutput("", tuple(tokens), **counts)

    found = [(None, [output(*step) for step in steps]) for steps in answers]
    subject = SimpleNamespace(name="E", ask_token_ids=lambda _: found)
    return compare(subject, prompts, references, strict)


def test_equal_answers_and_what_was_accepted():
    answers = [[([1], 0, 0), ([2, 3], 2, 1), ([4], 2, 0)], [([5, 6, 7], 2, 2)]]
    references = [Reference((1, 2, 3, 4), (9,) * 4), Reference((5, 6, 7), (9,) * 3)]
    equal = Equality("E", 2, 7, 7, [], [2 / 3, 1 / 3], ok=True)
    assert compared(answers, references) == equal
    # Prompts of raw tokens don't count in the acceptance rate.
    assert compared(answers, references, (False, True)).accepted == [1.0, 1.0]


@pytest.mark.parametrize(
    ("got", "at", "gap"), [([1, 9, 3], 1, 0.5), ([1, 2], 2, 2e-5), ([1, 2, 3, 4], 3, None)]
)
def test_where_answers_part(got, at, gap):
    for strict in (True, False):
        found = compared([[(got, 0, 0)]], [Reference((1, 2, 3), (0.1, 0.5, 2e-5))], strict=strict)
        assert (found.partings, found.identical) == ([Parting(0, at, gap)], at)
        # If all digits are computed, only a tie excuses a difference.
        assert found.ok == (gap == 2e-5 or not strict)


@pytest.mark.parametrize(
    ("left", "max_tokens", "rows"), [(20.5, 20, [1, 2, 4]), (9.0, 17, [1, 2]), (7.1, 35, [1])]
)
def test_speed_is_measured_as_far_as_the_time_allows(monkeypatch, left, max_tokens, rows):
    """The time left limits tokens and rows, at 10 tokens per second for each of two engines."""
    for module in (commands, measure):
        monkeypatch.setattr(module, "perf_counter", lambda: 0.0)
    subjects = [Scripted("MTP off", []), Scripted("MTP, k = 1", [])]
    found = report()
    measure_speed(found, subjects, 10.0, deadline=left)
    left_out = [n for n in (2, 4) if n not in rows]
    assert found.skipped == [f"speed at {n} rows (no time left)" for n in left_out]
    assert {(s.asking.max_tokens, s.asking.ignore_eos) for s in subjects} == {(max_tokens, True)}
    assert [s["concurrency"] for s in found.speed["summaries"]] == rows * 2
    assert "| tokens/s, 1 at once: MTP, k = 1 " in found.render()


def test_a_wrong_portable_form_is_found(monkeypatch):
    monkeypatch.setattr(kernels.gpu, "backend", lambda: None)
    shapes = {"small": GDNShape(1, 32, 2, 8)}
    assert all(check.ok for check in check_kernels(shapes))
    right = kernels.portable.run_chunked

    def wrong(q, window, state, **more):
        y, after, pending = right(q, window, state, **more)
        return y, 1.001 * after, pending

    monkeypatch.setattr(kernels.portable, "run_chunked", wrong)
    assert [check.ok for check in check_kernels(shapes)] == [False, True]
    for difference, ok in ((9e-5, True), (1.1e-4, False), (float("nan"), False)):
        monkeypatch.setattr(kernels, "_fold", lambda _, off=difference: off)
        assert [check.ok for check in check_kernels(shapes)] == [False, ok]


def report(**more) -> Report:
    machine = {"versions": {"mlx": "1"}, "os": "os", "device": "a | b", "memory": 8 << 30}
    machine |= {"backend": "cuda", "details": "mlx on CUDA"}
    model = {"path": "m", "model_type": "qwen3_next", "dtype": "bfloat16", "head": "mtp"}
    model |= {"quantization": "4 bits, groups of 64"}
    return Report(machine, model, **{"kernels": [], "strict": False} | more)


def test_the_table_and_the_failures():
    """All lines have the same width, and each failure is named."""
    fine = KernelCheck("k", "80B", "bfloat16", True, 2e-6, microseconds=12.4, portable=30.0)
    other = KernelCheck("k", "x", "f", True, applies=False)
    bad = KernelCheck("inputs kernel", "80B", "bfloat16", False, problem="error: x")
    parted = Equality("MTP, k = 1", 2, 96, 90, [Parting(1, 4, 0.125)] * 5, [0.9, 0.8], ok=True)
    ill = Equality("MTP, k = 2", problem="ill")
    skipped = ["speed (no time left)"]
    found = report(kernels=[fine, other, bad], equality=[parted, ill], skipped=skipped)
    assert found.failures == ["inputs kernel, 80B, bfloat16", "MTP, k = 2"]
    lines = found.render().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert all(line.count("|") == 4 for line in lines)
    for words in (
        "a / b, 8 GiB",
        "m, qwen3_next, bfloat16, 4 bits, groups of 64",
        "90 of 96 (2 answers); part at answer 2, token 5, runner-up 1.2e-01 behind",
        "90.0%, 80.0%",
        "off by 2.0e-06 at most; 12 us, without it 30",
        "not for these sizes: portable code in use",
        "speed (no time left)",
        "error: x",
        "ill",
    ):
        assert words in found.render()


class Alone(nn.Linear):
    def __call__(self, x):
        return (x[..., None, :] * self.weight).sum(-1)


class Coupled(Alone):
    def __call__(self, x):
        return super().__call__(x) + len(x)


@pytest.mark.parametrize("kind", [Alone, Coupled])
def test_a_row_that_depends_on_others_is_told(kind):
    layer = kind(32, 16, bias=False)
    if kind is Coupled:
        set_routes(layer, Routes(kernel=range(1, 17)))
    model = SimpleNamespace(model=layer, output_layer=None, dtype=mx.float32)
    (found,) = measure_products(model, float("inf"))
    assert (found.name, found.layers) == ("32 -> 16, float32", 1)
    assert found.independent == (kind is Alone)
    assert min(found.microseconds + found.reading) > 0
    assert len(found.theirs) == (5 if kind is Coupled else 0)
    assert min(found.theirs, default=1.0) > 0
