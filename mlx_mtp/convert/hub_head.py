"""Whether a repository on the hub has an MTP head, found out before its weights are downloaded."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

from mlx_mtp.convert.hub import HubRepo
from mlx_mtp.convert.source import head_of, weight_map_of
from mlx_mtp.errors import ConvertError
from mlx_mtp.models.head_weights import SIDECAR_PATTERN
from mlx_mtp.models.hub import HUB_ID
from mlx_mtp.models.loader import missing_head

_BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?([\w./-]+)", re.MULTILINE)


def check_head_on_hub(name: str | None) -> None:
    """Refuse a repository without a head. A directory is left to the loader.

    A gated repository, or a hub that can't be reached, is left to the download: either it explains
    the failure, or the model is in the cache.

    Raises:
        MissingHeadError: names the command that adds the head.
    """
    if name is None or Path(name).expanduser().exists() or not HUB_ID.fullmatch(name):
        return
    repo = HubRepo(name, None)
    try:
        # add-mtp-weights puts a head into the cache, beside what the hub has.
        if cached_sidecar(repo) or remote_sidecar(repo) or head_of(weight_map_of(repo)):
            return
        base = base_model(repo.small("README.md"))
    except ConvertError:
        return
    raise missing_head(name, base, "Its weights were not downloaded.")


def cached_sidecar(repo: HubRepo) -> list[Path]:
    """The files of a head that was added to the cached copy."""
    config = repo.small("config.json")
    return [] if config is None else sorted(config.parent.glob(SIDECAR_PATTERN))


def remote_sidecar(repo: HubRepo) -> list[str]:
    """The files of a head beside the model."""
    return sorted(fnmatch.filter(repo.names(), SIDECAR_PATTERN))


def base_model(readme: Path | None) -> str | None:
    """The model that a model card says it was converted from."""
    if readme is None or not readme.is_file():
        return None
    found = _BASE_MODEL.search(readme.read_text(encoding="utf-8", errors="replace"))
    return found[1] if found else None
