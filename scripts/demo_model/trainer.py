"""The training loop: takes data in, steps, logs, saves, and stops in time."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from demo_model import checkpoint
from demo_model.checkpoint import Progress
from demo_model.network.loss import Entropy, LossSettings, cross_entropy, training_loss
from demo_model.network.model import DemoModel, Layer
from demo_model.optimizer import Optimizer
from demo_model.packing import CONTEXT, OWN
from demo_model.pool import Pool
from demo_model.shards import ShardFactory, ShardSettings

_COMPILING_STEPS = 20
"""Of each call. They wait for the compiler, and don't count as time spent in steps."""


@dataclass(frozen=True)
class TrainingPlan:
    """How long and how fast.

    Args:
        minutes: spent in steps, over all calls; None: `tokens` decides.
        tokens: to train on; None: `minutes` decides.
        stop_after: minutes of this call, after which it saves and stops; None: it runs to the end.
        batch_tokens: a step's.
        warmup_steps: over which the rate grows.
        rate_scale: of all learning rates; less than 1 to go on with a trained model for short.
        decay_from: share of the run after which the rate falls.
        context_weight: of what the model reads, where what it says has 1.
        pool_tokens: held on the device; after that, rows come again.
        log_every: steps.
        save_every: minutes.
        head_only: the trunk stays as it is.
        compile: layers and loss.
        loss: its parts.
    """

    minutes: float | None = 16.0
    tokens: int | None = None
    stop_after: float | None = None
    batch_tokens: int = 48 * 1024
    warmup_steps: int = 100
    rate_scale: float = 1.0
    decay_from: float = 0.5
    context_weight: float = 0.1
    pool_tokens: int = 600_000_000
    log_every: int = 100
    save_every: float = 3.0
    head_only: bool = False
    compile: bool = True
    loss: LossSettings = field(default_factory=LossSettings)

    def share(self, progress: Progress) -> float:
        """How much of the run is over, 0 to 1."""
        by_time = progress.seconds / (60 * self.minutes) if self.minutes else 0.0
        by_tokens = progress.tokens / self.tokens if self.tokens else 0.0
        return min(1.0, max(by_time, by_tokens))

    def rate(self, progress: Progress) -> float:
        """Scale of the learning rates: up, level, then straight down to 1%."""
        share = self.share(progress)
        down = max(0.01, (1 - share) / (1 - self.decay_from)) if share > self.decay_from else 1.0
        return self.rate_scale * min(1.0, (progress.step + 1) / self.warmup_steps) * down


Log = Callable[[str], None]


class Trainer:
    """One call of the trainer.

    Args:
        model: on its device.
        plan: how long.
        data: what it learns.
        directory: of its checkpoint.
        num_workers: processes that make data.
        log: takes lines.
    """

    def __init__(
        self,
        model: DemoModel,
        plan: TrainingPlan,
        data: ShardSettings,
        directory: Path,
        num_workers: int,
        log: Log,
    ) -> None:
        self.model, self.plan, self.data = model, plan, data
        self.directory, self.num_workers, self.log = directory, num_workers, log
        self.device = next(model.parameters()).device
        self.optimizer = Optimizer(model, head_only=plan.head_only)
        self.progress = Progress()
        self.entropy: Entropy = cross_entropy
        self.pools: list[Pool] = []
        self.begun = time.monotonic()
        self.generator = torch.Generator().manual_seed(data.seed)

    def resume(self) -> None:
        """Go on from the checkpoint in the directory.

        Raises:
            FileNotFoundError: there is none.
        """
        self.progress = checkpoint.resume(self.directory, self.model, self.optimizer)
        self.generator.manual_seed(self.data.seed + self.progress.step)
        self.log(f"resumed at step {self.progress.step}, {self.plan.share(self.progress):.0%} done")

    def run(self) -> bool:
        """Train to the end of the plan, or of this call; whether the plan is done."""
        self.begun = time.monotonic()
        if self.plan.compile:
            self._compile()
        share = self.plan.pool_tokens // len(self.data.buckets)
        self.pools = [
            Pool(length, max(64, share // length), self.device) for length in self.data.buckets
        ]
        with (
            tempfile.TemporaryDirectory() as files,
            ShardFactory(
                Path(files), self.data, self.num_workers, self.progress.next_shard
            ) as factory,
        ):
            self._fill(factory, self._batch_rows(0) * 2)
            self.log(f"first rows: {', '.join(str(pool.num_rows) for pool in self.pools)}")
            self._loop(factory)
        self._save()
        return self.plan.share(self.progress) >= 1

    def _compile(self) -> None:
        import torch._dynamo

        # Each layer for each length of row, and the head for each depth.
        torch._dynamo.config.recompile_limit = 64
        # What can't be compiled runs as it is, and says so.
        torch._dynamo.config.suppress_errors = True
        for module in self.model.modules():
            if isinstance(module, Layer):
                module.compile(dynamic=False)
        self.entropy = torch.compile(cross_entropy, dynamic=False)

    def _batch_rows(self, bucket: int) -> int:
        return max(1, self.plan.batch_tokens // self.data.buckets[bucket])

    def _fill(self, factory: ShardFactory, at_least: int = 0) -> None:
        """Take in what is there, and wait until the pools have that many rows."""
        while not all(pool.full for pool in self.pools):
            shard = factory.take()
            if shard is not None:
                for pool in self.pools:
                    if pool.length in shard:
                        pool.add(shard[pool.length])
                self.progress.next_shard = factory.next_number
            elif self.pools[0].num_rows >= at_least and self.pools[1].num_rows:
                return
            else:
                time.sleep(0.05)

    def _loop(self, factory: ShardFactory) -> None:
        saved = measured = time.monotonic()
        tokens, num_steps = self.progress.tokens, 0
        while not self._over():
            begun = time.monotonic()
            if self.progress.step % 10 == 0:
                self._fill(factory)
            figures = self._step()
            num_steps += 1
            if num_steps > _COMPILING_STEPS or not self.plan.compile:
                self.progress.seconds += time.monotonic() - begun
            if self.progress.step % self.plan.log_every == 0 or self.progress.step in (1, 20):
                now = time.monotonic()
                rate = (self.progress.tokens - tokens) / (now - measured)
                self._note({k: round(float(v), 4) for k, v in figures.items()}, rate)
                measured, tokens = time.monotonic(), self.progress.tokens
            if time.monotonic() - saved > 60 * self.plan.save_every:
                self._save()
                saved = time.monotonic()

    def _over(self) -> bool:
        minutes = (time.monotonic() - self.begun) / 60
        spent = self.plan.stop_after is not None and minutes >= self.plan.stop_after
        return spent or self.plan.share(self.progress) >= 1

    def _step(self) -> dict[str, torch.Tensor]:
        bucket = self._choose()
        ids, segments, kinds = self.pools[bucket].batch(self._batch_rows(bucket), self.generator)
        weight = (kinds == OWN).float() + self.plan.context_weight * (kinds == CONTEXT).float()
        loss, figures = training_loss(
            self.model,
            ids,
            segments,
            weight,
            self.plan.loss,
            self.entropy,
            head_only=self.plan.head_only,
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step(self.plan.rate(self.progress), self.progress.step)
        self.progress.step += 1
        self.progress.tokens += ids.numel()
        return figures

    def _choose(self) -> int:
        """A bucket, by how many tokens were made for each."""
        sizes = torch.tensor([float(pool.num_rows * pool.length) for pool in self.pools])
        return int(torch.multinomial(sizes, 1, generator=self.generator))

    def _note(self, figures: dict[str, float], rate: float) -> None:
        progress = self.progress
        if not math.isfinite(figures["main"]):
            raise FloatingPointError(f"the loss is {figures['main']} at step {progress.step}")
        fresh = [pool.num_fresh for pool in self.pools]
        progress.history.append({"step": progress.step, "seconds": progress.seconds, **figures})
        self.log(
            f"step {progress.step} ({self.plan.share(progress):.1%}), {rate:,.0f} tokens/s, "
            f"fresh rows {fresh}, "
            + ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        )

    def _save(self) -> None:
        checkpoint.save(self.directory, self.model, self.optimizer, self.progress)
