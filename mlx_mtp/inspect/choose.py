"""Chooses the model that a short name such as qwen3.6-35b stands for on this machine."""

import os
import sys

from mlx_mtp.console import say_wrapped, size_text
from mlx_mtp.errors import UsageError
from mlx_mtp.inspect.models import published
from mlx_mtp.machine import MemoryLimit, memory_limit
from mlx_mtp.models.hub import cached_model, repository_size, weights_size
from mlx_mtp.models.published import SHAPES, PublishedQuant, nearest_names, releases_named
from mlx_mtp.options import is_short_name

_ROOM = 32_768  # tokens of context that must fit, if they fit with any release of the name


def choose_model(name: str | None, memory: int | None = None) -> str | None:
    """Returns the directory or hub id that MODEL stands for; for a short name, a release that fits.

    Of a model's releases, those in the cache are tried first, then those with more bits. `memory`
    is the value of --memory-limit, in bytes. The choice of a release and its reason are printed on
    standard error. Raises UsageError if the name is unknown or no release fits.
    """
    if name is None or not is_short_name(name):
        return name
    if "MLX_RANK" in os.environ:
        raise UsageError(
            f"{name!r} would be chosen by each rank for its own memory: give a directory or a hub "
            "id (organisation/name)."
        )
    releases, limit = known_releases(name), memory_limit(memory)
    cached = {each: weights_size(path) for each in releases if (path := cached_model(each.repo_id))}
    order = sorted(releases, key=lambda each: (list(SHAPES).index(each.name), each not in cached))
    absent = list[str]()
    for room in (_ROOM, 1):
        for each in order:
            # Don't ask the hub about a release that is too large by the table of sizes.
            if _context(each, None, limit) < room or each.repo_id in absent:
                continue
            size = cached[each] if each in cached else repository_size(each.repo_id)
            if size == 0:
                absent.append(each.repo_id)
            elif (context := _context(each, size, limit)) >= room:
                why = f"the best of {name!r} that fits"
                if each in cached:
                    why = "it is in the cache and fits"
                say_wrapped(
                    f"Model: {each.repo_id}, {size_text(size or _weights(each))}: {why} "
                    f"{size_text(limit.nbytes)} ({limit.source}), with a context of {context:,} "
                    "tokens.",
                    file=sys.stderr,
                )
                return each.repo_id
    if absent:
        raise UsageError(f"The hub has none of these that would fit: {', '.join(absent)}.")
    smallest = sorted(releases, key=_weights)[:3]
    sizes = ", ".join(f"{each} takes {size_text(_weights(each))}" for each in smallest)
    raise UsageError(
        f"Nothing of {name!r} fits {size_text(limit.nbytes)} ({limit.source}): {sizes}, "
        "without room for answers. `mlx-mtp models` lists what fits."
    )


def known_releases(name: str) -> list[PublishedQuant]:
    """Returns the releases of a short name; UsageError, with similar names, if it is unknown."""
    if releases := releases_named(name):
        return releases
    near = ", ".join(nearest_names(name))
    told = f" Names like it: {near}, each also with -4bit or -8bit at its end." if near else ""
    raise UsageError(
        f"{name!r} is no directory, no hub id (organisation/name) and no known name.{told} "
        "`mlx-mtp models` lists what fits this machine."
    )


def _weights(release: PublishedQuant) -> int:
    return published(release).footprint.weights


def _context(release: PublishedQuant, weights: int | None, limit: MemoryLimit) -> int:
    """Returns the longest context, in tokens, that fits the limit; 0 if the release doesn't fit."""
    planned = published(release, weights).memory_plan(limit)
    return 0 if planned is None else planned.max_model_len
