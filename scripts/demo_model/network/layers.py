"""The parts of a layer. Names of parameters are those of the published checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_model.network.config import ModelConfig


class Weight(nn.Module):
    """A matrix in float32 that is applied in the type of what it is applied to."""

    def __init__(self, rows: int, columns: int, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * std)

    def forward(self, x: Tensor) -> Tensor:
        """x W^T."""
        return functional.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm with a zero-centred weight; computes in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """In the type that what follows computes in."""
        x = x.float()
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (x * scale * (1.0 + self.weight)).to(dtype)


class MLP(nn.Module):
    """Gated by silu."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Weight(inner, size)
        self.up_proj = Weight(inner, size)
        self.down_proj = Weight(size, inner)

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the loss of a router that isn't there."""
        out = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out, x.new_zeros((), dtype=torch.float32)


class Experts(nn.Module):
    """All experts' matrices, stacked."""

    def __init__(self, count: int, size: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * inner, size) * 0.02)
        self.down_proj = nn.Parameter(torch.randn(count, size, inner) * 0.02)


class MixtureOfExperts(nn.Module):
    """Every expert computes every position, and those not chosen count nothing.

    At this size that is faster than to gather, and it compiles to three matrix products.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, count = config.hidden_size, config.num_experts
        self.count, self.chosen = count, config.num_experts_per_tok
        self.gate = Weight(count, size)
        self.experts = Experts(count, size, config.moe_intermediate_size)
        self.shared_expert = MLP(size, config.shared_expert_intermediate_size)
        self.shared_expert_gate = Weight(1, size)

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """The output [B, T, H], and the loss that spreads the load (Switch Transformers, 2021)."""
        odds = self.gate(x.float()).softmax(-1)
        selected = torch.zeros_like(odds).scatter(-1, odds.topk(self.chosen, -1).indices, 1.0)
        share = odds * selected
        share = share / share.sum(-1, keepdim=True)
        kept = keep.unsqueeze(-1).float()
        count = kept.sum().clamp(min=1)
        load = (selected * kept).sum((0, 1)) / (count * self.chosen)
        balance = self.count * (load * (odds * kept).sum((0, 1)) / count).sum()
        inner = functional.linear(x, self.experts.gate_up_proj.flatten(0, 1).to(x.dtype))
        gate, up = inner.unflatten(-1, (self.count, 2, -1)).unbind(-2)
        inner = functional.silu(gate) * up * share.unsqueeze(-1).to(x.dtype)
        down = self.experts.down_proj.transpose(0, 1).flatten(1).to(x.dtype)
        shared, _ = self.shared_expert(x, keep)
        out = functional.linear(inner.flatten(-2), down)
        return out + torch.sigmoid(self.shared_expert_gate(x)) * shared, balance


class Attention(nn.Module):
    """Full attention with normed queries and keys, partial rotary positions and an output gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        size, dim = config.hidden_size, config.head_dim
        self.q_proj = Weight(2 * config.num_attention_heads * dim, size)
        self.k_proj = Weight(config.num_key_value_heads * dim, size)
        self.v_proj = Weight(config.num_key_value_heads * dim, size)
        self.o_proj = Weight(size, config.num_attention_heads * dim)
        self.q_norm = Norm(dim, config.rms_norm_eps)
        self.k_norm = Norm(dim, config.rms_norm_eps)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, heads, T, D], and the gate [B, T, heads * D].

        Args:
            x: [B, T, H].
            positions: of the rows' tokens, [T] or [B, T].
        """
        config, dim = self.config, self.config.head_dim
        doubled = self.q_proj(x).unflatten(-1, (config.num_attention_heads, 2 * dim))
        q, gate = doubled.chunk(2, -1)
        k = self.k_proj(x).unflatten(-1, (config.num_key_value_heads, dim))
        v = self.v_proj(x).unflatten(-1, (config.num_key_value_heads, dim))
        q = self._rotated(self.q_norm(q, x.dtype), positions).transpose(1, 2)
        k = self._rotated(self.k_norm(k, x.dtype), positions).transpose(1, 2)
        groups = config.num_attention_heads // config.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.transpose(1, 2).repeat_interleave(groups, 1)
        return q, k, v, gate.flatten(-2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
        """[B, T, H]; the mask is true where a query may look, [B, 1, T, S]."""
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(-2) * torch.sigmoid(gate))

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        size = int(self.config.head_dim * self.config.partial_rotary_factor)
        exponent = torch.arange(0, size, 2, device=x.device).float() / size
        angle = positions.float().unsqueeze(-1) * self.config.rope_theta**-exponent
        cos, sin = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)
        first, second = x[..., : size // 2].float(), x[..., size // 2 : size].float()
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return torch.cat([turned.to(x.dtype), x[..., size:]], -1)


def initial_gates(heads: int) -> tuple[nn.Parameter, nn.Parameter]:
    """`A_log` and `dt_bias` of heads that forget at rates from slow to fast."""
    step = torch.exp(torch.rand(heads) * math.log(100) + math.log(0.001))
    bias = step + torch.log(-torch.expm1(-step))
    return nn.Parameter(torch.log(torch.empty(heads).uniform_(1, 16))), nn.Parameter(bias)
