"""`mlx-mtp selftest` on the bundled model, and what it says when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import mlx.core as mx
import pytest

from mlx_mtp import cli
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.kernels.cases import Shape
from mlx_mtp.selftest import kernels
from mlx_mtp.selftest.budget import Budget
from mlx_mtp.speculative import acceptance


@pytest.fixture
def small(monkeypatch):
    """The least that is done: no time is left, and the 80B's layer is a small one."""
    monkeypatch.setattr(Budget, "left", lambda _: 0.0)
    monkeypatch.setattr("mlx_mtp.selftest.commands.QWEN3_NEXT_80B", Shape(1, 32, 2, 8))


def test_the_whole_command(tmp_path):
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "mlx_mtp", "selftest", "--seconds", "20"]
    command += ["--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["ok"] is True and found["failures"] == []
    assert set(found["machine"]["versions"]) == {"mlx-mtp", "mlx", "mlx-lm", "Python"}
    assert found["machine"]["backend"] in ("cpu", "metal", "cuda")
    assert found["machine"]["memory"] > 0
    assert {k["shape"] for k in found["kernels"]} == {"this model", "80B"}
    assert all(k["ok"] and k["difference"] < kernels.TOLERANCE for k in found["kernels"])
    names = [e["name"] for e in found["equality"]]
    assert names == ["MTP off", "MTP, k = 1", "MTP, k = 2", "MTP, k = 3"]
    for depth, equality in enumerate(found["equality"]):
        assert equality["tokens"] > 0 and equality["ok"]
        assert len(equality["accepted"]) == depth
    assert done.stdout.startswith("| ")
    assert "| mlx-mtp selftest " in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("| tokens/s")]
    if found["speed"]["summaries"]:
        assert len(rows) == len(found["speed"]["summaries"])
    else:
        # A machine that is busy with other things.
        assert any("speed" in what for what in found["skipped"])


@pytest.mark.full
def test_little_time_is_told(small, capsys):
    assert cli.main(["selftest"], {}) == 0
    told = capsys.readouterr().out
    assert "5 of 8 prompts (no time left)" in told
    assert "speed (no time left)" in told


def test_a_kernel_that_is_off_fails(small, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(kernels.gpu, "backend", lambda: None)
    monkeypatch.setattr(kernels, "_fold", lambda shape: 0.5)
    file = tmp_path / "found.json"
    assert cli.main(["selftest", "--json", str(file)], {}) == 1
    told = capsys.readouterr()
    assert "off by 5.0e-01 at most" in told.out and "FAILED" in told.out
    assert "failed: fold / mlx-lm's loop, this model, float32" in told.err
    assert json.loads(file.read_text())["ok"] is False


def test_wrong_tokens_fail(small, monkeypatch, capsys):
    """Drafts that are taken though the model disagrees."""

    def credulous(targets, window, **more):
        # What the model draws after each position is made to be what was drafted there.
        drafted = mx.concatenate([window[:, 1:], targets[:, -1:]], axis=1)
        return acceptance.accept(drafted, window, **more)

    monkeypatch.setattr("mlx_mtp.engine.runner.accept", credulous)
    monkeypatch.setattr("mlx_mtp.selftest.commands.computes_exactly", lambda _: True)
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert cli.main(["selftest", "--dtype", "float32"], {}) == 1
    told = capsys.readouterr()
    assert "part at answer" in told.out
    assert "failed: MTP, k = 3" in told.err
    assert "failed: MTP off" not in told.err


def test_an_engine_that_fails_is_a_failed_check(small, monkeypatch, capsys):
    def broken(*_args, **_more):
        raise RuntimeError("the device is ill")

    monkeypatch.setattr(ModelRunner, "_decode", broken)
    assert cli.main(["selftest"], {}) == 1
    told = capsys.readouterr()
    assert "the device is ill" in told.out
    assert "failed: MTP off" in told.err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["/nowhere/at/all"], "neither an existing directory"),
        (["--json", "/nowhere/at/all.json"], "can't be written"),
    ],
)
def test_what_cannot_be_run_is_status_2(capsys, more, said):
    assert cli.main(["selftest", *more], {}) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--seconds", "0"], ["--dtype", "int8"]])
def test_wrong_usage(wrong):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["selftest", *wrong], {})
