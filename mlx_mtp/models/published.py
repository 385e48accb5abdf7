"""Published models of the supported families: their short names, hub ids and sizes.

Shapes come from the originals' config.json files, hub ids from public programs that load them. The
ids were not checked on the hub; `mlx-mtp inspect NAME` does that.
"""

import difflib
import re
from typing import Any, NamedTuple

GROUP_SIZE = 64
"""Weights that share a scale in the published quantizations."""
BITS = (4, 8)
"""Bits per weight of the published quantizations of each model."""

_GDN: dict[str, Any] = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_ROPE: dict[str, Any] = {
    "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
}


def _expert_fields(count: int, used: int, size: int = 512) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": size,
        "intermediate_size": size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3_5(
    hidden: int, layers: int, heads: tuple[int, int], value_heads: int, **more: Any
) -> dict[str, Any]:
    """`heads` is attention's number of query heads and KV heads; `value_heads` GatedDeltaNet's."""
    model_type = "qwen3_5_moe" if "num_experts" in more else "qwen3_5"
    sizes = {"vocab_size": 248320, "hidden_size": hidden, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    inner = {**_GDN, **_ROPE, **sizes, "linear_num_value_heads": value_heads, **more}
    return {"model_type": model_type, "text_config": {"model_type": f"{model_type}_text", **inner}}


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_DENSE_27B = _qwen3_5(5120, 64, (24, 4), 48, intermediate_size=17408)
_MOE_35B = _qwen3_5(2048, 40, (16, 2), 32, **_expert_fields(256, 8))
_NEXT_80B: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    **_GDN,
    **_expert_fields(512, 10),
    "intermediate_size": 5120,
}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3.5-397B-A17B": _qwen3_5(4096, 60, (32, 2), 64, **_expert_fields(512, 10, 1024)),
    "Qwen3.5-122B-A10B": _qwen3_5(3072, 48, (32, 2), 64, **_expert_fields(256, 8, 1024)),
    "Qwen3.6-35B-A3B": _MOE_35B,
    "Qwen3.8-27B": _DENSE_27B,
    "Qwen3.6-27B": _DENSE_27B,
    "Qwen3.5-35B-A3B": _MOE_35B,
    "Qwen3.5-27B": _DENSE_27B,
    "Qwen3-Next-80B-A3B-Instruct": _NEXT_80B,
    "Qwen3-Next-80B-A3B-Thinking": _NEXT_80B,
    "Qwen3.5-9B": _qwen3_5(4096, 32, (16, 4), 32, intermediate_size=12288),
    "Qwen3.5-4B": _qwen3_5(2560, 32, (16, 4), 32, intermediate_size=9216, **_TIED),
    "Qwen3.5-2B": _qwen3_5(2048, 24, (8, 2), 16, intermediate_size=6144, **_TIED),
    "Qwen3.5-0.8B": _qwen3_5(1024, 24, (8, 2), 16, intermediate_size=3584, **_TIED),
}
"""config.json by name, in the order in which `auto` prefers the models: the best first."""
_INFIX = {name: "MLX-" for name in SHAPES if name.endswith(("-0.8B", "-2B", "-4B", "-9B"))}


class PublishedSizes(NamedTuple):
    """Bytes of a model and its head; tests/inspect/test_models.py computes them from the shape."""

    bf16_head: int
    weights: dict[int, int]  # by bits per weight
    head: dict[int, int]  # by bits per weight


_27B = PublishedSizes(
    849_398_784, {4: 15_132_802_048, 8: 28_579_478_528}, {4: 238_930_944, 8: 451_267_584}
)
_35B = PublishedSizes(
    1_689_281_536, {4: 19_508_787_456, 8: 36_827_986_176}, {4: 475_389_056, 8: 897_440_896}
)
_80B = PublishedSizes(
    3_300_942_848, {4: 44_844_060_160, 8: 84_655_345_152}, {4: 928_930_944, 8: 1_753_635_968}
)
SIZES = {
    "Qwen3.5-397B-A17B": PublishedSizes(
        13_191_136_256,
        {4: 223_011_779_072, 8: 421_120_553_472},
        {4: 3_711_087_872, 8: 7_007_810_816},
    ),
    "Qwen3.5-122B-A10B": PublishedSizes(
        5_047_358_464,
        {4: 68_709_676_032, 8: 129_745_449_984},
        {4: 1_419_987_136, 8: 2_681_424_064},
    ),
    **dict.fromkeys(("Qwen3.6-35B-A3B", "Qwen3.5-35B-A3B"), _35B),
    **dict.fromkeys(("Qwen3.8-27B", "Qwen3.6-27B", "Qwen3.5-27B"), _27B),
    **dict.fromkeys(("Qwen3-Next-80B-A3B-Instruct", "Qwen3-Next-80B-A3B-Thinking"), _80B),
    "Qwen3.5-9B": PublishedSizes(
        486_581_248, {4: 5_038_040_064, 8: 9_514_411_008}, {4: 136_881_152, 8: 258_515_968}
    ),
    "Qwen3.5-4B": PublishedSizes(
        241_199_104, {4: 2_367_117_312, 8: 4_469_512_192}, {4: 67_856_384, 8: 128_149_504}
    ),
    "Qwen3.5-2B": PublishedSizes(
        121_656_320, {4: 1_059_315_328, 8: 1_999_953_536}, {4: 34_231_296, 8: 64_640_000}
    ),
    "Qwen3.5-0.8B": PublishedSizes(
        40_905_728, {4: 423_937_664, 8: 799_884_928}, {4: 11_512_832, 8: 21_736_448}
    ),
}


class PublishedQuant(NamedTuple):
    """A quantization on the hub."""

    name: str  # of the original model, without its organisation
    bits: int

    def __str__(self) -> str:
        return f"{self.name}-{self.bits}bit"

    @property
    def repo_id(self) -> str:
        return f"mlx-community/{self.name}-{_INFIX.get(self.name, '')}{self.bits}bit"


RELEASES = tuple(PublishedQuant(name, bits) for name in SHAPES for bits in reversed(BITS))
_DERIVED = {"prism-ml/Ternary-Bonsai-2-27B-mlx-2bit": "Qwen3.8-27B"}
_WITH_HEAD_ALONE = (
    *("Qwen3.5-4B", "Qwen3.5-9B"),
    *("Qwen3.6-27B", "Qwen3.6-35B-A3B", "Qwen3.8-27B"),
)
_NAMES = {each.repo_id: each.name for each in RELEASES} | _DERIVED


source_of = {repo_id: f"Qwen/{name}" for repo_id, name in _NAMES.items()}.get
"""Returns the hub id of the original of a published quantization or derivative; None if unknown."""
head_repo_of = {
    repo_id: f"mlx-community/{name}-MTP-bf16"
    for repo_id, name in _NAMES.items()
    if name in _WITH_HEAD_ALONE
}.get
"""Returns the hub id of the repository with only the model's bfloat16 head; None if unknown."""


def fetched_head_nbytes(repo_id: str) -> int:
    """Returns the bytes of the head that `serve` downloads for a published model; 0 for others."""
    if (name := _NAMES.get(repo_id)) is None:
        return 0
    # Derivatives get a head of 4 bits.
    bits = next((each.bits for each in RELEASES if each.repo_id == repo_id), min(BITS))
    return SIZES[name].head[bits]


def _short_names(name: str) -> list[str]:
    full = name.lower()
    default = full.removesuffix("-instruct")
    brief = re.sub(r"-a[0-9]+b", "", default)
    return [full, default, brief, re.sub(r"-[0-9.]+b", "", brief)]


_MODELS_NAMED: dict[str, list[str]] = {"auto": list(SHAPES)}
for _model in SHAPES:
    for _short in dict.fromkeys(_short_names(_model)):
        _MODELS_NAMED.setdefault(_short, []).append(_model)


def releases_named(text: str) -> list[PublishedQuant]:
    """Returns the quantizations that a short name can mean, preferred ones first; [] if unknown.

    Case doesn't matter, and `:`, `_` and `-` are equal. A name that ends in -4bit or -8bit means
    only that quantization.
    """
    name, bits = _split(text)
    models = _MODELS_NAMED.get(name, [])
    return [each for each in RELEASES if each.name in models and bits in ("", str(each.bits))]


def nearest_names(text: str, count: int = 3) -> list[str]:
    """Returns up to `count` known short names that resemble a mistyped one."""
    return difflib.get_close_matches(_split(text)[0], _MODELS_NAMED, n=count)


def _split(text: str) -> tuple[str, str]:
    """Returns a short name without its bits, and the bits as text; either can be empty."""
    name, _, ending = re.sub("[:_-]+", "-", text.lower()).rpartition("-")
    if match := re.fullmatch("([0-9]+)bit", ending):
        return name.removesuffix("-mlx"), match[1]
    return f"{name}-{ending}" if name else ending, ""
