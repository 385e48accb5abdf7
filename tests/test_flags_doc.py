"""docs/flags.md and README's shorter table have the flags that there are, and their defaults."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from mlx_mtp.options import SERVE_FLAGS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
ROWS = re.findall(r"^\| `(--[a-z-]+)(?: [^`]*)?` \| [^|]+ \| (.*?) \|$", README, re.MULTILINE)


def test_the_page_is_made_from_the_flags() -> None:
    spec = importlib.util.spec_from_file_location("flags_doc", ROOT / "scripts" / "flags_doc.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.page()
    assert all(f"| `{flag.name}" in made for flag in SERVE_FLAGS if flag.name.startswith("-"))
    shown = (ROOT / "docs" / "flags.md").read_text("utf-8")
    assert shown == made, "run: python scripts/flags_doc.py > docs/flags.md"


def test_readmes_table_is_found() -> None:
    assert len(ROWS) >= 6


@pytest.mark.parametrize(("name", "default"), ROWS)
def test_readmes_table(name: str, default: str) -> None:
    flag = next(flag for flag in SERVE_FLAGS if flag.name == name)
    assert default.strip("`") == (flag.shown_default or "off")


@pytest.mark.parametrize("page", ["README.md", "docs/troubleshooting.md", "docs/memory.md"])
def test_no_page_names_a_flag_that_is_not_there(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    ours = {flag.name for flag in SERVE_FLAGS}
    named = set(re.findall(r"`(--[a-z-]+)", text))
    assert named, "a page without any flag is no page to check"
    assert named <= ours | OTHERS


# Of the other commands.
OTHERS = {"--mlx-model-path", "--source-model", "--verify", "--force", "--dry-run"}
OTHERS |= {"--write", "--offline"}
