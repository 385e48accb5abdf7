"""A head is never in memory as a whole."""

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


@pytest.mark.full
@pytest.mark.parametrize("bits", ["4", "16"])
def test_peak_memory_does_not_grow_with_the_head(tmp_path, bits):
    """Eight experts, 13 MB, and 256, 400 MB: the same but for what a few pieces take."""
    peaks = []
    for experts in (8, 256):
        write_large_source(tmp_path / f"source-{experts}", experts)
        peaks.append(
            peak_of(tmp_path / f"source-{experts}", tmp_path / f"target-{experts}", "--bits", bits)
        )
    print(peaks)
    assert peaks[1] - peaks[0] < 100e6
