"""Processes of the converter: killed or terminated at any step, and their peak memory."""

import itertools
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mtp.cli import main as cli
from mlx_mtp.convert.convert import add_head
from mlx_mtp.convert.files import StoredTensor
from mlx_mtp.models.head_weights import sidecar_files
from tests.convert.conftest import LAYOUT
from tests.support.checkpoints import (
    encode_all,
    read_file,
    split_sidecar,
    write_file,
    write_source,
    write_target,
)
from tests.support.tiny_models import Layout, hf_tensors

# The fork server imports everything once, so that no process has to. It runs none of mlx's threads,
# and its peak memory, which a fork inherits, is small.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.convert.test_kill"])


def forked(function: Callable[..., None], *arguments: object) -> int:
    """Run a function in a forked process; returns the exit status."""
    process = FORKS.Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def convert(source: Path, target: Path, bits: int) -> None:
    arguments = ["--mlx-model-path", str(target), "--source-model", str(source), "--force"]
    assert cli.main(["add-mtp-weights", *arguments, "--bits", str(bits)]) == 0


def end_at(last: int, number: int, source: Path, target: Path) -> None:
    """Convert to 8 bits, and send the signal `number` before disk access `last` of this process."""
    events = itertools.count(1)

    def event(original):
        def run(*args, **kwargs):
            if next(events) == last:
                os.kill(os.getpid(), number)
            return original(*args, **kwargs)

        return run

    owners = {os: ("replace", "fsync"), Path: ("unlink", "open"), StoredTensor: ("read",)}
    for owner, names in owners.items():
        for name in names:
            setattr(owner, name, event(getattr(owner, name)))
    convert(source, target, bits=8)


def head_of(directory: Path) -> dict[str, bytes]:
    """Returns the tensors that the loader would read, as bytes."""
    tensors = {}
    for path in sidecar_files(directory):
        tensors |= {k: bytes(memoryview(v.view(mx.uint8))) for k, v in read_file(path)[0].items()}
    return tensors


@pytest.mark.parametrize(
    ("number", "before"),
    [
        *[(signal.SIGKILL, "a head"), (signal.SIGKILL, "parts"), (signal.SIGTERM, "no head")],
        pytest.param(signal.SIGKILL, "no head", marks=pytest.mark.full),
    ],
)
def test_ended_at_each_step(tmp_path, number, before):
    """The loader then finds the old head or the new one, never a mixture and never an error."""
    source, target = tmp_path / "source", tmp_path / "target"
    write_source(source, LAYOUT)
    write_target(target, LAYOUT)
    add_head(str(target), str(source), flags={"bits": 4})
    if before == "parts":
        split_sidecar(target)
    elif before == "no head":
        (target / "mtp.safetensors").unlink()
    files = {path.name: path.read_bytes() for path in target.iterdir()}
    old = head_of(target)
    found, status = [], None
    while status != 0:
        if not found or found[-1] != old:
            for path in target.glob("mtp*"):
                path.unlink()
            for name, content in files.items():
                (target / name).write_bytes(content)
        status = forked(end_at, len(found) + 1, number, source, target)
        assert status in (0, -number if number == signal.SIGKILL else 128 + number)
        found.append(head_of(target))
        assert (target / "config.json").read_bytes() == files["config.json"]
        # SIGTERM leaves time to remove temporary files.
        assert number == signal.SIGKILL or not list(target.glob(".mtp-*"))
    new = found[-1]
    assert new != old
    assert all(head in (old, new) for head in found)
    assert found.count(old) >= 15
    assert found.count(new) >= 2
    assert [path.name for path in target.glob("*mtp*")] == ["mtp.safetensors"]


def write_peak(source: Path, target: Path, bits: int) -> None:
    convert(source, target, bits)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (target / "peak").write_text(str(peak * (1 if sys.platform == "darwin" else 1024)))


@pytest.mark.parametrize("bits", [pytest.param(4, marks=pytest.mark.full), 16])
def test_peak_memory_does_not_grow_with_the_head(tmp_path, bits):
    """The peak grows by less than the larger stack of 96 experts, which takes 101 MB."""
    layout, mlp, peaks = Layout("qwen3_next", stacked_experts=True), "mtp.layers.0.mlp.", []
    for experts in (8, 96):
        source, target = tmp_path / f"source-{experts}", tmp_path / f"target-{experts}"
        for path in (source, target):
            write_target(path, layout, num_experts=experts, moe_intermediate_size=4096)
        tensors, _ = encode_all(hf_tensors(layout))
        for name, shape in (
            ("gate.weight", (experts, 64)),
            ("experts.gate_up_proj", (experts, 8192, 64)),
            ("experts.down_proj", (experts, 64, 4096)),
        ):
            tensors[mlp + name] = mx.random.normal(shape, mx.bfloat16)
        write_file(source / "model.safetensors", tensors)
        assert forked(write_peak, source, target, bits) == 0
        peaks.append(int((target / "peak").read_text()))
    assert peaks[1] - peaks[0] < 96 * 8192 * 64 * 2
