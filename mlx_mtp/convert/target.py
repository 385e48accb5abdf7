"""The model that gets a head: what its config.json says, and the head that would fit it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_mtp.cache.specs import AttentionSpec
from mlx_mtp.convert.quantization import Flags, Predicate, Quantization, choose_quantization
from mlx_mtp.errors import ConvertError
from mlx_mtp.models.family import Family, text_config
from mlx_mtp.models.head import MTPHead
from mlx_mtp.models.loader import read_json
from mlx_mtp.models.registry import family_of

# Fields of config.json that shape a head. A source that differs in one belongs to another model.
_SHAPING = (
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "moe_intermediate_size",
)


@dataclass(frozen=True)
class Target:
    """A model directory, of which config.json alone is read.

    Args:
        path: the directory.
        config: config.json.
        family: how mlx-lm's model is reached.
        args: mlx-lm's arguments of the language model.
        predicate: mlx-lm's choice of what to quantize, if the model has one.
    """

    path: Path
    config: dict[str, Any]
    family: Family
    args: Any
    predicate: Predicate | None

    @classmethod
    def open(cls, path: Path) -> Target:
        """Read a directory's config.json.

        Raises:
            ModelError: there is none, or no family serves it.
            ConvertError: it lacks what mlx-lm needs.
        """
        config = read_json(path / "config.json")
        family = family_of(config, str(path))
        model_class, args_class = family.classes(config)
        try:
            # Nothing is allocated: mlx makes the random weights only when they are looked at.
            model = model_class(args_class.from_dict(config))  # type: ignore[attr-defined]
            args = family.causal_lm(model).args
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ConvertError(f"{path / 'config.json'} is not complete: {error}") from error
        return cls(path, config, family, args, getattr(model, "quant_predicate", None))

    def head(self, *, moe: bool) -> MTPHead:
        """The head that fits, unquantized and with nothing in it.

        Args:
            moe: whether the source's head has a router.

        Raises:
            ConvertError: it has one and the trunk has no experts.
        """
        if moe and not getattr(self.args, "num_experts", 0):
            raise ConvertError(
                f"The source's head is a mixture of experts, {self.path} has num_experts 0: "
                "they belong to different models."
            )
        layer = self.family.head_layer(self.args, moe=moe)
        return MTPHead(layer, self.args.hidden_size, self.args.rms_norm_eps)

    def quantization(self, head: MTPHead, flags: Flags) -> Quantization:
        """How the head is to be quantized; see `choose_quantization`."""
        layers = enumerate(self.family.layer_specs(self.args))
        last_attention = max(i for i, layer in layers if isinstance(layer, AttentionSpec))
        return choose_quantization(head, self.config, last_attention, self.predicate, flags)

    def trunk_metadata(self) -> dict[str, str]:
        """What a sidecar's header says of the trunk it was made for."""
        fields = ("hidden_size", "vocab_size", "num_hidden_layers")
        return {name: str(getattr(self.args, name)) for name in fields}

    def check_source(
        self, config: Mapping[str, Any], name: str, warn: Callable[[str], None]
    ) -> None:
        """Compare with the config.json of the source, where it has one.

        Args:
            config: of the source; may be empty.
            name: of the source, for messages.
            warn: told of differences that need not matter.

        Raises:
            ConvertError: names the first field that differs, with both values.
        """
        theirs, ours = text_config(config), text_config(self.config)
        dense = not theirs.get("num_experts") and not ours.get("num_experts")
        for field in (*_SHAPING, *(["intermediate_size"] if dense else [])):
            if field in theirs and field in ours and theirs[field] != ours[field]:
                raise ConvertError(
                    f"The head in {name} does not fit {self.path}: {field} is {theirs[field]} in "
                    f"the source's config.json and {ours[field]} in the model's."
                )
        layers = "num_hidden_layers"
        if theirs.get(layers, ours.get(layers)) != ours.get(layers):
            warn(
                f"{name} has {theirs[layers]} layers and {self.path} has {ours[layers]}: if they "
                "are not versions of one model, the head will draft badly (--verify shows it)."
            )


def shapes(head: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of each of a head's parameters."""
    return {name: tuple(value.shape) for name, value in tree_flatten(head.parameters())}
