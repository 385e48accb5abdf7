"""The MTP head in NumPy, float64, written from its description without the package's code."""

from typing import Any

import numpy as np


class ReferenceHead:
    """Runs on tensors as published: zero-centred norms, and one tensor per expert."""

    def __init__(
        self, tensors: dict[str, np.ndarray], config: dict[str, Any], prefix: str, embed: str
    ):
        names = [name for name in tensors if name.startswith(prefix)]
        self.w = {n.removeprefix(prefix): tensors[n].astype(np.float64) for n in names}
        self.c = config
        self.embedding = tensors[embed].astype(np.float64)
        self.lm_head = tensors.get("lm_head.weight", tensors[embed]).astype(np.float64)

    def drafts(self, hidden: np.ndarray, tokens: list[int], depth: int) -> list[np.ndarray]:
        """Returns logits of `depth` drafts after post-norm hidden states [n, H] and next tokens."""
        rows = [self.join(h, t) for h, t in zip(hidden, tokens)]
        out = []
        for _ in range(depth):
            m = self.layer(np.stack(rows))[-1]
            m = self.norm(m, "norm.weight")
            logits = self.lm_head @ m
            out.append(logits)
            rows.append(self.join(m, int(np.argmax(logits))))
        return out

    def join(self, hidden: np.ndarray, token: int) -> np.ndarray:
        left = self.norm(self.embedding[token], "pre_fc_norm_embedding.weight")
        right = self.norm(hidden.astype(np.float64), "pre_fc_norm_hidden.weight")
        return self.w["fc.weight"] @ np.concatenate([left, right])

    def layer(self, z: np.ndarray) -> np.ndarray:
        x = z + self.attention(self.norm(z, "layers.0.input_layernorm.weight"))
        rows = self.norm(x, "layers.0.post_attention_layernorm.weight")
        return x + np.stack([self.mlp(row) for row in rows])

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"])
        return x / scale * (1.0 + self.w[name])

    def rope(self, x: np.ndarray) -> np.ndarray:
        rope = self.c.get("rope_parameters", self.c)
        size = int(self.c["head_dim"] * rope["partial_rotary_factor"])
        frequency = 1.0 / rope["rope_theta"] ** (np.arange(0, size, 2) / size)
        angle = np.arange(x.shape[0])[:, None] * frequency
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def attention(self, x: np.ndarray) -> np.ndarray:
        c, n = self.c, len(x)
        heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        w = {k: self.w[f"layers.0.self_attn.{k}_proj.weight"] for k in "qkvo"}
        doubled = (x @ w["q"].T).reshape(n, heads, 2 * dim)
        q, gate = doubled[..., :dim], doubled[..., dim:]
        q = self.rope(self.norm(q, "layers.0.self_attn.q_norm.weight"))
        k = (x @ w["k"].T).reshape(n, kv, dim)
        k = self.rope(self.norm(k, "layers.0.self_attn.k_norm.weight"))
        v = (x @ w["v"].T).reshape(n, kv, dim)
        out = np.zeros((n, heads, dim))
        for h in range(heads):
            scores = q[:, h] @ k[:, h * kv // heads].T / np.sqrt(dim)
            scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, h] = p / p.sum(-1, keepdims=True) @ v[:, h * kv // heads]
        return (out / (1 + np.exp(-gate))).reshape(n, -1) @ w["o"].T

    def mlp(self, x: np.ndarray) -> np.ndarray:
        base = "layers.0.mlp."
        if f"{base}gate.weight" not in self.w:
            return self.glu(x, *self.projections(base))
        router = self.w[f"{base}gate.weight"] @ x
        p = np.exp(router - router.max())
        p /= p.sum()
        chosen = np.argsort(-p)[: self.c["num_experts_per_tok"]]
        weights = p[chosen] / p[chosen].sum()
        experts = [self.projections(f"{base}experts.{index}.") for index in chosen]
        y = sum(w * self.glu(x, *expert) for w, expert in zip(weights, experts))
        shared = self.glu(x, *self.projections(f"{base}shared_expert."))
        gate = 1 / (1 + np.exp(-(self.w[f"{base}shared_expert_gate.weight"] @ x)))
        return y + gate * shared

    def projections(self, base: str) -> list[np.ndarray]:
        return [self.w[f"{base}{name}_proj.weight"] for name in ("gate", "up", "down")]

    @staticmethod
    def glu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        g = gate @ x
        return down @ (g / (1 + np.exp(-g)) * (up @ x))
