"""Muon for the matrices inside layers, AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

MATRIX_RATE = 0.02
TABLE_RATE = 3e-3
OTHER_RATE = 2e-3
WEIGHT_DECAY = 0.05
_TABLES = ("embed_tokens.weight", "lm_head.weight")
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(matrices: Tensor) -> Tensor:
    """Each matrix [N, R, C] with its singular values brought near 1.

    Five Newton-Schulz steps of order five; K. Jordan, "Muon" (2024).
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Optimizer:
    """Both, as one.

    Args:
        model: whose parameters are trained.
        head_only: the head's alone.
    """

    def __init__(self, model: nn.Module, *, head_only: bool = False) -> None:
        self.model = model
        named = [
            (n, p) for n, p in model.named_parameters() if not head_only or n.startswith("mtp.")
        ]
        tables = [p for n, p in named if n.endswith(_TABLES)]
        inner = [(n, p) for n, p in named if p.ndim >= 2 and not n.endswith(_TABLES)]
        inner = [(n, p) for n, p in inner if not n.endswith(("conv1d.weight", "gate.weight"))]
        taken = {id(p) for _, p in inner} | {id(p) for p in tables}
        others = [p for _, p in named if id(p) not in taken]
        groups = [{"params": others, "base": OTHER_RATE}]
        if tables:
            groups.append({"params": tables, "base": TABLE_RATE})
        fused = others[0].is_cuda
        self.adam = torch.optim.AdamW(
            groups, lr=1e-3, betas=(0.9, 0.97), eps=1e-9, weight_decay=0.0, fused=fused
        )
        # Matrices of one shape are orthogonalized together.
        self.by_shape: dict[tuple[int, int], list[tuple[Tensor, tuple[int, ...]]]] = defaultdict(
            list
        )
        for name, parameter in inner:
            shape = tuple(parameter.shape)
            if name.endswith("gate_up_proj"):
                shape = (2 * shape[0], shape[1] // 2, shape[2])
            self.by_shape[shape[-2], shape[-1]].append((parameter, shape))
        self.momenta: dict[tuple[int, int], Tensor] = {}

    def step(self, scale: float, number: int) -> None:
        """Take a step and forget the gradients.

        Args:
            scale: of all rates, 0 to 1.
            number: of the step, from 0; momentum grows over the first 300.
        """
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * scale
        self.adam.step()
        self._step_matrices(MATRIX_RATE * scale, 0.85 + 0.10 * min(1.0, number / 300))
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _step_matrices(self, rate: float, momentum: float) -> None:
        for shape, members in self.by_shape.items():
            gradient = torch.cat([p.grad.reshape(-1, *shape) for p, _ in members])
            average = self.momenta.setdefault(shape, torch.zeros_like(gradient))
            average.lerp_(gradient, 1 - momentum)
            update = orthogonal(gradient.lerp(average, momentum))
            update *= max(1.0, shape[0] / shape[1]) ** 0.5
            start = 0
            for parameter, _ in members:
                count = parameter.numel() // (shape[0] * shape[1])
                part = update[start : start + count].reshape(parameter.shape)
                parameter.mul_(1 - rate * WEIGHT_DECAY).add_(part, alpha=-rate)
                start += count

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"adam": self.adam.state_dict(), "momenta": self.momenta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.adam.load_state_dict(state["adam"])
        self.momenta = state["momenta"]
