"""A tiny random Qwen3-Embedding checkpoint, and a reference of the model in NumPy in float64."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.conftest import DEMO

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,  # as in some originals, although they have no lm_head
}
Weights = dict[str, np.ndarray]


def random_weights(seed: int = 0) -> Weights:
    """Returns float32 tensors by their names in the original checkpoints."""
    draw, c = np.random.default_rng(seed), CONFIG
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    heads, of_keys = (c[f"num_{kind}_heads"] * c["head_dim"] for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (c["vocab_size"], hidden)}
    for layer in range(c["num_hidden_layers"]):
        parts = {"q": (heads, hidden), "k": (of_keys, hidden), "v": (of_keys, hidden)}
        attention = {f"{k}_proj": shape for k, shape in (*parts.items(), ("o", (hidden, heads)))}
        attention |= {"q_norm": (c["head_dim"],), "k_norm": (c["head_dim"],)}
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
        mlp |= {"down_proj": (hidden, inner)}
        start = f"layers.{layer}."
        shapes |= {f"{start}self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{start}mlp.{name}.weight": shape for name, shape in mlp.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{start}{name}.weight"] = (hidden,)
    shapes["norm.weight"] = (hidden,)
    scale = {1: 0.3, 2: 1.5 / np.sqrt(hidden)}
    return {
        name: (scale[len(shape)] * draw.standard_normal(shape) + (len(shape) == 1)).astype("f4")
        for name, shape in shapes.items()
    }


def write_embedding_model(path: Path, prefix: str = "") -> Weights:
    """Write the checkpoint, names prefixed, and the bundled tokenizer; returns the weights."""
    path.mkdir(parents=True)
    weights = random_weights()
    stored = {prefix + name: mx.array(value) for name, value in weights.items()}
    mx.save_safetensors(str(path / "model.safetensors"), stored)
    (path / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, path / name)
    return weights


def reference(weights: Weights, ids: Sequence[int]) -> np.ndarray:
    """Returns the normalized vector of a text, float64 [hidden_size]."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    groups = CONFIG["num_attention_heads"] // CONFIG["num_key_value_heads"]
    dim, length = CONFIG["head_dim"], len(ids)
    angles = np.outer(np.arange(length), CONFIG["rope_theta"] ** (-np.arange(0, dim, 2) / dim))
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean + CONFIG["rms_norm_eps"]) * w[name + ".weight"]

    def rotated(x: np.ndarray) -> np.ndarray:
        one, two = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)

    x = w["embed_tokens.weight"][list(ids)]
    for layer in range(CONFIG["num_hidden_layers"]):
        start = f"layers.{layer}."

        def linear(x: np.ndarray, name: str, start: str = start) -> np.ndarray:
            return x @ w[f"{start}{name}.weight"].T

        y = norm(x, start + "input_layernorm")
        q, k, v = (linear(y, f"self_attn.{n}_proj").reshape(length, -1, dim) for n in "qkv")
        q = rotated(norm(q, start + "self_attn.q_norm"))
        k = rotated(norm(k, start + "self_attn.k_norm"))
        k, v = (np.repeat(each, groups, axis=1) for each in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        scores[:, np.triu_indices(length, 1)[0], np.triu_indices(length, 1)[1]] = -np.inf
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, v).reshape(length, -1)
        x = x + linear(mixed, "self_attn.o_proj")
        y = norm(x, start + "post_attention_layernorm")
        gate, up = linear(y, "mlp.gate_proj"), linear(y, "mlp.up_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, "mlp.down_proj")
    last = norm(x[-1], "norm")
    return last / np.linalg.norm(last)
