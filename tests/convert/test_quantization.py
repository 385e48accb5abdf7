"""Which matrix gets how many bits: the target's own choice, mlx-lm's for routers, or the flags'."""

from __future__ import annotations

import pytest

from mlx_mtp.convert.commands import MODE_NAMES
from mlx_mtp.convert.quantization import MODES, Flags
from mlx_mtp.convert.rows import Setting
from mlx_mtp.convert.target import Target
from mlx_mtp.errors import ConvertError, UsageError
from tests.convert.checkpoints import write_target
from tests.tiny_models import FAMILIES, Layout

FOUR = {"group_size": 64, "bits": 4, "mode": "affine"}
ROUTERS = ("layers.0.mlp.gate", "layers.0.mlp.shared_expert_gate")


def choose(tmp_path, table, flags=Flags(), family="qwen3_next", **change):  # noqa: B008
    target = Target.open(write_target(tmp_path, Layout(family), table, **change))
    return target.quantization(target.head(moe=family != "qwen3_5"), flags)


def test_modes_of_the_command_line_are_those_known():
    assert tuple(MODES) == MODE_NAMES


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_the_targets_with_routers_as_mlx_lm_has_them(tmp_path, family):
    chosen = choose(tmp_path, {**FOUR, "bits": 6}, family=family)
    assert chosen.default == Setting(6, 64)
    assert chosen.settings["fc"] == Setting(6, 64)
    if family == "qwen3_5":
        assert set(chosen.settings.values()) == {Setting(6, 64)}
    else:
        assert {chosen.settings[name] for name in ROUTERS} == {Setting(8, 64)}
    norms = [name for name in chosen.settings if "norm" in name]
    assert not norms


def test_an_unquantized_target_gets_an_unquantized_head(tmp_path):
    chosen = choose(tmp_path, None)
    assert (chosen.default, chosen.settings) == (None, {})


def test_a_matrix_that_groups_do_not_divide_stays_as_it_is(tmp_path):
    """The tiny experts are 32 wide on the inside."""
    settings = choose(tmp_path, FOUR).settings
    assert "layers.0.mlp.switch_mlp.up_proj" in settings
    assert "layers.0.mlp.switch_mlp.down_proj" not in settings


def test_overrides_of_the_last_attention_layer_count_for_the_head(tmp_path):
    """Four layers, every second one with attention: the last is number 3."""
    table = {
        **FOUR,
        "model.layers.3.self_attn.v_proj": {"group_size": 32, "bits": 6},
        "model.layers.3.mlp.gate": False,
        "model.layers.1.self_attn.k_proj": {"group_size": 32, "bits": 8},
        "model.layers.3.mlp.switch_mlp.down_proj": {"group_size": 32, "bits": 3},
        "model.layers.3.self_attn.q_proj": True,
        "mtp.layers.0.self_attn.o_proj": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    }
    settings = choose(tmp_path, table).settings
    assert settings["layers.0.self_attn.v_proj"] == Setting(6, 32)
    assert settings["layers.0.mlp.switch_mlp.down_proj"] == Setting(3, 32)
    assert settings["layers.0.self_attn.k_proj"] == Setting(4, 64)
    assert settings["layers.0.self_attn.q_proj"] == Setting(4, 64)
    assert settings["layers.0.self_attn.o_proj"] == Setting(4, 32, "mxfp4")
    assert "layers.0.mlp.gate" not in settings


def test_overrides_under_the_multimodal_prefix_but_not_of_the_vision_tower(tmp_path):
    table = {
        **FOUR,
        "language_model.model.layers.3.self_attn.v_proj": {"group_size": 32, "bits": 8},
        "vision_tower.layers.3.self_attn.k_proj": {"group_size": 32, "bits": 8},
    }
    settings = choose(tmp_path, table, family="qwen3_5_moe").settings
    assert settings["layers.0.self_attn.v_proj"] == Setting(8, 32)
    assert settings["layers.0.self_attn.k_proj"] == Setting(4, 64)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (Flags(bits=8), Setting(8, 64)),
        (Flags(group_size=32), Setting(4, 32)),
        (Flags(mode="mxfp4"), Setting(4, 32, "mxfp4")),
        (Flags(mode="nvfp4", group_size=16), Setting(4, 16, "nvfp4")),
        (Flags(bits=3, group_size=128, mode="affine"), Setting(3, 128)),
    ],
)
@pytest.mark.parametrize("table", [FOUR, None])
def test_flags_override_but_routers_stay_with_mlx_lm(tmp_path, table, flags, expected):
    if table is not None:
        table = {**table, "model.layers.3.self_attn.v_proj": {"group_size": 32, "bits": 2}}
    chosen = choose(tmp_path, table, flags)
    assert chosen.default == expected
    attention = chosen.settings.get("layers.0.self_attn.v_proj")
    assert attention == (expected if expected.group_size <= 64 else None)
    assert chosen.settings["layers.0.mlp.gate"] == Setting(8, 64)


def test_a_mode_of_its_own_does_not_take_the_targets_bits(tmp_path):
    chosen = choose(tmp_path, {"group_size": 32, "bits": 8, "mode": "mxfp8"}, Flags(mode="affine"))
    assert chosen.default == Setting(4, 64)


def test_sixteen_bits_leave_the_head_unquantized(tmp_path):
    assert choose(tmp_path, FOUR, Flags(bits=16)).settings == {}
    with pytest.raises(UsageError, match="16"):
        choose(tmp_path, FOUR, Flags(bits=16, group_size=64))


@pytest.mark.parametrize(
    "flags",
    [Flags(bits=7), Flags(group_size=48), Flags(bits=8, mode="mxfp4"), Flags(bits=0)],
)
def test_flags_that_mlx_can_not_do(tmp_path, flags):
    with pytest.raises(UsageError, match="can't be"):
        choose(tmp_path, FOUR, flags)


@pytest.mark.parametrize("table", [{"mode": "ternary"}, {"bits": 7, "group_size": 64}])
def test_a_config_that_mlx_can_not_do(tmp_path, table):
    with pytest.raises(ConvertError, match=r"config\.json"):
        choose(tmp_path, table)
