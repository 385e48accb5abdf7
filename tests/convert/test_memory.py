"""A head is never in memory as a whole, nor is a stack of its experts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.convert.checkpoints import write_large_source

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "add_mtp_weights.py"
# A process begins with the peak of the one that started it, so a small one stands between.
LAUNCHER = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(child.pid, 0)
print(usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
sys.exit(status != 0)
"""


def peak_of(source: Path, target: Path, *arguments: str) -> int:
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    command = [sys.executable, "-c", LAUNCHER, sys.executable, str(SCRIPT)]
    command += ["--mlx-model-path", str(target), "--source-model", str(source), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.parametrize("bits", [pytest.param("4", marks=pytest.mark.full), "16"])
def test_peak_memory_does_not_grow_with_the_head(tmp_path, bits):
    """With 8 experts, and with 128, the larger stack of which takes 134 MB."""
    peaks = []
    for experts in (8, 128):
        source = tmp_path / f"source-{experts}"
        write_large_source(source, experts)
        peaks.append(peak_of(source, tmp_path / f"target-{experts}", "--bits", bits))
    assert peaks[1] - peaks[0] < 128 * 1024 * 512 * 2 / 2
