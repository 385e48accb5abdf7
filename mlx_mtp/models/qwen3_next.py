"""Qwen3-Next: Qwen3-Next-80B-A3B and models like it."""

from collections.abc import Sequence

from mlx_lm.models.qwen3_next import Qwen3NextDecoderLayer, Qwen3NextGatedDeltaNet

from mlx_mtp.cache.packing import Rectangle
from mlx_mtp.kernels.gdn_types import GDNProjections
from mlx_mtp.kernels.view import Operand, View, column_view
from mlx_mtp.models.family import Family
from mlx_mtp.models.layers import SplitLayer, WindowedGatedDeltaNet


class _GatedDeltaNet(WindowedGatedDeltaNet, Qwen3NextGatedDeltaNet):
    stacked = "in_proj_qkvz", "in_proj_ba"

    def unpack_projections(
        self, parts: Sequence[Operand], order: Rectangle
    ) -> tuple[GDNProjections, View]:
        """q, k, v and z are interleaved by key head, and so are b and a."""
        heads, dim, ratio = self.num_k_heads, self.head_k_dim, self.num_v_heads // self.num_k_heads
        value, width = (heads, ratio, self.head_v_dim), ratio * self.head_v_dim
        step = 2 * dim + 2 * width
        qkvz, ba = parts
        rows = order.rows, order.length
        projected = GDNProjections(
            column_view(qkvz, rows, 0, step, (heads, dim)),
            column_view(qkvz, rows, dim, step, (heads, dim)),
            column_view(qkvz, rows, 2 * dim, step, value),
            column_view(ba, rows, ratio, 2 * ratio, (heads, ratio)),
            column_view(ba, rows, 0, 2 * ratio, (heads, ratio)),
        )
        return projected, column_view(qkvz, qkvz.shape[:1], 2 * dim + width, step, value)


class _Layer(SplitLayer, Qwen3NextDecoderLayer):
    pass


QWEN3_NEXT = Family(("qwen3_next",), _Layer, _GatedDeltaNet)
