"""Qwen3.5, 3.6 and 3.8-27B: the text part, dense or mixture of experts; and their derivatives."""

from collections.abc import Sequence
from dataclasses import replace

from mlx_lm.models.qwen3_5 import DecoderLayer, GatedDeltaNet

from mlx_mtp.cache.packing import Rectangle
from mlx_mtp.kernels.gdn_types import GDNProjections
from mlx_mtp.kernels.view import Operand, View, column_view
from mlx_mtp.models.family import Family
from mlx_mtp.models.head_weights import stack_experts
from mlx_mtp.models.layers import SplitLayer, WindowedGatedDeltaNet


class _GatedDeltaNet(WindowedGatedDeltaNet, GatedDeltaNet):
    stacked = "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"

    def unpack_projections(
        self, parts: Sequence[Operand], order: Rectangle
    ) -> tuple[GDNProjections, View]:
        """q, k and v share a projection; z, a and b have one each."""
        heads, dim, ratio = self.num_k_heads, self.head_k_dim, self.num_v_heads // self.num_k_heads
        value, width = (heads, ratio, self.head_v_dim), ratio * self.head_v_dim
        rows = order.rows, order.length
        qkv, z, a, b = parts
        projected = GDNProjections(
            column_view(qkv, rows, 0, dim, (heads, dim)),
            column_view(qkv, rows, self.key_dim, dim, (heads, dim)),
            column_view(qkv, rows, 2 * self.key_dim, width, value),
            column_view(a, rows, 0, ratio, (heads, ratio)),
            column_view(b, rows, 0, ratio, (heads, ratio)),
        )
        return projected, column_view(z, z.shape[:1], 0, width, value)


class _Layer(SplitLayer, DecoderLayer):
    pass


# The two types differ only in the MLP. mlx-lm's class can't load experts stored one by one.
QWEN3_5 = Family(("qwen3_5", "qwen3_5_moe"), _Layer, _GatedDeltaNet, stack_experts)
# Packed models such as Ternary Bonsai 2. Their 2 bits suffice only for weights trained for that,
# so the head has 4.
PRISM_HADAMARD = replace(
    QWEN3_5,
    model_types=("prism_hadamard_qwen35",),
    head_quantization={"bits": 4, "group_size": 64},
)
