"""Looks for the head of a model that is to be loaded, and fetches a published model's head."""

import contextlib
import io
import sys
from pathlib import Path

from mlx_mtp.console import say_wrapped, size_text
from mlx_mtp.convert.files import Existing
from mlx_mtp.convert.source import (
    HubRepo,
    LocalRepo,
    cached_sidecar,
    find_source,
    head_of,
    on_hub,
    remote_sidecar,
    weight_map_of,
)
from mlx_mtp.errors import ConvertError, ModelError
from mlx_mtp.models.hub import cached_model
from mlx_mtp.models.loader import missing_head
from mlx_mtp.models.published import source_of


def check_head_on_hub(name: str | None) -> None:
    """Raise MissingHeadError if a model on the hub has no head, before it is downloaded.

    A head that `provide_head` can fetch counts.
    """
    if not on_hub(name) or source_of(name) or cached_model(name):
        return
    repo = HubRepo(name, None)
    try:
        # add-mtp-weights puts a head into the cache, beside the hub's files.
        if cached_sidecar(repo) or remote_sidecar(repo) or head_of(weight_map_of(repo)):
            return
    except ConvertError:  # The download will report it, or the model is in the cache.
        return
    raise missing_head(name, "Its weights were not downloaded.")


def provide_head(name: str | None, directory: Path) -> None:
    """Fetch the head of a published model into its `directory` in the cache, if it has none.

    Raises MissingHeadError if that fails, with the reason as its cause. Does nothing for any other
    model, or a model in a local directory.
    """
    if not on_hub(name) or not source_of(name) or has_head(directory):
        return
    # Imported here, as the check of a head (`convert.verify`) needs `build`, which imports this.
    from mlx_mtp.convert.convert import add_head

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Standard output is for answers.
            source = find_source(name)
            size = size_text(sum(source.repo.missing(source.files).values()))
            say_wrapped(
                f"{name} has no MTP head: getting it from {source.name}, of which {size} are "
                "downloaded (--no-enable-mtp leaves it out).",
                file=sys.stderr,
            )
            add_head(str(directory), source.name, with_tower=False)
    except ModelError as error:
        raise missing_head(name, str(error)) from error


def has_head(directory: Path) -> bool:
    """Returns True if a model's directory has the head, in the model's own files or beside them."""
    return bool(Existing.find(directory) or head_of(weight_map_of(LocalRepo(directory))))
