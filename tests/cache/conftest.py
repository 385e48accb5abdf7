from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_mtp.cache.prefix_store import PrefixStore
from tests.cache.stored_nodes import FINGERPRINT, Open


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prefixes"


@pytest.fixture
def open_store(folder: Path) -> Iterator[Open]:
    """Opens stores in `folder`, and closes them in the end."""
    opened = []

    def open_one(max_bytes: int = 1 << 30, **more: object) -> PrefixStore:
        path, mark = more.pop("path", folder), more.pop("fingerprint", FINGERPRINT)
        store = PrefixStore(path, mark, max_bytes, **more)
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()
