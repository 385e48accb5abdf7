"""The whole model: trunk, output layer and MTP head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_model.network.config import ModelConfig
from demo_model.network.delta_net import GatedDeltaNet
from demo_model.network.layers import MLP, Attention, MixtureOfExperts, Norm, Weight


class Layer(nn.Module):
    """Attention or recurrence, then an MLP or experts, each behind a norm."""

    def __init__(self, config: ModelConfig, full_attention: bool) -> None:
        super().__init__()
        size = config.hidden_size
        self.dtype = torch.float32
        if full_attention:
            self.self_attn = Attention(config)
        else:
            self.linear_attn = GatedDeltaNet(config)
        self.full_attention = full_attention
        self.input_layernorm = Norm(size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(size, config.rms_norm_eps)
        self.mlp: MixtureOfExperts | MLP = (
            MixtureOfExperts(config) if config.num_experts else MLP(size, config.intermediate_size)
        )

    def forward(
        self,
        x: Tensor,
        keep: Tensor,
        mask: Tensor,
        keys: Sequence[Tensor] = (),
        values: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Packed rows.

        Args:
            x: the residual stream, float32 [B, T, H].
            keep: false at padding, [B, T].
            mask: what each position may look at, [B, 1, T, S].
            keys: of earlier depths of the head, to look at before its own.
            values: of these.

        Returns:
            The residual stream, the router's balance loss, and this pass's own keys and values.
        """
        h = self.input_layernorm(x, self.dtype)
        k = v = x.new_zeros(())
        if self.full_attention:
            positions = torch.arange(x.shape[1], device=x.device)
            q, k, v, gate = self.self_attn.project(h, positions)
            seen_k, seen_v = torch.cat([*keys, k], 2), torch.cat([*values, v], 2)
            x = x + self.self_attn.attend(q, seen_k, seen_v, gate, mask)
        else:
            x = x + self.linear_attn(h, keep)
        out, balance = self.mlp(self.post_attention_layernorm(x, self.dtype), keep)
        return x + out, balance, k, v


class MTPHead(nn.Module):
    """Joins the next token with a hidden state, and runs one layer of attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = Weight(size, 2 * size)
        self.layers = nn.ModuleList([Layer(config, full_attention=True)])
        self.norm = Norm(size, eps)
        self.pre_fc_norm_hidden = Norm(size, eps)
        self.pre_fc_norm_embedding = Norm(size, eps)
        with torch.no_grad():  # It begins by passing the hidden state on.
            self.fc.weight[:, size:] += torch.eye(size)

    def join(self, embeddings: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """The layer's input; the embedding comes first."""
        parts = [
            self.pre_fc_norm_embedding(embeddings, dtype),
            self.pre_fc_norm_hidden(hidden, dtype),
        ]
        return self.fc(torch.cat(parts, -1))


class Trunk(nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Weight(config.vocab_size, config.hidden_size)
        full = map(config.is_full_attention, range(config.num_hidden_layers))
        self.layers = nn.ModuleList([Layer(config, each) for each in full])
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class DemoModel(nn.Module):
    """Qwen3-Next or dense Qwen3.5 with its head.

    Args:
        config: its shape.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.dtype = torch.float32
        self.model = Trunk(config)
        self.lm_head = Weight(config.vocab_size, config.hidden_size)
        self.mtp = MTPHead(config)
        into_stream = ("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")
        for name, parameter in self.named_parameters():
            if name.endswith(into_stream):
                parameter.data.mul_((2 * config.num_hidden_layers) ** -0.5)

    def compute_in(self, dtype: torch.dtype) -> DemoModel:
        """Matrix products in this type; parameters, norms and states stay in float32."""
        self.dtype = dtype
        for module in self.modules():
            if isinstance(module, Layer):
                module.dtype = dtype
        return self

    def embed(self, ids: Tensor) -> Tensor:
        """[B, T] to [B, T, H]."""
        return functional.embedding(ids, self.model.embed_tokens.weight)

    def trunk(self, ids: Tensor, segments: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states after the final norm [B, T, H], and the mean balance loss.

        Args:
            ids: [B, T], T a multiple of 32.
            segments: the number of each position's document, 0 at padding; [B, T].
            mask: the first of `attention_masks`.
        """
        x, keep = self.embed(ids), segments > 0
        balance = x.new_zeros(())
        for layer in self.model.layers:
            x, loss, _, _ = layer(x, keep, mask)
            balance = balance + loss
        return self.model.norm(x, self.dtype), balance / len(self.model.layers)

    def drafts(
        self, ids: Tensor, segments: Tensor, hidden: Tensor, masks: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """The head's output [B, T, H] and balance loss at each depth, as many as there are masks.

        Row q of every depth takes token q + 1 and predicts token q + 2. Depth 1 reads the trunk's
        hidden state at q, depth d what depth d - 1 made at q - 1: so row q of depth d is the d-th
        draft of a window that began at q - d + 1, all of whose tokens were accepted.
        """
        keep = segments > 0
        embeddings = self.embed(functional.pad(ids[:, 1:], (0, 1)))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        out: list[tuple[Tensor, Tensor]] = []
        for mask in masks:
            x = self.mtp.join(embeddings, hidden, self.dtype).float()
            x, balance, k, v = self.mtp.layers[0](x, keep, mask, tuple(keys), tuple(values))
            made = self.mtp.norm(x, self.dtype)
            out.append((made, balance))
            keys.append(k)
            values.append(v)
            hidden = functional.pad(made[:, :-1], (0, 0, 1, 0))
        return out


def attention_masks(segments: Tensor, depth: int) -> list[Tensor]:
    """What a position may look at, [B, 1, T, S] for the trunk and each depth of the head.

    At depth d a row sees the keys that the trunk's hidden states made up to its window's start,
    one key of each depth between, and its own. A position always sees itself, so that padding has
    something to look at.

    Args:
        segments: the number of each position's document; [B, T].
        depth: of the head, 1 or more. The trunk's mask and the head's first are the same.
    """
    place = torch.arange(segments.shape[1], device=segments.device)
    distance = place[:, None] - place[None, :]
    same = segments[:, :, None] == segments[:, None, :]
    itself = (distance == 0).expand_as(same)
    masks = [(same & (distance >= 0)) | itself]
    for number in range(2, depth + 1):
        true = same & (distance >= number - 1)
        between = [same & (distance == number - other) for other in range(2, number)]
        masks.append(torch.cat([true, *between, itself], -1))
    return [mask.unsqueeze(1) for mask in masks]
