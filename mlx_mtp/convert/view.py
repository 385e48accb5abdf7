"""Directories that show a model's files, by links, with another sidecar than the model's own."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from mlx_mtp.errors import ConvertError
from mlx_mtp.models.head_weights import SIDECAR_INDEX, SIDECAR_PATTERN


@contextlib.contextmanager
def view_with(model: Path, sidecar: Mapping[str, Path]) -> Iterator[Path]:
    """A model with this sidecar, for as long as the context lasts.

    Args:
        model: its directory.
        sidecar: where its files are, by the names they should have.
    """
    with tempfile.TemporaryDirectory(prefix="mlx-mtp-view-") as folder:
        view = Path(folder)
        link_model(model, view)
        for name, path in sidecar.items():
            (view / name).symlink_to(path.resolve())
        yield view


def link_model(model: Path, directory: Path) -> None:
    """Link a model's files, but for its sidecar, into another directory.

    Raises:
        ConvertError: another file of that name is there.
        OSError: the directory can't be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(model.iterdir()):
        if not path.is_file() or path.match(SIDECAR_PATTERN) or path.name == SIDECAR_INDEX:
            continue
        link = directory / path.name
        if not link.exists():
            link.symlink_to(path.resolve())
        elif not link.samefile(path):
            raise ConvertError(
                f"{link} is not the same file as {path}: give --output a new or empty directory."
            )
