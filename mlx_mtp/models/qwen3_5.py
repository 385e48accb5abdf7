"""Qwen3.5, 3.6 and 3.8-27B: the text part, dense or mixture of experts."""

import mlx.core as mx
from mlx_lm.models.qwen3_5 import DecoderLayer, GatedDeltaNet

from mlx_mtp.kernels.window import Projected
from mlx_mtp.models.family import Family
from mlx_mtp.models.few_rows import project
from mlx_mtp.models.head_weights import stack_experts
from mlx_mtp.models.layers import PartedLayer, WindowedGatedDeltaNet


class _GatedDeltaNet(WindowedGatedDeltaNet, GatedDeltaNet):
    def before(self, x: mx.array, positions: mx.array) -> tuple[Projected, mx.array]:
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
        return projected, z.reshape(projected.v.shape)


class _Layer(PartedLayer, DecoderLayer):
    pass


# The two differ in the MLP alone. mlx-lm's class knows no experts that are stored one by one.
QWEN3_5 = Family(("qwen3_5", "qwen3_5_moe"), _Layer, _GatedDeltaNet, stack_experts)
