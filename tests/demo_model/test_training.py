"""Training: it learns, can be cut, and its checkpoint says in the server what it learned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `train`")

from demo_model.export import load_published, write_checkpoint  # noqa: E402
from demo_model.mixture import Settings  # noqa: E402
from demo_model.network.config import PRESETS, smaller  # noqa: E402
from demo_model.network.loss import LossSettings, training_loss  # noqa: E402
from demo_model.network.model import DemoModel  # noqa: E402
from demo_model.optimizer import Optimizer  # noqa: E402
from demo_model.shards import ShardSettings  # noqa: E402
from demo_model.tokenizer import END_ID, load  # noqa: E402
from demo_model.trainer import Trainer, TrainingPlan  # noqa: E402
from mlx_mtp.models.loader import load_model  # noqa: E402
from tests.harness import Driver, greedy, plain, request  # noqa: E402

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]
TEXT = "Once upon a time, a brave fox named Mia lived near the old mill and counted the stars."


@pytest.mark.full
@pytest.mark.parametrize("name", PRESETS)
def test_a_text_learned_by_heart_comes_out_of_the_server(name, tmp_path):
    """Loss falls; the engine says the text with MTP on as with MTP off, and drafts are accepted."""
    torch.manual_seed(0)
    model = DemoModel(smaller(PRESETS[name]))
    ids = [*load().encode(TEXT, add_special_tokens=False).ids, END_ID]
    row = torch.full((1, 64), 4087)
    row[0, : len(ids)] = torch.tensor(ids)
    segments = (torch.arange(64) < len(ids)).int().unsqueeze(0)
    optimizer = Optimizer(model)
    losses = []
    for number in range(80):
        loss, figures = training_loss(model, row, segments, segments.float(), LossSettings())
        loss.backward()
        optimizer.step(min(1.0, (80 - number) / 40), number)
        losses.append(float(figures["main"]))
    assert losses[-1] < 0.2 < 5 < losses[0]
    write_checkpoint(model.eval(), tmp_path)
    loaded = load_model(tmp_path, enable_mtp=True)
    wanted = request("a", ids[:4], greedy(40))
    driver = Driver(loaded, vocab_size=4096, stop_ids=(END_ID,))
    driver.add(wanted)
    said = driver.run()["a"]
    assert tuple(said) == plain(loaded, wanted, 4096, (END_ID,)).tokens
    assert said == ids[4:]
    stats = driver.core.stats()
    assert stats.num_accepted_tokens > 0.5 * stats.num_draft_tokens


@pytest.mark.full
def test_a_run_that_is_cut_goes_on(tmp_path):
    torch.manual_seed(0)
    config = smaller(PRESETS["dense"])
    data = ShardSettings(1, Settings(max_tokens=128), "xml", 60, (64, 128))
    plan = TrainingPlan(
        minutes=None,
        tokens=6 * 256,
        batch_tokens=256,
        pool_tokens=60_000,
        compile=False,
        stop_after=0.0,
    )
    lines: list[str] = []

    def trainer(plan: TrainingPlan) -> Trainer:
        return Trainer(DemoModel(config), plan, data, tmp_path, 1, lines.append)

    assert not trainer(plan).run(), "it was stopped before its first step"
    short = trainer(replace(plan, tokens=2 * 256, stop_after=None))
    assert short.run()
    assert short.progress.step >= 2
    rest = trainer(replace(plan, stop_after=None))
    rest.resume()
    assert rest.progress == short.progress
    for a, b in zip(rest.model.parameters(), short.model.parameters(), strict=True):
        assert torch.equal(a, b)
    shapes = short.optimizer.momenta
    assert all(torch.equal(rest.optimizer.momenta[shape], shapes[shape]) for shape in shapes)
    assert rest.run()
    assert rest.progress.tokens >= 6 * 256
    assert rest.progress.step > short.progress.step
    with pytest.raises(FileNotFoundError, match="nothing to resume"):
        Trainer(DemoModel(config), plan, data, tmp_path / "none", 1, lines.append).resume()


def test_the_rate_rises_stays_and_falls():
    plan = TrainingPlan(minutes=None, tokens=1000, warmup_steps=10)
    from demo_model.checkpoint import Progress

    rates = [
        plan.rate(Progress(step=s, tokens=t)) for s, t in ((0, 0), (50, 400), (90, 750), (99, 1000))
    ]
    assert rates == pytest.approx([0.1, 1.0, 0.5, 0.01])
    slower = replace(plan, rate_scale=0.4)
    assert slower.rate(Progress(step=50, tokens=400)) == pytest.approx(0.4)


def test_the_mean_of_two_checkpoints(tmp_path):
    """Of equal ones it is the same, to the bit; of others each weight is between theirs."""
    config = smaller(PRESETS["moe"])
    told = json.dumps({"preset": "moe", "training": {"generator": {"lean": 0.0}, "history": [1]}})
    for name in ("a", "b"):
        torch.manual_seed(ord(name))
        write_checkpoint(DemoModel(config), tmp_path / name)
        (tmp_path / name / "metrics.json").write_text(told)
    run("average_demo_models.py", tmp_path / "a", tmp_path / "a", "--output", tmp_path / "same")
    run("average_demo_models.py", tmp_path / "a", tmp_path / "b", "--output", tmp_path / "mean")
    a, b, same, mean = (
        load_published(DemoModel(config), tmp_path / name).state_dict()
        for name in ("a", "b", "same", "mean")
    )
    assert all(torch.equal(same[name], a[name]) for name in a)
    for name in a:
        torch.testing.assert_close(mean[name], (a[name] + b[name]) / 2, rtol=1e-2, atol=1e-2)
    assert any(not torch.equal(mean[name], a[name]) for name in a)
    metrics = json.loads((tmp_path / "mean" / "metrics.json").read_text())
    assert len(metrics["training"]["mean_of"]) == 2
    assert metrics["evaluation"] == {}


@pytest.mark.full
@pytest.mark.parametrize("preset", PRESETS)
def test_the_whole_way(preset, tmp_path):
    """Train, export, measure by PyTorch and by the engine, whose greedy figures are the same."""
    out = tmp_path / "model"
    readme = tmp_path / "README.md"
    begin, end = (
        "<!-- figures: written by scripts/evaluate_demo_model.py -->",
        "<!-- end of figures -->",
    )
    readme.write_text(f"# Model\n{begin}\n{end}\nrest\n")
    small = ("--smoke", "--per-task", "1")
    run(
        "train_demo_model.py",
        "--output",
        out,
        "--preset",
        preset,
        "--device",
        "cpu",
        "--workers",
        "1",
        *small,
    )
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
    again = load_published(DemoModel(smaller(PRESETS[preset])), out)
    assert all(torch.isfinite(parameter).all() for parameter in again.parameters())


def run(script: str, *arguments: object, status: tuple[int, ...] = (0,)) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode in status, done.stdout[-3000:] + done.stderr[-3000:]
