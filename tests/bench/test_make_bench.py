"""What `make bench` starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.concurrency import contenders
from mlx_mtp import cli
from tests.bench.test_commands import table_of


def test_the_contenders_can_be_started(tmp_path):
    first, off, *mtp = contenders(tmp_path)
    assert first.name == "mlx_lm.server"
    assert (tmp_path / "float32" / "config.json").is_file()
    assert [c.name for c in mtp] == [*(f"MTP, k = {k}" for k in (1, 2, 3)), "MTP, auto"]
    for contender in (off, *mtp):
        start_of_ours = contender.command.index("mlx_mtp") + 1
        given = cli._parser().parse_args(contender.command[start_of_ours:])
        assert given.command == "serve"
        assert getattr(given, "enable_mtp", False) == (contender is not off)


@pytest.mark.full
def test_make_bench():
    few = ("--rounds", "1", "--max-tokens", "64", "--seed", "3", "--concurrency", "1,2")
    command = [sys.executable, "-m", "benchmarks.concurrency", *few]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    header, *rows = table_of(done.stdout)
    assert header == ["server", "1 at once", "2 at once", "drafts accepted"]
    assert len(rows) == 6
