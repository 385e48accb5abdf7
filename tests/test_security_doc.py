"""SECURITY.md's table says what the code does."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from mlx_mtp.config import ServerConfig
from mlx_mtp.options import SERVE_FLAGS

TEXT = (Path(__file__).parents[1] / "SECURITY.md").read_text("utf-8")
ROWS = re.findall(r"^\| ([^|]+) \| ([0-9.]+) \| `([^`]+)` \|$", TEXT, re.MULTILINE)


def test_the_table_is_found() -> None:
    assert len(ROWS) >= 25


@pytest.mark.parametrize(("what", "bound", "name"), ROWS)
def test_bounds(what: str, bound: str, name: str) -> None:
    if name.startswith("--"):
        value = next(flag.default for flag in SERVE_FLAGS if flag.name == name)
    elif name.startswith("config.ServerConfig."):
        value = getattr(ServerConfig("m"), name.rpartition(".")[2])
    else:
        module, _, constant = name.rpartition(".")
        value = getattr(importlib.import_module(f"mlx_mtp.{module}"), constant)
    assert value == float(bound), what
