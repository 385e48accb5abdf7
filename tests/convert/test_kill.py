"""Killed at any moment, the converter leaves a whole model: without the head, or with all of it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.models.head_weights import read_sidecar
from tests.convert.checkpoints import write_large_source, write_source, write_target
from tests.tiny_models import Layout

LAYOUT = Layout("qwen3_next")
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "add_mtp_weights.py"

# A child that ends itself with SIGKILL at the n-th thing that it does to the disk. The writes of
# rows count too, but every tenth of them is enough.
CHILD = """
import os, signal, sys
from pathlib import Path
from mlx_mtp.convert import output
from mlx_mtp.convert.add_head import Request, add_head
from mlx_mtp.convert.console import Console
from mlx_mtp.convert.quantization import Flags

target, source, bits, limit, last = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
events = writes = 0

def event(original, every=1):
    def run(*args, **kwargs):
        global events, writes
        writes += every > 1
        if every == 1 or writes % every == 0:
            events += 1
            if events == last:
                os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    return run

os.replace = event(os.replace)
os.fsync = event(os.fsync)
Path.unlink = event(Path.unlink)
output.SidecarWriter.write = event(output.SidecarWriter.write, 10)
add_head(
    Request(target, source, Flags(bits=bits), force=True, max_file_bytes=limit), Console()
)
print("EVENTS", events)
"""
ONE_FILE, SEVERAL = 10**9, 60_000


def run(target: Path, source: Path, bits: int, limit: int, last: int = 0) -> int | None:
    """The number of events of a run that came to its end, None of one that was killed."""
    command = [sys.executable, "-c", CHILD, str(target), str(source)]
    done = subprocess.run(
        [*command, *map(str, (bits, limit, last))], capture_output=True, text=True, check=False
    )
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split("EVENTS")[1])


def head_of(directory: Path) -> dict[str, bytes] | None:
    """What the loader would read."""
    found = read_sidecar(directory)
    if found is None:
        return None
    return {k: np.array(v.view(mx.uint8)).tobytes() for k, v in found.tensors.items()}


def reference(tmp_path: Path, source: Path, bits: int) -> dict[str, bytes] | None:
    target = write_target(tmp_path / f"reference-{bits}", LAYOUT)
    run(target, source, bits, ONE_FILE)
    return head_of(target)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ONE_FILE, ONE_FILE),
        pytest.param(None, ONE_FILE, marks=pytest.mark.full),
        pytest.param(None, SEVERAL, marks=pytest.mark.full),
        pytest.param(ONE_FILE, SEVERAL, marks=pytest.mark.full),
        pytest.param(SEVERAL, ONE_FILE, marks=pytest.mark.full),
        pytest.param(SEVERAL, SEVERAL, marks=pytest.mark.full),
    ],
)
def test_killed_at_each_step(tmp_path, before, after):
    """The loader finds the old head or the new one, never a mixture, never an error."""
    source, target = tmp_path / "source", tmp_path / "target"
    write_source(source, LAYOUT)
    old, new = (reference(tmp_path, source, bits) for bits in (4, 8))
    assert old != new
    killed = found_new = 0
    last, done = 1, None
    while done is None:
        write_target(target, LAYOUT)
        config = (target / "config.json").read_bytes()
        if before is not None and head_of(target) != old:
            run(target, source, 4, before)
        done = run(target, source, 8, after, last)
        found = head_of(target)
        assert found in (old if before else None, new), f"killed at event {last}"
        assert (target / "config.json").read_bytes() == config
        killed, found_new = killed + (done is None), found_new + (found == new)
        last += 1
        if before is None and found is not None:
            for path in target.glob("mtp*"):
                path.unlink()
    assert killed >= 8
    assert found_new >= 1
    assert not list(target.glob(".mtp-*")), "the last run removed what the killed ones left"


@pytest.mark.full
@pytest.mark.parametrize("force", [False, True])
def test_killed_at_ten_random_moments(tmp_path, force):
    source, target = tmp_path / "source", tmp_path / "target"
    write_large_source(source, 64)
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    command = [sys.executable, str(SCRIPT), "--mlx-model-path", str(target)]
    command += ["--source-model", str(source), "--bits", "4"]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - start
    old = head_of(target)
    command[-1] = "8"
    subprocess.run([*command, "--force"], check=True, capture_output=True)
    new = head_of(target)
    chance = random.Random(force)
    for number in range(10):
        for path in target.glob("mtp*"):
            path.unlink()
        if force:
            subprocess.run([*command[:-1], "4"], check=True, capture_output=True)
        child = subprocess.Popen(
            [*command, "--force"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        # Half of them while it writes, which begins when the temporary file is there.
        while number % 2 and not list(target.glob(".mtp-*")) and child.poll() is None:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, seconds / (3 if number % 2 else 1)))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        assert head_of(target) in (old if force else None, new)
        assert (target / "config.json").read_bytes() == (source / "config.json").read_bytes()
    subprocess.run([*command, "--force"], check=True, capture_output=True)
    assert head_of(target) == new
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "mtp.safetensors"]


def test_a_termination_leaves_nothing_behind(tmp_path):
    """SIGTERM, unlike SIGKILL, gives the time to tidy up."""
    source, target = tmp_path / "source", tmp_path / "target"
    write_large_source(source, 32)
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    command = [sys.executable, str(SCRIPT), "--mlx-model-path", str(target)]
    # Slow enough on any CPU to be met while it writes.
    command += ["--source-model", str(source), "--mode", "mxfp4"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        while not list(target.glob(".mtp-*")):
            assert child.poll() is None, child.stderr.read()
            time.sleep(0.01)
        child.terminate()
        assert child.wait(timeout=60) == 128 + signal.SIGTERM
    assert [path.name for path in target.iterdir()] == ["config.json"]
