"""What a run that was cut goes on from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from demo_model.network.model import DemoModel
from demo_model.optimizer import Optimizer

FILE = "training.pt"


@dataclass
class Progress:
    """How far a run has come.

    Args:
        step: steps taken.
        tokens: trained on, padding included.
        seconds: spent in steps, over all calls.
        next_shard: the first that has not been taken in.
        history: figures of the log.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    next_shard: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


def save(directory: Path, model: DemoModel, optimizer: Optimizer, progress: Progress) -> None:
    """Write the whole state; a run that is cut while it writes keeps the state before."""
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / f"{FILE}.tmp"
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": vars(progress),
    }
    torch.save(state, unfinished)
    unfinished.rename(directory / FILE)


def resume(directory: Path, model: DemoModel, optimizer: Optimizer) -> Progress:
    """Give model and optimizer the state that was saved.

    Raises:
        FileNotFoundError: none was.
    """
    path = directory / FILE
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: nothing to resume; leave --resume out")
    device = next(model.parameters()).device
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])
