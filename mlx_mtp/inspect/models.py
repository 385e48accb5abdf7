"""The command `mlx-mtp models`: published models that fit a machine, and how to serve them."""

import textwrap
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.config import MAX_HOST_DRAFTS, EngineConfig
from mlx_mtp.console import size_text
from mlx_mtp.engine.memory import MemoryPlan, footprint
from mlx_mtp.errors import UsageError
from mlx_mtp.inspect.memory import Demand, default_plan
from mlx_mtp.machine import MemoryLimit, mac_memory, machine_memory
from mlx_mtp.models.loader import family_of
from mlx_mtp.models.model import LoadedModel, module_nbytes
from mlx_mtp.models.published import GROUP_SIZE, RELEASES, SHAPES, PublishedQuant

SHORT_ROW = 8192
_ROW = "{:<27} {:>4} {:>8} {:>8} {:>9} {:>9}"
_HEADINGS = ("model", "bits", "context", "at once", "download", "head")
_NOTES = f"""
context   most tokens of one request; at once: how many of {SHORT_ROW:,} tokens
download  the language model's weights; a repository with a vision tower is
          about 1 GB larger, and that part is not loaded
head      in BF16; whole files of the original are downloaded for it, of up to
          5 GB each (add-mtp-weights --dry-run says how much)
Computed from published shapes, in bfloat16, as serve plans its memory; not
measured. The names were not looked up on the hub: `mlx-mtp inspect NAME` does
that."""


class Published(NamedTuple):
    """A release and its sizes."""

    release: PublishedQuant
    demand: Demand
    head_download: int  # bytes

    def memory_plan(self, limit: MemoryLimit) -> MemoryPlan | None:
        """The memory plan of `serve` on a machine; None if the model doesn't fit."""
        try:
            return default_plan(self.demand, limit)
        except UsageError:
            return None


def published() -> list[Published]:
    """All releases, the smallest first."""
    models = [Published(each, *_published_sizes(each.name, each.bits)) for each in RELEASES]
    return sorted(models, key=lambda each: each.demand.footprint.weights)


@cache
def _published_sizes(name: str, bits: int) -> tuple[Demand, int]:
    """The demand of a published shape with quantized weights, and the bytes of its BF16 head."""
    config = SHAPES[name]
    family = family_of(config, name)
    model_class, args_class = family.classes(config)
    model = model_class(args_class.from_dict(config))  # type: ignore[attr-defined]
    args = family.causal_lm(model).args
    head = family.make_head(args, moe=getattr(args, "num_experts", 0) > 0)

    def quantization(path: str, child: nn.Module) -> bool | dict[str, int]:
        if not hasattr(child, "to_quantized"):
            return False
        router = path.endswith(("mlp.gate", "shared_expert_gate"))  # as mlx-lm converts them
        return {"group_size": GROUP_SIZE, "bits": 8 if router else bits}

    # mlx allocates arrays when they are evaluated, and these never are.
    head.set_dtype(mx.bfloat16)
    in_bf16 = module_nbytes(head)
    model.set_dtype(mx.bfloat16)
    for module in (model, head):
        nn.quantize(module, class_predicate=quantization)
    model.mtp = head
    loaded = LoadedModel(Path(), config, {}, model, family, "computed")
    shape = footprint(loaded, MAX_HOST_DRAFTS)
    return Demand(shape, loaded.dtype, "as stored", loaded.max_model_len), in_bf16


def models_text(gigabytes: int | None) -> str:
    """The models that fit this machine, or a Mac of so many GB, with the commands for each."""
    limit = machine_memory() if gigabytes is None else mac_memory(gigabytes)
    lines = [f"Published models that fit {size_text(limit.nbytes)} ({limit.source})\n"]
    lines.append(_ROW.format(*_HEADINGS))
    too_large = dict[str, list[str]]()
    for each in published():
        release, weights = each.release, each.demand.footprint.weights
        planned = each.memory_plan(limit)
        if planned is None:
            what = f"{release.bits} bits, {size_text(weights)}"
            too_large.setdefault(what, []).append(release.name)
            continue
        length = min(SHORT_ROW, planned.max_model_len)
        at_once = planned.num_rows(length, EngineConfig().max_num_seqs)
        cells: list[Any] = [release.name, release.bits, f"{planned.max_model_len:,}", at_once]
        lines += [
            _ROW.format(*cells, size_text(weights), size_text(each.head_download)),
            f"  mlx-mtp add-mtp-weights {release.repo_id}",
            f"  mlx-mtp serve {release.repo_id}",
        ]
    lines.append(_NOTES)
    if too_large:
        models = "; ".join(f"{', '.join(names)} ({what})" for what, names in too_large.items())
        lines.append("\n" + textwrap.fill(f"Too large: {models}.", 79, break_on_hyphens=False))
    return "\n".join(lines)
