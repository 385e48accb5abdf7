"""The commands that measure on a GPU, tried with small sizes, and that differences are found."""

import subprocess
import sys

import mlx.core as mx
import pytest

from benchmarks.exact import exact
from mlx_mtp.engine import runner
from mlx_mtp.errors import BenchError

pytestmark = pytest.mark.full
SIBLING = "tests/data/dense-demo:16"


@pytest.mark.parametrize(
    "command",
    [
        "full_shape --tiny --cases 1x64,2x80 --steps 2 --depths 1,3",
        "products --tiny --shape Qwen3.6-35B-A3B --rows 1,2 --tokens 1,4",
        "prefill --tiny --shape Qwen3.5-27B,Qwen3.6-35B-A3B --layers 4 --prompts 150 --steps 64",
        "pauses --tiny --shape Qwen3.5-27B --prompt 1500 --streams 2",
        "rows --tiny --shape Qwen3.5-27B --rows 1 --long 600 --depths 1 --steps 2",
        "ranks --tiny --rows 2 --depths 2 --steps 2",
        "exact Qwen3.5-27B --tiny --requests 4 --tokens 12 --seconds 30",
        f"exact {SIBLING} --requests 4 --tokens 12",
    ],
)
def test_with_small_sizes(command):
    subprocess.run([sys.executable, "-m", "benchmarks", *command.split()], check=True)


def test_a_draft_that_is_believed_is_a_difference(monkeypatch):
    verify_window = runner.verify_window

    def believing(targets, window, **more):
        targets = mx.concatenate([window[:, 1:], targets[:, -1:]], axis=1)
        return verify_window(targets, window, **more)

    monkeypatch.setattr(runner, "verify_window", believing)
    with pytest.raises(BenchError, match=r"^[1-9].* different tokens"):
        list(exact(SIBLING, requests=4, tokens=12))
