"""The model that gets a head: which head fits it, and how the head's matrices are quantized."""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.cache.specs import AttentionSpec
from mlx_mtp.console import say_wrapped
from mlx_mtp.errors import ConvertError, ModelError, UsageError
from mlx_mtp.models.family import text_config
from mlx_mtp.models.files import read_json
from mlx_mtp.models.head import MTPHead
from mlx_mtp.models.head_weights import head_name
from mlx_mtp.models.loader import family_of, refuse_fp8
from mlx_mtp.models.sizes import check_sizes

UNQUANTIZED = 16
# Fields of config.json that determine a head's shapes; a source's values must be the same.
_SHAPING = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_SHAPING_EXPERTS = ("num_experts", "moe_intermediate_size")


class Setting(NamedTuple):
    """The quantization of a matrix."""

    bits: int
    group_size: int
    mode: str = "affine"

    def __str__(self) -> str:
        return f"{self.bits} bits, groups of {self.group_size}, {self.mode}"

    def quantize(self, matrix: mx.array) -> list[mx.array]:
        return list(mx.quantize(matrix, **self._asdict()))

    def dequantize(self, parts: Sequence[mx.array]) -> mx.array:
        scales: dict[str, Any] = dict(zip(("scales", "biases"), parts[1:]))
        return mx.dequantize(parts[0], **scales, **self._asdict())


# Each mode's bits and group sizes, the default first.
_AFFINE = ((4, 1, 2, 3, 5, 6, 8), (64, 32, 128))
MODES = {"affine": _AFFINE, "mxfp4": ((4,), (32,)), "nvfp4": ((4,), (16,)), "mxfp8": ((8,), (32,))}


class Target:
    """A model's directory; only its config.json is read. ModelError if it can't be served."""

    def __init__(self, path: Path) -> None:
        self.path, self.config = path, read_json(path / "config.json")
        self.family = family_of(self.config, str(path))
        refuse_fp8(self.config, str(path))
        check_sizes(self.config, path)
        model_class, args_class = self.family.classes(self.config)
        try:
            # Nothing is allocated: mlx computes random weights only when they are evaluated.
            model = model_class(args_class.from_dict(self.config))  # type: ignore[attr-defined]
            self.args: Any = self.family.causal_lm(model).args  # mlx-lm's arguments
        except Exception as error:  # mlx-lm raises errors of any type.
            raise ConvertError(f"{path / 'config.json'} can't be used: {error!r:.300}") from error
        self._predicate = getattr(model, "quant_predicate", None) or (lambda *_: True)

    def new_head(self, *, moe: bool) -> MTPHead:
        """Returns an unquantized head without weights for the model; ConvertError if none fits."""
        if moe and not getattr(self.args, "num_experts", 0):
            raise ConvertError(
                f"The source's head is a mixture of experts, {self.path} has num_experts 0: "
                "they belong to different models."
            )
        return self.family.make_head(self.args, moe=moe)

    def quantization_settings(
        self, head: nn.Module, flags: Mapping[str, Any]
    ) -> tuple[Setting | None, dict[str, Setting]]:
        """Returns the default setting (None: unquantized), and each matrix's by module path."""
        table = self.family.head_quantization or self.config.get("quantization")
        table = table if isinstance(table, Mapping) else {}
        default = _default(table, flags)
        if default is None:
            return None, {}
        twins = {} if flags else self._twins(table)
        settings = {}
        for path, module in head.named_modules():
            if not hasattr(module, "to_quantized"):
                continue
            choice = twins[path] if path in twins else self._predicate(f"mtp.{path}", module)
            setting = setting_of(choice) if isinstance(choice, dict) else default
            # As in mlx-lm, a matrix stays unquantized if the group size doesn't divide its rows.
            if choice and module.weight.shape[-1] % setting.group_size == 0:
                settings[path] = setting
        return default, settings

    def check_source(self, config: Mapping[str, Any], name: str) -> None:
        """Raise ConvertError if a source's head can't fit; warn if its number of layers differs."""
        theirs, ours = text_config(config), text_config(self.config)
        dense = not theirs.get("num_experts") and not ours.get("num_experts")
        for field in (*_SHAPING, *(["intermediate_size"] if dense else _SHAPING_EXPERTS)):
            if field in theirs and field in ours and theirs[field] != ours[field]:
                raise ConvertError(
                    f"The head in {name} does not fit {self.path}: {field} is {theirs[field]} in "
                    f"the source's config.json and {ours[field]} in the model's."
                )
        layers = theirs.get("num_hidden_layers", self.args.num_hidden_layers)
        if layers != self.args.num_hidden_layers:
            say_wrapped(
                f"warning: {name} has {layers} layers and {self.path} has "
                f"{self.args.num_hidden_layers}: if they are not versions of one model, the head "
                "will draft badly (--verify shows it).",
                file=sys.stderr,
            )

    def _twins(self, table: Mapping[str, Any]) -> dict[str, dict[str, Any] | bool]:
        """Returns config.json's entries for the head, or else for the last attention layer."""
        layers = enumerate(self.family.layer_specs(self.args))
        last_attention = max(i for i, layer in layers if isinstance(layer, AttentionSpec))
        of_layer = re.compile(rf"^(?:model\.|language_model\.)*layers\.{last_attention}\.(.+)$")
        twins = {f"layers.0.{m[1]}": table[key] for key in table if (m := of_layer.match(key))}
        return twins | {name: table[key] for key in table if (name := head_name(key))}


def _default(table: Mapping[str, Any], flags: Mapping[str, Any]) -> Setting | None:
    if flags.get("bits") == UNQUANTIZED:
        if len(flags) > 1:
            raise UsageError(f"--bits {UNQUANTIZED} leaves the head unquantized: give no other.")
        return None
    of_target = setting_of(table) if table else None
    if not flags:
        return of_target
    base = of_target or _of_mode("affine")
    if flags.get("mode", base.mode) != base.mode:
        base = _of_mode(flags["mode"])
    return _checked_setting(base._replace(**flags), "--bits, --group-size and --mode", UsageError)


def setting_of(table: Mapping[str, Any]) -> Setting:
    """Returns the setting in an entry of config.json; ConvertError if MLX doesn't support it."""
    mode = table.get("mode", "affine")
    if mode not in MODES:
        raise ConvertError(
            f"config.json has a quantization of mode {mode!r}; known are {', '.join(MODES)}."
        )
    values: dict[str, Any] = {k: int(table[k]) for k in ("bits", "group_size") if k in table}
    return _checked_setting(_of_mode(mode)._replace(**values), "config.json", ConvertError)


def _of_mode(mode: str) -> Setting:
    bits, sizes = MODES[mode]
    return Setting(bits[0], sizes[0], mode)


def _checked_setting(setting: Setting, where: str, error: type[UsageError | ModelError]) -> Setting:
    # mlx ends the process if the group size is 0.
    bits, sizes = MODES[setting.mode]
    if setting.bits not in bits or setting.group_size not in sizes:
        can = " bits and groups of ".join(", ".join(map(str, sorted(n))) for n in (bits, sizes))
        raise error(f"{where} ask for {setting}, which can't be: {setting.mode} has {can}.")
    return setting
