"""Qwen3.5, 3.6 and 3.8-27B: the text part, dense or mixture of experts."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5 as mlx_lm_qwen3_5
from mlx_lm.models import qwen3_5_moe as mlx_lm_qwen3_5_moe

from mlx_mtp.kernels.window import Projected
from mlx_mtp.models.family import Family
from mlx_mtp.models.gated_delta_net import WindowedGatedDeltaNet
from mlx_mtp.models.head_weights import stack_experts


class _GatedDeltaNet(WindowedGatedDeltaNet, mlx_lm_qwen3_5.GatedDeltaNet):
    def project(self, x: mx.array, batch: int) -> tuple[Projected, mx.array]:
        """A projection each, and one of q, k and v together; see the base class."""
        ratio = self.num_v_heads // self.num_k_heads
        by_key = (batch, -1, self.num_k_heads)
        q, k, v = mx.split(self.in_proj_qkv(x), [self.key_dim, 2 * self.key_dim], axis=-1)
        projected = Projected(
            q.reshape(*by_key, self.head_k_dim),
            k.reshape(*by_key, self.head_k_dim),
            v.reshape(*by_key, ratio, self.head_v_dim),
            self.in_proj_a(x).reshape(*by_key, ratio),
            self.in_proj_b(x).reshape(*by_key, ratio),
        )
        return projected, self.in_proj_z(x).reshape(batch, -1, self.num_v_heads, self.head_v_dim)


class Qwen35(Family):
    """`qwen3_5` and `qwen3_5_moe`, which differ in the MLP alone."""

    model_types = ("qwen3_5", "qwen3_5_moe")
    stock_gated_delta_net = mlx_lm_qwen3_5.GatedDeltaNet
    windowed_gated_delta_net = _GatedDeltaNet

    def classes(self, config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        """See the base class."""
        moe = config["model_type"] == "qwen3_5_moe"
        module = mlx_lm_qwen3_5_moe if moe else mlx_lm_qwen3_5
        return module.Model, module.ModelArgs

    def prepare_weights(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Stack experts stored one by one; mlx-lm's class knows the stacked layout alone."""
        if not any(".experts.0." in key for key in weights):
            return weights
        return stack_experts(weights)

    def causal_lm(self, model: nn.Module) -> nn.Module:
        """The language model beside the vision tower, which is not loaded."""
        return model.language_model

    def attention_layer(self, args: Any) -> nn.Module:
        """See the base class."""
        return mlx_lm_qwen3_5.DecoderLayer(args, args.full_attention_interval - 1)
