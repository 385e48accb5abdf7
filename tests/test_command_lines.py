"""Every command line of `command_lines.txt` gives what is recorded there."""

from pathlib import Path

import mlx.core as mx
import pytest

from tests.command_lines import prepare, recorded, result_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)


CASES = [
    # These run in processes, which take seconds.
    pytest.param(line, result, id=line, marks=[pytest.mark.full] * line.startswith("HF_"))
    for line, result in recorded()
]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("line", "result"), CASES)
def test_a_command_line_gives_what_is_recorded(
    line: str, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is written into the directory, and `serve` refuses before it reads the weights."""
    if " serve " in line and result.startswith("2\n"):
        monkeypatch.setattr(mx, "eval", lambda *_: pytest.fail("the weights are read"))
    assert result in ("...", result_of(line))
    assert result == "..." or not list(Path("DIR").iterdir())
