"""Counts the operations of mlx, and the arrays from the host, that a decode step makes anew."""

import json
import subprocess
import sys

import mlx.core as mx
import pytest

from benchmarks.cores import core_of, decode, row_of
from mlx_mtp.engine import runner as runner_module
from mlx_mtp.speculative.drafter import MTPDrafter
from tests.support.quick import full

# Operations and launches without drafts and with 3, with 4 layers, of which one has attention.
_MOST = {
    "Qwen3-Next-80B-A3B-Instruct": [(76, 55), (235, 158)],
    "Qwen3.5-27B": [(68, 47), (221, 144)],
    "bundled": [(679, 363), (1584, 744)],
}


@pytest.mark.parametrize("shape", [full(n) if n == "Qwen3.5-27B" else n for n in _MOST])
def test_operations_and_launches(tmp_path, shape):
    path = tmp_path / "rows.json"
    how = ["--shape", shape, "--layers", "4", "--cases", "1x0,1x3", "--steps", "1", "--json", path]
    subprocess.run([sys.executable, "-m", "benchmarks", "host", *how], check=True)
    for row, (operations, launches) in zip(
        json.loads(path.read_text())["rows"], _MOST[shape], strict=True
    ):
        assert 0.8 * operations < row["operations"] <= operations, row
        assert 0.8 * launches < row["launches"] <= launches, row


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_step_without_joins_uploads_nothing(tiny_models, monkeypatch, temperature):
    array, uploads = mx.array, []

    class Counted(type):
        def __instancecheck__(cls, value):
            return isinstance(value, array)

        def __call__(cls, *args, **kwargs):
            uploads.append(args)
            return array(*args, **kwargs)

    core = core_of(tiny_models["qwen3_next"], 0, max_num_seqs=3, prefill_step_size=64)
    rows = [row_of(str(n), range(5, 9), seed=n, temperature=temperature) for n in range(3)]
    decode(core, rows)
    for _ in range(20):  # also those that write what the head has deferred
        core.step()
    monkeypatch.setattr(mx, "array", Counted("array", (), {}))
    before = len(rows[0].output)
    for _ in range(40):
        core.step()
    assert len(rows[0].output) == before + 40
    assert not uploads
    mx.array([1])
    assert len(uploads) == 1, "they are counted"


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_steps_tokens_are_launched_before_the_head_drafts(tiny_models, monkeypatch, drafts):
    launch, propose, events = runner_module.launch_early, MTPDrafter.propose, []

    def launched(sampled, on_gpu):
        assert on_gpu == (drafts > 0)
        events.append(sampled.tokens)
        launch(sampled, on_gpu=on_gpu)

    def proposed(*args):
        events.append("head")
        return propose(*args)

    core = core_of(tiny_models["qwen3_next"], drafts, max_num_seqs=1, prefill_step_size=64)
    decode(core, [row_of("0", range(5, 9))])
    monkeypatch.setattr(runner_module, "launch_early", launched)
    monkeypatch.setattr(MTPDrafter, "propose", proposed)
    core.step()
    (step,) = core._in_flight
    assert events[0] is step.sampled.tokens and events[1:] == ["head"]
