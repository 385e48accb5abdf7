"""Qwen3-Next (Qwen3-Next-80B-A3B and its kin)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_next as mlx_lm_qwen3_next

from mlx_mtp.models.family import Family
from mlx_mtp.models.gated_delta_net import WindowedGatedDeltaNet


class _GatedDeltaNet(WindowedGatedDeltaNet, mlx_lm_qwen3_next.Qwen3NextGatedDeltaNet):
    def project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """q, k, v and z come interleaved by key head; see the base class."""
        q, k, v, z, b, a = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(x), self.in_proj_ba(x)
        )
        flat = [t.reshape(*x.shape[:2], -1) for t in (q, k, v)]
        return mx.concatenate(flat, axis=-1), z, b, a


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
