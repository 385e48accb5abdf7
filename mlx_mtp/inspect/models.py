"""The command `mlx-mtp models`: the published models that fit a machine.

A table has the models' sizes: neither mlx-lm nor the hub's library is imported, and no model is
built.
"""

import textwrap
from types import SimpleNamespace
from typing import Any, NamedTuple

from mlx_mtp.cache.specs import CacheMemory, hybrid_layers
from mlx_mtp.config import MAX_HOST_DRAFTS, EngineConfig
from mlx_mtp.console import size_text
from mlx_mtp.engine.memory import Footprint, MemoryPlan, default_plan
from mlx_mtp.errors import UsageError
from mlx_mtp.machine import MemoryLimit, mac_memory, machine_memory
from mlx_mtp.models.published import RELEASES, SHAPES, SIZES, PublishedQuant

SHORT_ROW = 8192
_ROW = "{:<32} {:>8} {:>8} {:>9} {:>9}"
_HEADINGS = ("model", "context", "at once", "download", "head")
_NOTES = f"""
Start one:  mlx-mtp serve NAME, such as qwen3.6-35b; it is downloaded with its
            head. Without -4bit or -8bit the larger that fits is taken.

context   most tokens of one request; at once: how many of {SHORT_ROW:,} tokens
download  the language model's weights; a repository with a vision tower is
          about 1 GB larger, and that part is not loaded
head      in BF16; whole files of the original are downloaded for it, of up to
          5 GB each (add-mtp-weights --dry-run says how much)
Embeddings, which are not in the table: mlx-mtp serve Qwen/Qwen3-Embedding-0.6B
(about 1.2 GB), -4B (8 GB) or -8B (15 GB), alone or beside other models.
Computed from published shapes, in bfloat16, as serve plans its memory; not
measured. The names were not looked up on the hub: `mlx-mtp inspect NAME` does
that."""


class Published(NamedTuple):
    """A release and the memory that it takes."""

    release: PublishedQuant
    footprint: Footprint
    allowed: int  # maximum tokens that the model allows
    head_download: int  # bytes to download for the head

    def memory_plan(self, limit: MemoryLimit) -> MemoryPlan | None:
        """Returns the memory plan of `serve` on a machine; None if the model doesn't fit."""
        try:
            return default_plan(self.footprint, limit, self.allowed)
        except UsageError:
            return None


def published(release: PublishedQuant, weights: int | None = None) -> Published:
    """Returns a release with its sizes; `weights`, in bytes, defaults to the table's size."""
    config, sizes, bits = SHAPES[release.name], SIZES[release.name], release.bits
    args = SimpleNamespace(**config.get("text_config", config))
    caches = CacheMemory(tuple(hybrid_layers(args)), has_head=True, itemsize=2)
    weights = weights or sizes.weights[bits]
    shape = Footprint(weights, sizes.head[bits], caches, MAX_HOST_DRAFTS, args.vocab_size)
    return Published(release, shape, args.max_position_embeddings, sizes.bf16_head)


def all_published() -> list[Published]:
    """Returns all releases, the smallest first."""
    models = map(published, RELEASES)
    return sorted(models, key=lambda each: (each.footprint.weights, each.release.name))


def models_text(gigabytes: int | None) -> str:
    """Returns a text on the models that fit this machine, or a Mac with `gigabytes` of memory."""
    limit = machine_memory() if gigabytes is None else mac_memory(gigabytes)
    lines = [f"Published models that fit {size_text(limit.nbytes)} ({limit.source})\n"]
    lines.append(_ROW.format(*_HEADINGS))
    too_large = dict[str, list[str]]()
    for each in all_published():
        release, weights = each.release, each.footprint.weights
        planned = each.memory_plan(limit)
        if planned is None:
            what = f"{release.bits} bits, {size_text(weights)}"
            too_large.setdefault(what, []).append(release.name)
            continue
        length = min(SHORT_ROW, planned.max_model_len)
        at_once = planned.num_rows(length, EngineConfig().max_num_seqs)
        cells: list[Any] = [str(release), f"{planned.max_model_len:,}", at_once]
        lines.append(_ROW.format(*cells, size_text(weights), size_text(each.head_download)))
    lines.append(_NOTES)
    if too_large:
        models = "; ".join(f"{', '.join(names)} ({what})" for what, names in too_large.items())
        lines.append("\n" + textwrap.fill(f"Too large: {models}.", 79, break_on_hyphens=False))
    return "\n".join(lines)
