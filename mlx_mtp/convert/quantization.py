"""Which of a head's matrices are quantized, and how: as the target's own are, or as asked."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from mlx_mtp.convert.rows import Setting
from mlx_mtp.errors import ConvertError, UsageError
from mlx_mtp.models.head_weights import head_name

# What each mode takes when nothing is said; all but affine have no other choice.
MODES = {
    "affine": Setting(4, 64, "affine"),
    "mxfp4": Setting(4, 32, "mxfp4"),
    "nvfp4": Setting(4, 16, "nvfp4"),
    "mxfp8": Setting(8, 32, "mxfp8"),
}
AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
AFFINE_GROUP_SIZES = (32, 64, 128)
UNQUANTIZED = 16

Predicate = Callable[[str, nn.Module], "bool | dict[str, Any]"]


@dataclass(frozen=True)
class Flags:
    """What the command line says about the head's quantization; None leaves it to the target.

    Args:
        bits: per weight; 16 leaves the head unquantized.
        group_size: weights that share a scale.
        mode: one of `MODES`.
    """

    bits: int | None = None
    group_size: int | None = None
    mode: str | None = None

    def __bool__(self) -> bool:
        return not (self.bits is None and self.group_size is None and self.mode is None)


@dataclass(frozen=True)
class Quantization:
    """The choice for one head.

    Args:
        default: for most matrices; None for an unquantized head.
        settings: by path of the module; those not named stay unquantized.
    """

    default: Setting | None
    settings: dict[str, Setting]


def choose_quantization(
    head: nn.Module,
    config: dict[str, Any],
    twin_layer: int,
    predicate: Predicate | None,
    flags: Flags,
) -> Quantization:
    """Decide for every matrix of a head.

    A flag counts before the target's config. Without one, a matrix is quantized as its twin in the
    trunk's last attention layer where config.json names that. Routers follow mlx-lm's predicate.

    Args:
        head: unquantized.
        config: the target's config.json.
        twin_layer: index of the trunk's last attention layer.
        predicate: mlx-lm's, of the target's model class.
        flags: from the command line.

    Raises:
        UsageError: the flags contradict each other.
        ConvertError: config.json says something that MLX can't do.
    """
    table = config.get("quantization")
    table = table if isinstance(table, dict) else {}
    default = _default(table, flags)
    if default is None:
        return Quantization(None, {})
    overrides = {} if flags else _of_twins(table, twin_layer)
    settings = {}
    for path, module in head.named_modules():
        if not hasattr(module, "to_quantized"):
            continue
        choice = overrides.get(path)
        if choice is None:
            choice = predicate(f"mtp.{path}", module) if predicate else True
        setting = _from_table(choice) if isinstance(choice, dict) else default
        # As mlx-lm does: a matrix that the groups don't divide stays as it is.
        if choice and module.weight.shape[-1] % setting.group_size == 0:
            settings[path] = setting
    return Quantization(default, settings)


def _default(table: dict[str, Any], flags: Flags) -> Setting | None:
    """For the whole head, or None to leave it unquantized."""
    of_target = _from_table(table) if table else None
    if flags.bits == UNQUANTIZED:
        if flags != Flags(bits=UNQUANTIZED):
            raise UsageError(f"--bits {UNQUANTIZED} leaves the head unquantized: give no other.")
        return None
    if not flags:
        return of_target
    base = of_target or MODES["affine"]
    if flags.mode is not None and flags.mode != base.mode:
        base = MODES[flags.mode]
    chosen = Setting(
        base.bits if flags.bits is None else flags.bits,
        base.group_size if flags.group_size is None else flags.group_size,
        base.mode,
    )
    problem = _problem(chosen)
    if problem:
        raise UsageError(f"{chosen} can't be: {problem}. Give --bits, --group-size and --mode.")
    return chosen


def _from_table(table: dict[str, Any]) -> Setting:
    """A setting of config.json."""
    mode = table.get("mode", "affine")
    if mode not in MODES:
        raise ConvertError(
            f"config.json has a quantization of mode {mode!r}; known are {', '.join(MODES)}."
        )
    base = MODES[mode]
    setting = Setting(
        int(table.get("bits", base.bits)), int(table.get("group_size", base.group_size)), mode
    )
    problem = _problem(setting)
    if problem:
        raise ConvertError(f"config.json has a quantization of {setting}: {problem}.")
    return setting


def _problem(setting: Setting) -> str | None:
    if setting.mode != "affine":
        fixed = MODES[setting.mode]
        return None if setting == fixed else f"{setting.mode} has {fixed}"
    if setting.bits not in AFFINE_BITS:
        return f"affine has {', '.join(map(str, AFFINE_BITS))} bits"
    if setting.group_size not in AFFINE_GROUP_SIZES:
        return f"affine has groups of {', '.join(map(str, AFFINE_GROUP_SIZES))}"
    return None


def _of_twins(table: dict[str, Any], twin_layer: int) -> dict[str, dict[str, Any] | bool]:
    """Entries that config.json has for the head itself, or for the layer most like it."""
    found: dict[str, dict[str, Any] | bool] = {}
    of_layer = re.compile(rf"^(?:model\.|language_model\.)*layers\.{twin_layer}\.(.+)$")
    for key, value in table.items():
        if not isinstance(value, (dict, bool)):
            continue
        name, twin = head_name(key), of_layer.match(key)
        if name is not None:
            found[name] = value
        elif twin is not None:
            found.setdefault(f"layers.0.{twin[1]}", value)
    return found
