"""docs/clients.md lists what is accepted without effect."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "clients.md").read_text("utf-8")
SECTION = TEXT.partition("### Accepted without effect\n")[2].partition("\n### ")[0]
PARAMETERS = json.loads((ROOT / "tests" / "data" / "sdk_parameters.json").read_text("utf-8"))
IGNORED = sorted(
    {
        name
        for reasons in PARAMETERS.values()
        for reason, names in reasons.items()
        if not reason.startswith("tests/")
        for name in names
    }
)


def test_there_are_some() -> None:
    assert len(IGNORED) >= 20


@pytest.mark.parametrize("name", IGNORED)
def test_it_is_listed(name: str) -> None:
    path, _, value = name.partition("=")
    kind = re.search(r"\(([a-z_]+)\)", path) if path.startswith("tools") else None
    field = kind[1] if kind else re.sub(r"\[\]|\(.*?\)", "", path).rpartition(".")[2]
    assert re.search(rf"`(?:[a-z_]+\.)*{field}\b", SECTION), f"{field} is missing"
    if value and value not in ("false", "true"):
        assert re.search(rf"\b{value}\b", SECTION), f"{value} of {field} is missing"
