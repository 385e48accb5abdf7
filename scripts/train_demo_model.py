#!/usr/bin/env python
"""Train a bundled demo model from nothing, write its checkpoint, and measure it.

python scripts/train_demo_model.py --output DIR --preset moe --minutes 16

A run may be cut (`--stop-after`) and gone on with by the same command and `--resume`. See
scripts/demo_model/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

if TYPE_CHECKING:
    from demo_model.network.model import DemoModel
    from demo_model.trainer import Trainer, TrainingPlan

_BEGUN = time.monotonic()


def log(line: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.monotonic() - _BEGUN:7.1f} s] {line}", flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--output", type=Path, required=True, help="directory of the checkpoint")
    out.add_argument("--preset", choices=("moe", "dense"), default="moe")
    length = out.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="spent in steps, over all calls (default 16)")
    length.add_argument("--tokens", type=int, help="to train on, instead of --minutes")
    out.add_argument("--stop-after", type=float, help="minutes of this call; then save and stop")
    out.add_argument("--resume", action="store_true", help="go on from the state in --output")
    out.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    out.add_argument("--seed", type=int, default=1)
    out.add_argument("--workers", type=int, help="processes that make data (default: cores - 2)")
    out.add_argument("--lean", type=float, help="how foreseeable open text is; 0 is a fair die")
    out.add_argument(
        "--distill",
        type=float,
        default=0.0,
        help="share of the head's loss that is its distance from the trunk",
    )
    out.add_argument("--head-only", action="store_true", help="train the MTP head of --from alone")
    out.add_argument("--from", dest="source", type=Path, help="checkpoint directory to begin with")
    out.add_argument("--rate", type=float, default=1.0, help="scale of the learning rates")
    out.add_argument(
        "--weak-first",
        action="store_true",
        help="what --from does badly, by its metrics.json, comes more often",
    )
    out.add_argument("--no-compile", action="store_true", help="do not compile the layers")
    out.add_argument(
        "--per-task", type=int, default=32, help="held-out questions of each task; 0: no evaluation"
    )
    out.add_argument(
        "--smoke",
        action="store_true",
        help="a tiny model, a few steps: the whole way in a minute on a CPU, with --per-task 1",
    )
    return out


def main() -> int:
    """Exit status: 0 done, 3 stopped by --stop-after and to be resumed."""
    command_line = parser()
    arguments = command_line.parse_args()
    if arguments.head_only and arguments.source is None:
        command_line.error("--head-only trains the head of a checkpoint: say which by --from")
    if arguments.weak_first and arguments.source is None:
        command_line.error("--weak-first goes by the figures of a checkpoint: say which by --from")
    if arguments.smoke and arguments.minutes is not None:
        command_line.error("--smoke trains for --tokens, not --minutes")
    trainer = trainer_of(arguments)
    if arguments.resume:
        trainer.resume()
    if not trainer.run():
        log("stopped and saved; go on with the same command and --resume")
        return 3
    from demo_model.export import write_checkpoint

    write_checkpoint(trainer.model, arguments.output)
    metrics = metrics_of(trainer, arguments)
    save_metrics(arguments.output, metrics)
    log(f"wrote {arguments.output}")
    if arguments.per_task:
        measure(trainer.model, arguments, metrics)
    return 0


def trainer_of(arguments: argparse.Namespace) -> Trainer:
    """Model, data and loop, by the command line."""
    import torch

    from demo_model.dice import DEFAULT_LEAN
    from demo_model.export import load_published
    from demo_model.mixture import Settings
    from demo_model.network.config import PRESETS, smaller
    from demo_model.network.model import DemoModel
    from demo_model.shards import ShardSettings
    from demo_model.trainer import Trainer

    torch.manual_seed(arguments.seed)
    config = PRESETS[arguments.preset]
    lean = DEFAULT_LEAN if arguments.lean is None else arguments.lean
    data = ShardSettings(arguments.seed, Settings(lean), config.tool_format)
    if arguments.smoke:
        config = smaller(config)
        torch.set_num_threads(1)  # At this size several only wait for each other.
        short = Settings(lean, max_tokens=512)
        data = ShardSettings(arguments.seed, short, config.tool_format, 100, (256, 512))
    if arguments.weak_first:
        data = replace(data, keep=kept_of(arguments.source))
    model = DemoModel(config).to(arguments.device)
    model.compute_in(torch.bfloat16 if arguments.device == "cuda" else torch.float32)
    if arguments.source is not None:
        load_published(model, arguments.source)
    size = sum(parameter.numel() for parameter in model.parameters())
    where = f"{arguments.device}, torch {torch.__version__}"
    log(f"{arguments.preset}: {size:,} parameters, {where}")
    workers = arguments.workers or max(1, (os.cpu_count() or 1) - 2)
    return Trainer(model, plan_of(arguments), data, arguments.output, workers, log)


def metrics_of(trainer: Trainer, arguments: argparse.Namespace) -> dict[str, Any]:
    """What metrics.json says of the training."""
    import torch

    progress = trainer.progress
    return {
        "preset": arguments.preset,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "training": {
            "steps": progress.step,
            "tokens": progress.tokens,
            "minutes": round(progress.seconds / 60, 2),
            "device": arguments.device,
            "torch": torch.__version__,
            "seed": arguments.seed,
            "generator": asdict(trainer.data.settings),
            "from": training_of(arguments.source) if arguments.source else None,
            "kept": trainer.data.keep,
            "rate": trainer.plan.rate_scale,
            "loss": asdict(trainer.plan.loss),
            "history": progress.history[:: max(1, len(progress.history) // 60)],
        },
        "evaluation": {},
    }


def training_of(directory: Path) -> dict[str, Any] | None:
    """How the checkpoint that a run began with had been trained, without its history."""
    path = directory / "metrics.json"
    if not path.exists():
        return None
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["training"]
    return {name: value for name, value in told.items() if name != "history"}


def kept_of(directory: Path) -> dict[str, float]:
    """The shares of tasks to keep, by the figures of a checkpoint.

    Raises:
        SystemExit: it has not been measured.
    """
    from demo_model.mixture import weak_tasks_first

    path = directory / "metrics.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    figures = found.get("evaluation", {}).get("torch")
    if figures is None:
        raise SystemExit(f"{path} has no figures by PyTorch: run evaluate_demo_model.py first")
    return weak_tasks_first(figures["tasks"])


def plan_of(arguments: argparse.Namespace) -> TrainingPlan:
    """How long and how fast, by the command line."""
    from demo_model.network.loss import LossSettings
    from demo_model.trainer import TrainingPlan

    minutes = arguments.minutes
    if minutes is None and arguments.tokens is None:
        minutes = 16.0
    plan = TrainingPlan(
        minutes=minutes,
        tokens=arguments.tokens,
        stop_after=arguments.stop_after,
        rate_scale=arguments.rate,
        head_only=arguments.head_only,
        compile=arguments.device == "cuda" and not arguments.no_compile,
        loss=LossSettings(distill=arguments.distill),
    )
    if not arguments.smoke:
        return plan
    return replace(
        plan,
        minutes=None,
        tokens=arguments.tokens or 16 * 1024,
        batch_tokens=1024,
        warmup_steps=4,
        pool_tokens=200_000,
        log_every=8,
    )


def measure(model: DemoModel, arguments: argparse.Namespace, metrics: dict[str, Any]) -> None:
    """Evaluate the checkpoint as it was rounded, and add the figures to its file."""
    from demo_model.evaluate import measure_with_torch, settings_of
    from demo_model.report import shortcomings, table

    asked = settings_of(arguments.per_task, None, arguments.smoke)
    figures = measure_with_torch(arguments.output, model.config, arguments.device, asked, log)
    metrics["evaluation"]["torch"] = figures
    save_metrics(arguments.output, metrics)
    print(table(metrics["evaluation"]))
    for line in shortcomings(figures):
        log(f"short of its goal: {line}")


def save_metrics(directory: Path, metrics: dict[str, Any]) -> None:
    """Write metrics.json."""
    (directory / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
