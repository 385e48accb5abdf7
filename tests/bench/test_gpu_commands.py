"""The commands that measure on a GPU, tried with small sizes."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    "command",
    [
        "full_shape --tiny --cases 1x64,2x80 --steps 2 --depths 1,3",
        "products --tiny --shape Qwen3.6-35B-A3B --rows 1,2 --tokens 1,4",
        "prefill --tiny --shape Qwen3.5-27B,Qwen3.6-35B-A3B --layers 4 --prompts 150 --steps 64",
        "pauses --tiny --shape Qwen3.5-27B --prompt 1500 --streams 2",
        "rows --tiny --shape Qwen3.5-27B --rows 1 --long 600 --depths 1 --steps 2",
        "ranks --tiny --rows 2 --depths 2 --steps 2",
        "replayed --tiny --rows 1,2 --rounds 1 --tokens 40 --calibration-seconds 5",
        "host --layers 4 --cases 2x3 --steps 2",
        "host --layers 4 --cases 2x3 --steps 2 --temperature 1 --top-k 20 --parts",
    ],
)
def test_with_small_sizes(command):
    subprocess.run([sys.executable, "-m", "benchmarks", *command.split()], check=True)
