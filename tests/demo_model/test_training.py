"""Training: it can be cut, and PyTorch and the server measure the same of its checkpoint."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `train`")

from demo_model.mixture import Settings  # noqa: E402
from demo_model.network.config import PRESETS, smaller  # noqa: E402
from demo_model.network.model import DemoModel  # noqa: E402
from demo_model.report import BEGIN, END  # noqa: E402
from demo_model.shards import ShardSettings  # noqa: E402
from demo_model.trainer import Trainer, TrainingPlan  # noqa: E402

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_a_run_that_is_cut_goes_on(tmp_path):
    torch.manual_seed(0)
    config = smaller(PRESETS["dense"])
    data = ShardSettings(1, Settings(max_tokens=128), "xml", 60, (64, 128))
    sizes = {"tokens": 6 * 256, "batch_tokens": 256, "pool_tokens": 60_000}
    plan = TrainingPlan(minutes=None, **sizes, compile=False, stop_after=None)

    def trainer(plan: TrainingPlan) -> Trainer:
        return Trainer(DemoModel(config), plan, data, tmp_path, 1, print)

    short = trainer(replace(plan, tokens=2 * 256))
    assert short.run()
    assert short.progress.step >= 2
    rest = trainer(plan)
    rest.resume()
    assert rest.progress == short.progress
    for a, b in zip(rest.model.parameters(), short.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert rest.run()
    assert rest.progress.tokens >= 6 * 256


@pytest.mark.full
@pytest.mark.parametrize("preset", PRESETS)
def test_the_whole_way(preset, tmp_path):
    """Train, export, measure by PyTorch and by the engine, whose greedy figures are the same."""
    out = tmp_path / "model"
    readme = tmp_path / "README.md"
    readme.write_text(f"# Model\n{BEGIN}\n{END}\nrest\n")
    small = ("--smoke", "--per-task", "1")
    options = ("--preset", preset, "--device", "cpu", "--workers", "1")
    run("train_demo_model.py", "--output", out, *options, *small)
    run("evaluate_demo_model.py", out, "--readme", readme, *small, status=(0, 1))
    evaluation = json.loads((out / "metrics.json").read_text())["evaluation"]
    ours, theirs = evaluation["torch"], evaluation["engine"]
    assert ours["tasks"].keys() == theirs["tasks"].keys()
    assert len(ours["tasks"]) > 40
    for name in ("all", "open text", "closed tasks"):
        assert ours["tasks"][name]["greedy"] == theirs["tasks"][name]["greedy"]
        assert ours["tasks"][name]["exact"] == theirs["tasks"][name]["exact"]
    assert "| story |" in readme.read_text()
    assert readme.read_text().endswith("rest\n")


def run(script: str, *arguments: object, status: tuple[int, ...] = (0,)) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode in status, done.stdout[-3000:] + done.stderr[-3000:]
