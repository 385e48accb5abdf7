"""The gated delta rule in PyTorch: all chunks of a row at once, and one position at a time.

Yang, Kautz, Hatamizadeh: "Gated Delta Networks" (2024), section 3.3, with the WY form inverted by
blocks and the chunks joined by a scan over their transitions, so that no loop runs over positions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 32
"""Positions a chunk; 8 times a power of two."""


def normalized(x: Tensor) -> Tensor:
    """Of length 1 along the last dimension, as published models do it."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Run rows from an empty state, in float32.

    Args:
        q: [B, T, H, Dk], with T a multiple of `CHUNK`.
        k: [B, T, H, Dk].
        v: [B, T, H, Dv].
        g: log of the decay, [B, T, H].
        beta: how much of each position is written, [B, T, H].

    Returns:
        The outputs [B, T, H, Dv] and the state after the last position [B, H, Dk, Dv].
    """
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    q, k = normalized(q) * q.shape[-1] ** -0.5, normalized(k)
    batch, heads, length, dk = q.shape
    chunks = (batch, heads, length // CHUNK, CHUNK)
    q, k, v = (x.reshape(*chunks, -1) for x in (q, k, v))
    g = g.float().transpose(1, 2).reshape(chunks).cumsum(-1)
    beta = beta.float().transpose(1, 2).reshape(*chunks, 1)
    place = torch.arange(CHUNK, device=q.device)
    before = place[:, None] >= place[None, :]
    decay = torch.where(before, g.unsqueeze(-1) - g.unsqueeze(-2), float("-inf")).exp()
    written = k * beta
    lower = torch.where(place[:, None] > place[None, :], written @ k.mT * decay, 0.0)
    inverse = unit_lower_inverse(lower)
    grown = g.exp().unsqueeze(-1)
    new_values, old_keys = inverse @ (v * beta), inverse @ (written * grown)
    # A chunk maps its state S to M S + N.
    left = (k * (g[..., -1:] - g).exp().unsqueeze(-1)).mT
    kept = g[..., -1].exp()[..., None, None] * torch.eye(dk, device=q.device)
    after = _scan(torch.cat([kept - left @ old_keys, left @ new_values], -1), dk)
    ends = after[..., dk:]
    starts = torch.cat([torch.zeros_like(ends[:, :, :1]), ends[:, :, :-1]], 2)
    delta = new_values - old_keys @ starts
    out = (q * grown) @ starts + ((q @ k.mT) * decay) @ delta
    return out.reshape(batch, heads, length, -1).transpose(1, 2), ends[:, :, -1]


def _scan(maps: Tensor, dk: int) -> Tensor:
    """Each chunk's map after all before it, by doubling; [B, H, N, Dk, Dk + Dv] as [M | N]."""
    step = 1
    while step < maps.shape[2]:
        later, earlier = maps[:, :, step:], maps[:, :, :-step]
        joined = later[..., :dk] @ earlier
        joined = torch.cat([joined[..., :dk], joined[..., dk:] + later[..., dk:]], -1)
        maps = torch.cat([maps[:, :, :step], joined], 2)
        step *= 2
    return maps


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """Inverse of I + L for strictly lower L, [.., n, n] with n = 8 * 2^k.

    The 8 x 8 blocks on the diagonal by (I - L)(I + L^2)(I + L^4), which is exact as L^8 = 0; then
    twice the size at each step.
    """
    size = lower.shape[-1]
    eye = torch.eye(8, device=lower.device, dtype=lower.dtype)
    block = _diagonal_blocks(lower, 8)
    square = block @ block
    inverse = (eye - block) @ (eye + square) @ (eye + square @ square)
    width = 8
    while width < size:
        below = _diagonal_blocks(lower, 2 * width)[..., width:, :width]
        upper, under = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        top = torch.cat([upper, torch.zeros_like(upper)], -1)
        inverse = torch.cat([top, torch.cat([-(under @ below) @ upper, under], -1)], -2)
        width *= 2
    return inverse.squeeze(-3)


def _diagonal_blocks(matrix: Tensor, width: int) -> Tensor:
    """[.., n, n] to [.., n / width, width, width]."""
    count = matrix.shape[-1] // width
    parts = matrix.reshape(*matrix.shape[:-2], count, width, count, width)
    return parts.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One position: q, k [B, H, Dk], v [B, H, Dv], g, beta [B, H], state [B, H, Dk, Dv]."""
    q, k, v = q.float(), k.float(), v.float()
    q, k = normalized(q) * q.shape[-1] ** -0.5, normalized(k)
    state = state * g.float().exp()[..., None, None]
    known = (state * k.unsqueeze(-1)).sum(-2)
    delta = (v - known) * beta.float().unsqueeze(-1)
    state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2), state


def causal_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Each channel's own filter over the last K positions, then silu: x [B, K - 1 + T, C]."""
    width = weight.shape[-1]
    length = x.shape[1] - width + 1
    filters = weight.squeeze(1).to(x.dtype)
    return functional.silu(sum(x[:, j : j + length] * filters[:, j] for j in range(width)))
