"""Answers by PyTorch, and the drafts that the head would have made beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from demo_model.acceptance import DEPTH
from demo_model.network.gated_delta import CHUNK
from demo_model.network.model import DemoModel, Layer, attention_masks
from demo_model.tokenizer import END_ID, PAD_ID

Cache = tuple[Tensor, Tensor]
"""Keys and values [B, heads, capacity, D], or a recurrent layer's two states."""


@dataclass(frozen=True)
class Noise:
    """Gumbel noise for each row and position of the answers, by which tokens are drawn.

    Args:
        temperature: 0 is greedy, and there is no noise.
        seed: of all of it.
    """

    temperature: float
    seed: int

    def scores(self, logits: Tensor, position: int) -> Tensor:
        """What the token at a position after the prompts is the maximum of; logits [B, V]."""
        if not self.temperature:
            return logits
        generator = torch.Generator(logits.device).manual_seed(self.seed * 100_003 + position)
        uniform = torch.rand(logits.shape, generator=generator, device=logits.device)
        return logits / self.temperature - torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))


@torch.no_grad()
def answers(
    model: DemoModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, noise: Noise
) -> list[list[int]]:
    """One answer to each prompt, its end token included, all decoded together.

    Args:
        model: computes in float32.
        prompts: token ids.
        max_new_tokens: after which an answer is cut.
        noise: by which tokens are drawn.
    """
    device = next(model.parameters()).device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    capacity = _whole_chunks(int(lengths.max()) + max_new_tokens)
    hidden, caches = _prefill(model, prompts, lengths, capacity)
    tokens: list[Tensor] = []
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for position in range(max_new_tokens):
        token = noise.scores(model.lm_head(hidden), position).argmax(-1)
        tokens.append(torch.where(ended, PAD_ID, token))
        ended = ended | (token == END_ID)
        if position % 16 == 15 and bool(ended.all()):
            break
        hidden = _step(model, token, lengths + position, caches)
    rows = torch.stack(tokens, 1).tolist()
    return [row[: row.index(END_ID) + 1] if END_ID in row else row for row in rows]


def _whole_chunks(length: int) -> int:
    return -(-length // CHUNK) * CHUNK


def _prefill(
    model: DemoModel, prompts: Sequence[Sequence[int]], lengths: Tensor, capacity: int
) -> tuple[Tensor, list[Cache]]:
    """The last token's hidden state of each row [B, H], and the layers' caches."""
    width = _whole_chunks(max(len(p) for p in prompts))
    padded = [[*p, *[PAD_ID] * (width - len(p))] for p in prompts]
    ids = torch.tensor(padded, device=lengths.device)
    positions = torch.arange(width, device=ids.device)
    mask = (positions[:, None] >= positions[None, :])[None, None]
    keep = positions < lengths.unsqueeze(1)
    x, caches = model.embed(ids), []
    for layer in model.model.layers:
        x, cache = _prefill_layer(layer, x, mask, keep, lengths, capacity)
        caches.append(cache)
    last = x[torch.arange(len(x), device=x.device), lengths - 1]
    return model.model.norm(last, model.dtype), caches


def _prefill_layer(
    layer: Layer, x: Tensor, mask: Tensor, keep: Tensor, lengths: Tensor, capacity: int
) -> tuple[Tensor, Cache]:
    h = layer.input_layernorm(x, layer.dtype)
    if layer.full_attention:
        positions = torch.arange(x.shape[1], device=x.device)
        q, k, v, gate = layer.self_attn.project(h, positions)
        x = x + layer.self_attn.attend(q, k, v, gate, mask)
        room = (0, 0, 0, capacity - x.shape[1])
        cache = (functional.pad(k, room), functional.pad(v, room))
    else:
        out, cache = layer.linear_attn.prefill(h, lengths)
        x = x + out
    out, _ = layer.mlp(layer.post_attention_layernorm(x, layer.dtype), keep)
    return x + out, cache


def _step(model: DemoModel, token: Tensor, positions: Tensor, caches: list[Cache]) -> Tensor:
    """Take one token a row at its position [B]; changes the caches, returns hidden [B, H]."""
    x = model.embed(token.unsqueeze(1))
    keep = torch.ones_like(token, dtype=torch.bool).unsqueeze(1)
    for index, layer in enumerate(model.model.layers):
        h = layer.input_layernorm(x, layer.dtype)
        if layer.full_attention:
            x = x + _attend_step(layer, h, positions, caches[index])
        else:
            out, caches[index] = layer.linear_attn.step(h, caches[index])
            x = x + out
        out, _ = layer.mlp(layer.post_attention_layernorm(x, layer.dtype), keep)
        x = x + out
    return model.model.norm(x[:, 0], model.dtype)


def _attend_step(layer: Layer, h: Tensor, positions: Tensor, cache: Cache) -> Tensor:
    keys, values = cache
    q, k, v, gate = layer.self_attn.project(h, positions.unsqueeze(1))
    rows = torch.arange(len(h), device=h.device)
    keys[rows, :, positions] = k[:, :, 0].to(keys.dtype)
    values[rows, :, positions] = v[:, :, 0].to(values.dtype)
    places = torch.arange(keys.shape[2], device=h.device)
    mask = (places <= positions.unsqueeze(1))[:, None, None]
    return layer.self_attn.attend(q, keys, values, gate, mask)


@torch.no_grad()
def draft_hits(
    model: DemoModel, prompts: Sequence[Sequence[int]], said: Sequence[Sequence[int]], noise: Noise
) -> list[list[list[bool]]]:
    """Which drafts would have been accepted: for each text, depth and row; see `walk`.

    Args:
        model: computes in float32.
        prompts: as `answers` had them, in the same order.
        said: its answers to them.
        noise: the same.
    """
    device = next(model.parameters()).device
    texts = [[*p, *a] for p, a in zip(prompts, said)]
    width = _whole_chunks(max(map(len, texts)))
    ids = torch.tensor([[*t, *[PAD_ID] * (width - len(t))] for t in texts], device=device)
    lengths = torch.tensor([len(t) for t in texts], device=device)
    segments = (torch.arange(width, device=device) < lengths.unsqueeze(1)).int()
    masks = attention_masks(segments, DEPTH)
    hidden, _ = model.trunk(ids, segments, masks[0])
    target = functional.pad(ids[:, 2:], (0, 2), value=-1)
    starts = torch.tensor([len(p) for p in prompts], device=device)
    hits = []
    for made, _ in model.drafts(ids, segments, hidden, masks):
        drafted = _drawn(model, made, starts, max(map(len, said)), noise)
        hits.append((drafted == target).cpu())
    return [[depth[i, : len(text)].tolist() for depth in hits] for i, text in enumerate(texts)]


def _drawn(model: DemoModel, made: Tensor, starts: Tensor, num_tokens: int, noise: Noise) -> Tensor:
    """The tokens that rows of the head draft, with the noise of the places they are for [B, T].

    Only rows for tokens of the answers after their first are drawn; the others are -1.
    """
    out = torch.full(made.shape[:2], -1, device=made.device)
    rows = torch.arange(len(made), device=made.device)
    for position in range(1, num_tokens):
        row = (starts + position - 2).clamp(max=made.shape[1] - 1)
        logits = model.lm_head(made[rows, row])
        out[rows, row] = noise.scores(logits, position).argmax(-1)
    return out
