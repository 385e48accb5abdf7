"""Qwen3-Next: Qwen3-Next-80B-A3B and models like it."""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.qwen3_next import Qwen3NextDecoderLayer, Qwen3NextGatedDeltaNet

from mlx_mtp.cache.packing import Rectangle
from mlx_mtp.kernels.gdn_types import GDNProjections
from mlx_mtp.models.family import Family
from mlx_mtp.models.layers import SplitLayer, WindowedGatedDeltaNet


class _GatedDeltaNet(WindowedGatedDeltaNet, Qwen3NextGatedDeltaNet):
    projections = "in_proj_qkvz", "in_proj_ba"

    def unpack_projections(
        self, parts: Sequence[mx.array], order: Rectangle
    ) -> tuple[GDNProjections, mx.array]:
        """q, k, v and z are interleaved by key head, and so are b and a."""
        dim, ratio = self.head_k_dim, self.num_v_heads // self.num_k_heads
        width = ratio * self.head_v_dim
        qkvz, ba = parts
        by_head = order.fill(qkvz, self.num_k_heads, 2 * dim + 2 * width)
        q, k, v, z = mx.split(by_head, [dim, 2 * dim, 2 * dim + width], axis=-1)
        b, a = mx.split(order.fill(ba, self.num_k_heads, 2 * ratio), 2, axis=-1)
        v = v.reshape(*v.shape[:3], ratio, self.head_v_dim)
        if order.tokens is not None:  # The rectangle is padded, but z is per token.
            z = qkvz.reshape(len(qkvz), self.num_k_heads, -1)[..., 2 * dim + width :]
        return GDNProjections(q, k, v, a, b), z.reshape(len(qkvz), -1, ratio, self.head_v_dim)


class _Layer(SplitLayer, Qwen3NextDecoderLayer):
    pass


QWEN3_NEXT = Family(("qwen3_next",), _Layer, _GatedDeltaNet)
