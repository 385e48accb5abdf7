from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlx_mtp.prefix.disk import PrefixStore
from tests.support.prefixes import FINGERPRINT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prefixes"


@pytest.fixture
def open_store(folder: Path) -> Iterator[Callable[..., PrefixStore]]:
    """A function that opens a store in `folder`, after closing the one before it."""
    opened: list[PrefixStore] = []

    def open_one(
        max_bytes: int = 1 << 30, mark: str = FINGERPRINT, path: Path = folder, **more: int
    ) -> PrefixStore:
        for store in opened:
            store.close()
        opened.append(PrefixStore(path, mark, max_bytes, **more))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()
