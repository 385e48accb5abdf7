"""Qwen3.5, 3.6 and 3.8-27B: the text part, dense or mixture of experts."""

import mlx.core as mx
from mlx_lm.models.qwen3_5 import DecoderLayer, GatedDeltaNet

from mlx_mtp.kernels.window import Projected
from mlx_mtp.models.family import Family, WindowedGatedDeltaNet
from mlx_mtp.models.few_rows import project
from mlx_mtp.models.head_weights import stack_experts


class _GatedDeltaNet(WindowedGatedDeltaNet, GatedDeltaNet):
    def project(self, x: mx.array) -> tuple[Projected, mx.array]:
        """q, k and v come from one projection, the others from one each."""
        ratio = self.num_v_heads // self.num_k_heads
        by_key = (x.shape[1], self.num_k_heads)
        layers = self.in_proj_qkv, self.in_proj_z, self.in_proj_a, self.in_proj_b
        qkv, z, a, b = project(x, *layers)
        q, k, v = mx.split(qkv, [self.key_dim, 2 * self.key_dim], axis=-1)
        projected = Projected(
            q.reshape(*by_key, self.head_k_dim),
            k.reshape(*by_key, self.head_k_dim),
            v.reshape(*by_key, ratio, self.head_v_dim),
            a.reshape(*by_key, ratio),
            b.reshape(*by_key, ratio),
        )
        return projected, z.reshape(x.shape[1], self.num_v_heads, self.head_v_dim)


class Qwen35(Family):
    """`qwen3_5` and `qwen3_5_moe`, which differ in the MLP alone."""

    model_types = ("qwen3_5", "qwen3_5_moe")
    decoder_layer = DecoderLayer
    gated_delta_net = _GatedDeltaNet

    def prepare_weights(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Stack experts stored one by one; mlx-lm's class knows the stacked layout alone."""
        if not any(".experts.0." in key for key in weights):
            return weights
        return stack_experts(weights)
