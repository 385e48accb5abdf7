"""The recurrent layer, GatedDeltaNet, in the two layouts of its projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_model.network.config import ModelConfig
from demo_model.network.gated_delta import causal_convolution, gated_delta, gated_delta_step
from demo_model.network.layers import Weight, initial_gates

RESET = -30.0
"""Log of the decay at a padding position between documents: three of them leave exp(-90)."""
State = tuple[Tensor, Tensor]
"""The last K - 1 inputs of the convolution [B, K - 1, C], and the state [B, H, Dk, Dv]."""


class GatedDeltaNet(nn.Module):
    """As published, with packed documents in training.

    Args:
        config: its family decides whether the projections are joined by key head (Qwen3-Next) or
            apart (Qwen3.5).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.joined = config.family == "qwen3_next"
        self.ratio = config.linear_num_value_heads // config.linear_num_key_heads
        size, heads = config.hidden_size, config.linear_num_value_heads
        self.keys = config.linear_num_key_heads * config.linear_key_head_dim
        self.values = heads * config.linear_value_head_dim
        if self.joined:
            self.in_proj_qkvz = Weight(2 * self.keys + 2 * self.values, size)
            self.in_proj_ba = Weight(2 * heads, size)
        else:
            self.in_proj_qkv = Weight(2 * self.keys + self.values, size)
            self.in_proj_z = Weight(self.values, size)
            self.in_proj_b = Weight(heads, size)
            self.in_proj_a = Weight(heads, size)
        self.conv1d = nn.Module()
        shape = (2 * self.keys + self.values, 1, config.linear_conv_kernel_dim)
        self.conv1d.weight = nn.Parameter(torch.empty(shape).uniform_(-0.5, 0.5))
        self.A_log, self.dt_bias = initial_gates(heads)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(config.linear_value_head_dim))
        self.out_proj = Weight(size, self.values)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """Packed rows.

        Args:
            x: [B, T, H].
            keep: false at padding, which resets the state; [B, T].
        """
        out, _ = self._run(x, keep, RESET)
        return out

    def prefill(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, State]:
        """Rows padded at their end; the state is that after each row's last token.

        Args:
            x: [B, T, H].
            lengths: tokens of each row, [B].
        """
        keep = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)
        out, state = self._run(x, keep, 0.0)
        width = self.config.linear_conv_kernel_dim - 1
        inputs = functional.pad(
            self._project(x * keep.unsqueeze(-1).to(x.dtype))[0], (0, 0, width, 0)
        )
        last = lengths.unsqueeze(1) + torch.arange(width, device=x.device)
        recent = inputs.gather(1, last.unsqueeze(-1).expand(-1, -1, inputs.shape[-1]))
        return out, (recent, state)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One token a row, [B, 1, H]."""
        mixed, z, b, a = self._project(x)
        inputs = torch.cat([state[0].to(mixed.dtype), mixed], 1)
        q, k, v = self._heads(causal_convolution(inputs, self.conv1d.weight))
        g, beta = self._log_decay(a)[:, 0], b.sigmoid()[:, 0]
        out, memory = gated_delta_step(q[:, 0], k[:, 0], v[:, 0], g, beta, state[1])
        return self._gated(out.unsqueeze(1), z, x.dtype), (inputs[:, 1:], memory)

    def _run(self, x: Tensor, keep: Tensor, padding: float) -> tuple[Tensor, Tensor]:
        # Padding adds exact zeros to the convolution, as in a fresh document.
        mixed, z, b, a = self._project(x * keep.unsqueeze(-1).to(x.dtype))
        inputs = functional.pad(mixed, (0, 0, self.config.linear_conv_kernel_dim - 1, 0))
        q, k, v = self._heads(causal_convolution(inputs, self.conv1d.weight))
        g = torch.where(keep.unsqueeze(-1), self._log_decay(a), padding)
        out, state = gated_delta(q, k, v, g, b.sigmoid() * keep.unsqueeze(-1))
        return self._gated(out, z, x.dtype), state

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v in one, z [B, T, heads, Dv], b and a in float32 [B, T, heads]."""
        config = self.config
        heads, dv = config.linear_num_value_heads, config.linear_value_head_dim
        if not self.joined:
            z = self.in_proj_z(x).unflatten(-1, (heads, dv))
            return self.in_proj_qkv(x), z, self.in_proj_b(x).float(), self.in_proj_a(x).float()
        dk, width = config.linear_key_head_dim, self.ratio * dv
        by_key_head = (config.linear_num_key_heads, -1)
        qkvz = self.in_proj_qkvz(x).unflatten(-1, by_key_head)
        q, k, v, z = qkvz.split([dk, dk, width, width], -1)
        ba = self.in_proj_ba(x).float().unflatten(-1, by_key_head)
        b, a = ba.split([self.ratio, self.ratio], -1)
        mixed = torch.cat([q.flatten(-2), k.flatten(-2), v.flatten(-2)], -1)
        return mixed, z.reshape(*x.shape[:2], heads, dv), b.flatten(-2), a.flatten(-2)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k once for each value head."""
        config = self.config
        q, k, v = mixed.split([self.keys, self.keys, self.values], -1)
        by_key = (config.linear_num_key_heads, config.linear_key_head_dim)
        q = q.unflatten(-1, by_key).repeat_interleave(self.ratio, 2)
        k = k.unflatten(-1, by_key).repeat_interleave(self.ratio, 2)
        heads = (config.linear_num_value_heads, config.linear_value_head_dim)
        return q, k, v.unflatten(-1, heads)

    def _log_decay(self, a: Tensor) -> Tensor:
        return -self.A_log.exp() * functional.softplus(a + self.dt_bias)

    def _gated(self, out: Tensor, z: Tensor, dtype: torch.dtype) -> Tensor:
        scale = torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        out = out * scale * self.norm.weight * functional.silu(z.float())
        return self.out_proj(out.to(dtype).flatten(-2))
