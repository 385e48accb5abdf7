"""Step costs at the start: measured by requests of the engine's own, kept, and never in the way."""

import dataclasses
import itertools
import json
import os

import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine import calibration
from mlx_mtp.engine.build import build_engine
from mlx_mtp.engine.calibration import CostKeeper, calibrate, fingerprint
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.speculative.controller import StepCosts
from mlx_mtp.speculative.proposer import MTPProposer
from tests.engine.test_engine import Client
from tests.harness import greedy, plain, request
from tests.tiny_models import VOCAB

K = 8
TABLE = {1: {0: 0.01, 3: 0.02}, 16: {0: 0.05}}
MARK = "a" * 64


@pytest.fixture
def runner(tiny_models) -> ModelRunner:
    model = tiny_models["qwen3_next"]
    return ModelRunner(model, MTPProposer(model), VOCAB)


def keeper(folder, table=None, mark=MARK, **more) -> CostKeeper:
    costs = StepCosts(K)
    costs.load(table or {})
    return CostKeeper(costs, EngineConfig(), folder, mark, **more)


def measure(runner: ModelRunner, known=None, stopping=lambda: False, **settings) -> StepCosts:
    costs = StepCosts(K)
    costs.load(known or {})
    config = EngineConfig(**({"calibration_seconds": 3600.0} | settings))
    calibrate(costs, config, runner, stopping=stopping)
    return costs


def test_it_measures_sizes_near_1_and_checks_what_an_earlier_run_measured(runner):
    known = {1: dict.fromkeys((0, 2, 3, 4, 6, 8), 1.0) | {1: 1000.0}, 4: {0: 1.0, 1: 1.0}}
    costs = measure(runner, known, prefill_step_size=64)
    assert costs.relative(1)[1] < 800.0
    table = costs.table()
    # One row is known but checked, four rows lack depths, and of two nothing is known.
    assert table[1][8] == pytest.approx(table[1][6])
    assert {size: set(row) for size, row in table.items()} == {
        1: {0, 1, 2, 3, 4, 6, 8},
        2: {0, 1, 3},
        4: {0, 1, 2, 3, 5, 8},
    }
    assert all(seconds > 0 for row in table.values() for seconds in row.values())
    assert not runner.batches.prefilling
    assert not runner.batches.ready


def test_its_time_is_bounded(runner):
    """By a clock that moves a tenth of a second each time it is read."""
    ticks, costs = itertools.count(), StepCosts(K)
    config = EngineConfig(calibration_seconds=8.0)
    calibrate(costs, config, runner, stopping=lambda: False, clock=lambda: 0.1 * next(ticks))
    assert 8.0 < 0.1 * next(ticks) < 12.0
    assert list(costs.table()) == [1]


def test_it_keeps_to_the_most_rows_and_stops_when_asked_or_after_a_failure(runner, monkeypatch):
    asked = itertools.count()
    assert measure(runner, stopping=lambda: next(asked) > 3).table() == {}
    calls, original = itertools.count(), MTPProposer.propose

    def failing(self, *parts):
        if next(calls) == 30:
            raise MemoryError("no room")
        return original(self, *parts)

    monkeypatch.setattr(MTPProposer, "propose", failing)
    measured = measure(runner, max_num_seqs=1).table()
    assert set(measured) == {1}
    assert 8 not in measured[1]


@pytest.fixture
def serve(tiny_models, tmp_path):
    """Starts an engine with its costs in a folder, answers a request, and stops it."""

    def answer(count: int = 30, family: str = "qwen3_5", folder=tmp_path, **settings):
        model = tiny_models[family]
        config = EngineConfig(**({"prefill_step_size": 64} | settings))
        client = Client(build_engine(model, config, VOCAB, (), cache_dir=folder))
        wanted = request("r", [5, 6, 7], greedy(count, ignore_eos=True))
        client.engine.submit(wanted)
        client.wait("r")
        assert tuple(client.tokens("r")) == plain(model, wanted, VOCAB).tokens
        client.engine.stop()
        return client.engine.stats()

    return answer


def test_an_engine_measures_and_counts_nothing_of_it(serve, tmp_path):
    stats = serve(25, "qwen3_next", calibration_seconds=0.5)
    assert (stats.prompt_tokens, stats.generation_tokens) == (3, 25)
    assert stats.num_draft_tokens < 8 * 25
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["seconds"]["1"]


def test_costs_learned_in_use_are_kept_and_a_bad_folder_or_file_hurts_nobody(
    serve, tiny_models, tmp_path, caplog
):
    serve(num_draft_tokens=2, calibration_seconds=9.0)
    assert list(tmp_path.iterdir()) == []  # A fixed depth measures and keeps nothing.
    serve(60)
    (kept,) = tmp_path.iterdir()
    assert list(keeper(tmp_path, mark=fingerprint(tiny_models["qwen3_5"])).load()) == [1]
    kept.write_text("{")
    serve()
    assert json.loads(kept.read_text())["seconds"]
    serve(folder=kept / "folder")
    assert "Step costs are not kept" in caplog.text


def test_costs_of_other_models_and_draft_vocabularies_are_kept_apart(tiny_models):
    model = tiny_models["qwen3_5"]
    changed = dataclasses.replace(model, config=model.config | {"quantization": {"bits": 4}})
    marks = {fingerprint(each) for each in (*tiny_models.values(), changed)}
    marks |= {fingerprint(model, 20), fingerprint(model, 30), fingerprint(model, None, "other")}
    assert len(marks) == len(tiny_models) + 4


def test_files_are_replaced_whole_now_and_then_and_damaged_or_foreign_ones_are_ignored(
    tmp_path, caplog, monkeypatch
):
    now = [0.0]
    kept = keeper(tmp_path / "not" / "there", TABLE, clock=lambda: now[0])
    path = kept.path
    kept.save_periodically()
    assert kept.load() == {}
    with monkeypatch.context() as patch:
        patch.setattr(calibration.os, "replace", lambda source, target: os.stat("missing"))
        kept.save()
    assert os.listdir(path.parent) == []
    now[0] = 1000.0
    kept.save_periodically()
    assert os.listdir(path.parent) == [path.name]
    assert kept.load() == {size: pytest.approx(row) for size, row in TABLE.items()}
    assert keeper(tmp_path / "not" / "there", mark=MARK[:-1] + "b").load() == {}
    good = path.read_text()
    damaged = [good[: len(good) // 2], "", "[1, 2]", "[" * 100_000, "null", "{}", "\0"]
    seconds = [[], {"1": 3}, {"one": {"0": 1.0}}, {"0": {"0": 1.0}}, {"1": {"-1": 1.0}}]
    seconds += [{"1": {"0": value}} for value in (0.0, float("nan"), float("inf"), "fast")]
    changes = [{"format": 0}, {"fingerprint": "c" * 64}, {"saved_at": "yesterday"}]
    changes += [{"saved_at": 0.0}, {"saved_at": 1e12}, *({"seconds": each} for each in seconds)]
    damaged += [json.dumps(json.loads(good) | change) for change in changes]
    for content in (*(text.encode() for text in damaged), b"\xff\xfe\x00"):
        path.write_bytes(content)
        caplog.clear()
        assert kept.load() == {}, content[:80]
        assert str(path) in caplog.text
