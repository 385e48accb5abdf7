#!/usr/bin/env python
"""Print the tables of which model and context fit which Mac: python scripts/memory_guide.py

The tables are computed, not measured: from published shapes with their heads, by the memory plan of
`serve`; see `mlx-mtp models`. The first table is for README.md, the others for docs/memory.md.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_mtp.config import EngineConfig
from mlx_mtp.console import size_text
from mlx_mtp.inspect.models import SHORT_ROW, Published, all_published
from mlx_mtp.machine import mac_memory

_MACHINES = (16, 24, 36, 64, 128, 512)
"""Memory of Macs, in GB."""
_BEGINNERS = {
    "16 GB": ("Qwen3.5-9B", 16, 16),
    "36 to 64 GB": ("Qwen3.6-35B-A3B", 36, 64),
    "128 GB": ("Qwen3-Next-80B-A3B-Instruct", 128, 128),
}


_AGENTS = ("Qwen3-Next-80B-A3B-Instruct", "Qwen3.6-35B-A3B", "Qwen3.6-27B")
_LARGE = (64, 128)


def cell(model: Published, gigabytes: int) -> str:
    """Returns what fits a Mac: the longest context; the number of requests of 8,192 tokens."""
    plan = model.memory_plan(mac_memory(gigabytes))
    if plan is None:
        return "-"
    rows = plan.num_rows(min(SHORT_ROW, plan.max_model_len), EngineConfig().max_num_seqs)
    return f"{plan.max_model_len:,}; {rows}"


def tables() -> list[str]:
    """Returns all tables, in Markdown."""
    models = all_published()
    of_name = {(each.release.name, each.release.bits): each for each in models}
    rows = list[Sequence[str]]()
    for mac, (name, *ends) in _BEGINNERS.items():
        model = of_name[name, 4]
        contexts = dict.fromkeys(cell(model, n).partition(";")[0] for n in ends)
        size = size_text(model.footprint.weights + model.head_download)
        rows.append((mac, f"`{model.release}`", size, " to ".join(contexts)))
    parts = [_table(("your Mac", "model", "download", "context, tokens"), rows)]
    shapes = dict[tuple[object, ...], list[Published]]()  # models of the same shape and size
    for each in models:
        shapes.setdefault((each.footprint, each.allowed, each.head_download), []).append(each)
    unique = [(_names(same), same[0]) for same in shapes.values()]
    rows = []
    for names, model in unique:
        shape = model.footprint
        kv = 1000 * (shape.caches.kv_per_token + shape.caches.head_kv_per_token)
        sizes = (
            shape.weights,
            shape.head,
            model.head_download,
            shape.caches.states_and_window(None),
            kv,
        )
        rows.append((names, *map(size_text, sizes)))
    headings = ("weights", "head", "head in BF16", "states of a row", "KV of 1,000 tokens")
    fits = [(names, *(cell(model, n) for n in _MACHINES)) for names, model in unique]
    parts.append(_table(("model", *(f"{n} GB" for n in _MACHINES)), fits))
    parts.append(_table(("model", *headings), rows))
    most = EngineConfig().max_num_seqs
    plans = [(n, [of_name[name, 4].memory_plan(mac_memory(n)) for name in _AGENTS]) for n in _LARGE]
    beside = [
        (f"{n} GB", *(plan.rows_at_once(most) if plan else "-" for plan in each))
        for n, each in plans
    ]
    agents = (f"{name}, 4 bits" for name in _AGENTS)
    parts.append(_table(("your Mac", *agents), beside))
    return parts


def _names(same: Sequence[Published]) -> str:
    versions = sorted(each.release.name for each in same)
    return f"{', '.join(versions)}, {same[0].release.bits} bits"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    print("\n\n".join(tables()))
