"""A short fuzz run of requests; `python -m tests.fuzz.requests` does longer ones."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
@pytest.mark.parametrize(
    "flags", [[], ["--special-tokens-in-messages", "text", "--request-chat-template"]], ids=str
)
def test_no_request_breaks_the_server(flags: list[str]) -> None:
    argv = [sys.executable, "-m", "tests.fuzz.requests", "--seconds=75", "--seed=1", "--", *flags]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
