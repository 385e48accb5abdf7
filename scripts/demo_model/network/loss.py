"""What is minimized: the next token by the trunk, the ones after it by the head at each depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from demo_model.acceptance import DEPTH
from demo_model.network.model import DemoModel, attention_masks

DEPTH_WEIGHTS = (1.0, 0.4, 0.15)


@dataclass(frozen=True)
class LossSettings:
    """How the parts are weighed.

    Args:
        mtp_weight: of the head's loss.
        distill: share of the head's loss that is its distance from the trunk's distribution, and
            not from the text. It moves acceptance where the text branches, and hardly elsewhere.
        balance: of the routers' load.
    """

    mtp_weight: float = 0.3
    distill: float = 0.0
    balance: float = 0.01


Entropy = Callable[..., tuple[Tensor, Tensor, Tensor]]


def cross_entropy(
    hidden: Tensor,
    head: Tensor,
    target: Tensor,
    weight: Tensor,
    teacher: Tensor | None,
    share: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum over positions, the likeliest tokens, and the logits in float32.

    Args:
        hidden: [B, T, H].
        head: the output layer, [V, H].
        target: [B, T].
        weight: [B, T].
        teacher: logits to come near to, [B, T, V].
        share: of the distance from the teacher.
    """
    logits = functional.linear(hidden, head.to(hidden.dtype)).float()
    total = logits.logsumexp(-1)
    loss = total - logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    if teacher is not None:
        odds = teacher.float().softmax(-1)
        loss = (1 - share) * loss + share * (total - (odds * logits).sum(-1))
    return (loss * weight).sum(), logits.argmax(-1), logits


def training_loss(
    model: DemoModel,
    ids: Tensor,
    segments: Tensor,
    weight: Tensor,
    settings: LossSettings,
    entropy: Entropy = cross_entropy,
    *,
    head_only: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of packed rows, and figures for the log.

    Args:
        model: to train.
        ids: [B, T].
        segments: the number of each position's document, 0 at padding; [B, T].
        weight: of each token as a target; 1 or more for what the model itself says; [B, T].
        settings: of the parts.
        entropy: `cross_entropy`, perhaps compiled.
        head_only: the trunk is not trained.
    """
    masks = attention_masks(segments, DEPTH)
    with torch.set_grad_enabled(not head_only and torch.is_grad_enabled()):
        hidden, balance = model.trunk(ids, segments, masks[0])
        output = model.lm_head.weight
        inside = (_ahead(segments, 1) == segments) & (segments > 0)
        w1, t1 = _ahead(weight, 1) * inside, _ahead(ids, 1)
        loss, said, logits = entropy(hidden, output, t1, w1, None, 0.0)
        main = loss / w1.sum().clamp(min=1)
    figures = {"main": main.detach(), "right": _share(said == t1, w1 >= 1)}
    total = main + settings.balance * balance
    if head_only:
        total, output = total.detach(), output.detach()
    inside = inside & (_ahead(segments, 2) == segments)
    w2, t2 = _ahead(weight, 2) * inside, _ahead(ids, 2)
    teacher = functional.pad(logits.detach()[:, 1:], (0, 0, 0, 1)).to(model.dtype)
    likeliest = teacher.argmax(-1)
    made = model.drafts(ids, segments, hidden, masks)
    for number, (draft, draft_balance) in enumerate(made, 1):
        told = teacher if settings.distill else None
        # A window begins within the document.
        begun = functional.pad(segments, (number - 1, 0))[:, : segments.shape[1]] == segments
        loss, said, _ = entropy(draft, output, t2, w2 * begun, told, settings.distill)
        loss = loss / w2.sum().clamp(min=1)
        total = total + settings.mtp_weight * DEPTH_WEIGHTS[number - 1] * loss
        total = total + settings.balance * draft_balance
        figures[f"mtp{number}"] = loss.detach()
        figures[f"agree{number}"] = _share(said == likeliest, w2 >= 1)
    return total, figures


def _ahead(x: Tensor, count: int) -> Tensor:
    """What stands that many places later, [B, T]."""
    return functional.pad(x[:, count:], (0, count))


def _share(hit: Tensor, where: Tensor) -> Tensor:
    return ((hit & where).sum() / where.sum().clamp(min=1)).detach()
