"""Which matrix gets how many bits: the target's own choice, mlx-lm's for routers, or the flags'."""

import pytest

from mlx_mtp.convert.target import Setting, Target
from mlx_mtp.errors import ConvertError, UsageError
from tests.convert.conftest import FOUR
from tests.support.checkpoints import write_target
from tests.support.tiny_models import Layout

SIX = {**FOUR, "bits": 6}
EIGHT = Setting(8, 64)
V, K, Q, OUT = (f"layers.0.self_attn.{name}_proj" for name in "vkqo")
GATE, SHARED_GATE = "layers.0.mlp.gate", "layers.0.mlp.shared_expert_gate"
UP, DOWN = (f"layers.0.mlp.switch_mlp.{name}_proj" for name in ("up", "down"))
# In the tiny model every second of four layers has attention; the last one is layer 3.
OWN = {
    **FOUR,
    "model.layers.3.self_attn.v_proj": {"group_size": 32, "bits": 6},
    "model.layers.3.mlp.gate": False,
    "model.layers.1.self_attn.k_proj": {"group_size": 32, "bits": 8},
    "model.layers.3.mlp.switch_mlp.down_proj": {"group_size": 32, "bits": 3},
    "model.layers.3.self_attn.q_proj": True,
    "mtp.layers.0.self_attn.o_proj": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}
TWINS = {V: Setting(6, 32), DOWN: Setting(3, 32), K: Setting(4, 64), Q: Setting(4, 64)}
TWINS |= {OUT: Setting(4, 32, "mxfp4"), GATE: None}
MULTIMODAL = {
    **FOUR,
    "language_model.model.layers.3.self_attn.v_proj": {"group_size": 32, "bits": 8},
    "vision_tower.layers.3.self_attn.k_proj": {"group_size": 32, "bits": 8},
}


def choose(tmp_path, table, flags, family="qwen3_next"):
    """Returns the setting of most matrices, and the setting of each matrix by path."""
    target = Target(write_target(tmp_path, Layout(family), table))
    return target.quantization_settings(target.new_head(moe=family != "qwen3_5"), flags)


@pytest.mark.parametrize(
    ("family", "table", "flags", "default", "others"),
    [
        ("qwen3_next", None, {}, None, {V: None, GATE: None}),
        ("qwen3_next", FOUR, {"bits": 16}, None, {V: None, GATE: None}),
        # The tiny experts have an inner width of 32, which is no multiple of the group size.
        ("qwen3_next", SIX, {}, Setting(6, 64), {DOWN: None, GATE: EIGHT, SHARED_GATE: EIGHT}),
        ("qwen3_5_moe", SIX, {}, Setting(6, 64), {GATE: EIGHT, V: Setting(6, 64)}),
        ("qwen3_5", SIX, {}, Setting(6, 64), {V: Setting(6, 64), GATE: None}),
        ("qwen3_next", OWN, {}, Setting(4, 64), TWINS),
        ("qwen3_5_moe", MULTIMODAL, {}, Setting(4, 64), {V: Setting(8, 32), K: Setting(4, 64)}),
        # Flags override the table except for routers; V's width is no multiple of 128.
        *[
            ("qwen3_next", table, flags, expected, {V: expected, GATE: EIGHT})
            for table in (OWN, None)
            for flags, expected in (
                ({"bits": 8}, Setting(8, 64)),
                ({"mode": "nvfp4", "group_size": 16}, Setting(4, 16, "nvfp4")),
            )
        ],
        ("qwen3_next", FOUR, {"bits": 3, "group_size": 128}, Setting(3, 128), {V: None}),
        # A mode given by a flag does not take the target's bits.
        ("qwen3_5", {"mode": "mxfp8"}, {"mode": "affine"}, Setting(4, 64), {V: Setting(4, 64)}),
    ],
)
def test_choices(tmp_path, family, table, flags, default, others):
    found, settings = choose(tmp_path, table, flags, family)
    assert found == default
    assert {path: settings.get(path) for path in others} == others
    assert not [path for path in settings if "norm" in path]


@pytest.mark.parametrize(
    ("table", "flags", "error", "match"),
    [
        (FOUR, {"bits": 16, "group_size": 64}, UsageError, "16 leaves"),
        (FOUR, {"group_size": 48}, UsageError, "can't be"),
        (FOUR, {"bits": 8, "mode": "mxfp4"}, UsageError, "can't be"),
        ({"mode": "ternary"}, {}, ConvertError, r"config\.json"),
    ],
)
def test_what_mlx_can_not_do(tmp_path, table, flags, error, match):
    with pytest.raises(error, match=match):
        choose(tmp_path, table, flags)
