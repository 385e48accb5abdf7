"""docs/reliability.md names a test for each promise, and each test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT, _, TESTS = (ROOT / "docs" / "reliability.md").read_text("utf-8").partition("\n## The test ")
PROMISES = re.findall(r"^\| ([A-Z][0-9]+) \|", TEXT, re.MULTILINE)
ROWS = dict(re.findall(r"^\| ([A-Z][0-9]+) \| (.+) \|$", TESTS, re.MULTILINE))


def test_each_promise_has_a_row() -> None:
    assert len(PROMISES) >= 30
    assert list(ROWS) == PROMISES


@pytest.mark.parametrize("promise", ROWS)
def test_the_tests_are_there(promise: str) -> None:
    source = ""
    for name in re.findall(r"`([^`]+)`", ROWS[promise]):
        if name.startswith("tests/"):
            source = (ROOT / name).read_text("utf-8")
        else:
            assert re.search(rf"^(?:async )?def {name}\(", source, re.MULTILINE), name
    assert source, "a file comes first"
