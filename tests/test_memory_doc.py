"""docs/memory.md has the tables that the plan's code computes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.memory_guide import tables

TEXT = (Path(__file__).parents[1] / "docs" / "memory.md").read_text("utf-8")


def test_the_tables() -> None:
    for table in tables(bits=4).split("\n\n"):
        assert table in TEXT, "run: python -m benchmarks.memory_guide"
