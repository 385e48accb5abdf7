"""The models in the hub's cache: `pull`, `ls` and `rm`."""

import contextlib
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HFCacheInfo, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from mlx_mtp.console import columns, say, say_wrapped, size_text, width_of
from mlx_mtp.convert.provide import has_head, provide_head
from mlx_mtp.convert.source import LocalRepo, on_hub, weight_map_of
from mlx_mtp.errors import MissingHeadError, ModelError, UsageError
from mlx_mtp.inspect.choose import choose_model, known_releases
from mlx_mtp.models.files import read_json
from mlx_mtp.models.hub import cached_model, download_model
from mlx_mtp.models.loader import FAMILIES
from mlx_mtp.options import is_short_name
from mlx_mtp.running import running_servers

_WIDTH = 100  # columns of a table without a terminal


class StoredModel(NamedTuple):
    """A model of a supported family in the cache, possibly incomplete."""

    name: str  # a hub id
    nbytes: int  # on disk, with the head, older versions and an interrupted download
    head: str  # "yes" or "no"; "in part" if files are missing
    last_used: float  # seconds since the epoch
    repository: Any  # huggingface_hub's CachedRepoInfo


def pull(name: str) -> None:
    """Download the newest version of a model, with its head if it is published without one.

    Raises MissingHeadError if the head can't be fetched; the model itself is then in the cache.
    """
    chosen = choose_model(name)
    if not on_hub(chosen):
        raise UsageError(f"{name} is no hub id (organisation/name): there is nothing to download.")
    directory = download_model(chosen)
    provide_head(chosen, directory)
    head = "with" if has_head(directory) else "without"
    say_wrapped(f"{chosen} is in {directory}, {head} an MTP head.")
    say(f"Next: mlx-mtp serve {chosen}")


def download_missing(name: str, memory: int | None) -> str:
    """Download MODEL if it is not in the cache; returns the directory or hub id it stands for.

    The head of a published model is downloaded too; if that fails, loading the model reports it.
    `memory` is the value of --memory-limit, in bytes.
    """
    chosen = choose_model(name, memory) or name
    if on_hub(chosen):
        directory = cached_model(chosen) or download_model(chosen)
        with contextlib.suppress(MissingHeadError):
            provide_head(chosen, directory)
    return chosen


def stored_models() -> list[StoredModel]:
    """Returns the models of supported families in the hub's cache, the last used first."""
    return _models_of(_scan())


def listing() -> str:
    """Returns the table of `ls`."""
    place = f"in {constants.HF_HUB_CACHE}"
    if not (models := stored_models()):
        return f"There are no models {place}. `mlx-mtp models` lists what fits this machine."
    rows = [
        [
            each.name,
            size_text(each.nbytes),
            each.head,
            f"{datetime.fromtimestamp(each.last_used):%F}",
        ]
        for each in models
    ]
    headings = ("model", "size", "head", "last used")
    table = columns(headings, rows, 1, width_of() or _WIDTH).strip("\n")
    total = size_text(sum(each.nbytes for each in models))
    return f"{table}\n\n{total} {place}"


def remove(name: str, *, asks: bool) -> None:
    """Remove one model from the cache, if the user agrees; UsageError unless `name` names one."""
    if Path(name).expanduser().exists():
        raise UsageError(
            f"{name} is a directory of yours: `rm` removes from the hub's cache alone."
        )
    named = {name}
    if is_short_name(name):
        named = {each.repo_id for each in known_releases(name)}
    cache = _scan()
    found = [each for each in _models_of(cache) if each.name in named]
    if not found:
        raise UsageError(f"{name} is not in the cache: `mlx-mtp ls` lists what is.")
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise UsageError(f"{name!r} may mean {names}: name one of them.")
    (model,) = found
    path = model.repository.repo_path
    for server in running_servers():
        used = (Path(each).resolve() for each in server.directories)
        if any(each.is_relative_to(path.resolve()) for each in used):
            raise UsageError(
                f"{model.name} is being served at {server.url}: end that server first."
            )
    if asks and not _agrees(f"Remove {model.name}, {size_text(model.nbytes)}, from {path}?"):
        say_wrapped("Nothing was removed.")
        return
    # Only this repository: a copy of it, or one under its earlier name, has the same commits.
    alone = replace(cache, repos=frozenset([model.repository]))
    alone.delete_revisions(*(each.commit_hash for each in model.repository.revisions)).execute()
    if path.exists():
        raise ModelError(f"{path} could not be removed, or not all of it.")
    say_wrapped(f"Removed {model.name}: {size_text(model.nbytes)}.")


def _agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("There is no terminal to ask in: give --yes to remove the model.")
    say(f"{question} [y/N]", end=" ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _scan() -> HFCacheInfo:
    try:
        return scan_cache_dir()
    except CacheNotFound:
        return HFCacheInfo(0, frozenset(), frozenset(), [])


def _models_of(cache: HFCacheInfo) -> list[StoredModel]:
    models = list[StoredModel]()
    for repository in cache.repos:
        versions = sorted(
            repository.revisions, key=lambda each: ("main" in each.refs, each.last_modified)
        )
        if repository.repo_type != "model" or not versions:
            continue
        path, root = versions[-1].snapshot_path, repository.repo_path
        try:
            if read_json(path / "config.json").get("model_type") not in FAMILIES:
                continue
        except ModelError:
            continue
        files = (each for each in root.rglob("*") if each.is_file() and not each.is_symlink())
        size = sum(each.stat().st_size for each in files)
        models.append(
            StoredModel(repository.repo_id, size, _head(path), repository.last_accessed, repository)
        )
    return sorted(models, key=lambda each: -each.last_used)


def _head(path: Path) -> str:
    try:
        files = set(weight_map_of(LocalRepo(path)).values())
        if not files or not all((path / name).is_file() for name in files):
            return "in part"
        return "yes" if has_head(path) else "no"
    except ModelError:
        return "in part"
