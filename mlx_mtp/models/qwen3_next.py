"""Qwen3-Next (Qwen3-Next-80B-A3B and its kin)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_next as mlx_lm_qwen3_next

from mlx_mtp.kernels.window import Projected
from mlx_mtp.models.family import Family
from mlx_mtp.models.gated_delta_net import WindowedGatedDeltaNet


class _GatedDeltaNet(WindowedGatedDeltaNet, mlx_lm_qwen3_next.Qwen3NextGatedDeltaNet):
    def project(self, x: mx.array, batch: int) -> tuple[Projected, mx.array]:
        """q, k, v and z come interleaved by key head, and so do b and a; see the base class."""
        dim, ratio = self.head_k_dim, self.num_v_heads // self.num_k_heads
        width = ratio * self.head_v_dim
        by_head = (batch, -1, self.num_k_heads)
        qkvz = self.in_proj_qkvz(x).reshape(*by_head, 2 * dim + 2 * width)
        q, k, v, z = mx.split(qkvz, [dim, 2 * dim, 2 * dim + width], axis=-1)
        b, a = mx.split(self.in_proj_ba(x).reshape(*by_head, 2 * ratio), 2, axis=-1)
        v = v.reshape(*v.shape[:3], ratio, self.head_v_dim)
        z = z.reshape(*z.shape[:2], self.num_v_heads, self.head_v_dim)
        return Projected(q, k, v, a, b), z


class Qwen3Next(Family):
    """`qwen3_next`: mixture of experts, one model without a vision part."""

    model_types = ("qwen3_next",)
    stock_gated_delta_net = mlx_lm_qwen3_next.Qwen3NextGatedDeltaNet
    windowed_gated_delta_net = _GatedDeltaNet

    def classes(self, config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        """See the base class."""
        return mlx_lm_qwen3_next.Model, mlx_lm_qwen3_next.ModelArgs

    def causal_lm(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def attention_layer(self, args: Any) -> nn.Module:
        """See the base class."""
        return mlx_lm_qwen3_next.Qwen3NextDecoderLayer(args, args.full_attention_interval - 1)
