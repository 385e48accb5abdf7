"""Step costs at the start: measured by requests of the engine's own, kept, and never in the way."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import threading
import time

import pytest

from mlx_mtp.config import EngineConfig
from mlx_mtp.engine import calibration as cost_keeper
from mlx_mtp.engine.build import build_engine
from mlx_mtp.engine.calibration import CostKeeper, calibrate, fingerprint, load_costs
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.speculative.costs import StepCosts
from mlx_mtp.speculative.proposer import MTPProposer
from tests.harness import greedy, plain, request
from tests.tiny_models import VOCAB

K = 8


@pytest.fixture
def runner(tiny_models) -> ModelRunner:
    model = tiny_models["qwen3_next"]
    return ModelRunner(model, MTPProposer(model), VOCAB)


def never() -> bool:
    return False


def test_it_measures_sizes_near_1_and_leaves_the_runner_idle(runner):
    costs = StepCosts(K)
    config = EngineConfig(calibration_seconds=3600.0, prefill_step_size=64)
    calibrate(costs, config, runner, stopping=never)
    table = costs.table()
    assert set(table) == {1, 2, 4}
    assert {0, 1, 2, 3, 4, 6, 8} == set(table[1])
    assert {0, 1, 3} <= set(table[2])
    assert all(0 < seconds < 10 for row in table.values() for seconds in row.values())
    assert not runner.batches.prefilling
    assert not runner.batches.ready


def test_what_an_earlier_run_measured_is_checked_in_part(runner):
    known = {1: dict.fromkeys((0, 2, 3, 4, 6, 8), 1.0) | {1: 1000.0}, 4: {0: 1.0, 1: 1.0}}
    costs = StepCosts(K)
    costs.load(known)
    before = costs.relative(1)[1]
    calibrate(costs, EngineConfig(calibration_seconds=3600.0), runner, stopping=never)
    assert costs.relative(1)[1] < 0.8 * before
    table = costs.table()
    # One row is known but checked, four rows lack depths, and of two nothing is known.
    assert table[1][8] == pytest.approx(table[1][6])
    assert {0, 1, 2, 3, 5, 8} == set(table[4])
    assert {0, 1, 3} == set(table[2])


@pytest.mark.parametrize("overlap", [True, False])
def test_its_time_is_bounded(runner, overlap):
    """By a clock that moves a tenth of a second each time it is read."""
    ticks = itertools.count()
    costs = StepCosts(K)
    config = EngineConfig(calibration_seconds=8.0, overlap=overlap)
    calibrate(costs, config, runner, stopping=never, clock=lambda: 0.1 * next(ticks))
    spent = 0.1 * next(ticks)
    assert 8.0 < spent < 12.0
    assert list(costs.table()) == [1]
    assert 0 in costs.table()[1]


def test_it_keeps_to_the_most_rows_and_stops_when_asked(runner):
    costs = StepCosts(K)
    config = EngineConfig(calibration_seconds=3600.0, max_num_seqs=1)
    calibrate(costs, config, runner, stopping=never)
    assert set(costs.table()) == {1}
    asked = itertools.count()
    stopped = StepCosts(K)
    calibrate(stopped, config, runner, stopping=lambda: next(asked) > 3)
    assert stopped.table() == {}


def test_a_failing_step_ends_it_with_a_warning(runner, monkeypatch, caplog):
    calls = itertools.count()
    original = MTPProposer.propose

    def failing(self, *parts, **more):
        if next(calls) == 30:
            raise MemoryError("no room")
        return original(self, *parts, **more)

    monkeypatch.setattr(MTPProposer, "propose", failing)
    costs = StepCosts(K)
    calibrate(costs, EngineConfig(calibration_seconds=3600.0), runner, stopping=never)
    assert "failed while step costs were measured" in caplog.text
    assert set(costs.table()) == {1}


class Served:
    """An engine with the costs kept in a folder."""

    def __init__(self, model, folder, **settings) -> None:
        config = EngineConfig(**({"prefill_step_size": 64} | settings))
        self.engine = build_engine(model, config, VOCAB, (), cache_dir=folder)
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.changed = threading.Condition()
        self.engine.start(self._deliver)

    def _deliver(self, outputs) -> None:
        with self.changed:
            for output in outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason:
                    self.ended.add(output.request_id)
            self.changed.notify_all()

    def answer(self, wanted) -> tuple[int, ...]:
        self.engine.submit(wanted)
        with self.changed:
            assert self.changed.wait_for(lambda: wanted.request_id in self.ended, timeout=60)
        return tuple(self.tokens[wanted.request_id])


def test_an_engine_measures_and_counts_nothing_of_it(tiny_models, tmp_path, caplog):
    caplog.set_level("DEBUG", "mlx_mtp")
    model = tiny_models["qwen3_next"]
    wanted = request("r", [5, 6, 7], greedy(25, ignore_eos=True))
    expected = plain(model, wanted, VOCAB).tokens
    for number in range(2):
        caplog.clear()
        served = Served(model, tmp_path, calibration_seconds=2.0)
        assert served.answer(wanted) == expected
        stats = served.engine.stats()
        assert (stats.prompt_tokens, stats.generation_tokens) == (3, 25)
        assert stats.num_draft_tokens < 8 * 25
        served.engine.stop()
        told = [(r.levelname, r.getMessage()) for r in caplog.records]
        # The tables are for those who look for them.
        (info,) = [text for level, text in told if level == "INFO" and "Step costs" in text]
        assert re.fullmatch(r"Step costs measured in [\d.]+ s\.", info)
        tables = [text for level, text in told if level == "DEBUG" and "1 row {0: " in text]
        assert len(tables) == 1 + number
        assert tables[0].startswith("Step costs of an earlier run: ") == (number == 1)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["seconds"]["1"]


def test_without_time_for_it_costs_are_learned_in_use_and_kept(tiny_models, tmp_path):
    model = tiny_models["qwen3_5"]
    served = Served(model, tmp_path)
    served.answer(request("r", [5, 6, 7], greedy(60, ignore_eos=True)))
    assert list(tmp_path.iterdir()) == []
    served.engine.stop()
    (file,) = tmp_path.iterdir()
    table = CostFile(tmp_path, fingerprint(model)).load()
    assert list(table) == [1]
    assert file.name.startswith("step-costs-")


def test_a_fixed_depth_measures_and_keeps_nothing(tiny_models, tmp_path):
    served = Served(tiny_models["qwen3_5"], tmp_path, num_draft_tokens=2, calibration_seconds=9.0)
    served.answer(request("r", [5, 6, 7], greedy(30, ignore_eos=True)))
    served.engine.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_and_a_damaged_file_hurt_nobody(tiny_models, tmp_path):
    model = tiny_models["qwen3_5"]
    wanted = request("r", [5, 6, 7], greedy(30, ignore_eos=True))
    (tmp_path / "file").write_text("")
    store = CostFile(tmp_path, fingerprint(model))
    store.path.write_text("{")
    for folder in (tmp_path / "file" / "folder", tmp_path):
        served = Served(model, folder)
        assert served.answer(wanted) == plain(model, wanted, VOCAB).tokens
        served.engine.stop()
    assert store.load()


def test_stopping_does_not_wait_for_the_measuring(tiny_models, tmp_path, monkeypatch):
    """The measuring asks after each step (above); here it has no other end."""
    begun = threading.Event()

    def endless(costs, config, runner, *, stopping):
        begun.set()
        while not stopping():
            time.sleep(0.01)

    monkeypatch.setattr(cost_keeper, "calibrate", endless)
    served = Served(tiny_models["qwen3_next"], tmp_path, calibration_seconds=1.0)
    assert begun.wait(30)
    assert served.engine.stop(timeout=30)


def test_costs_are_saved_now_and_then(tmp_path):
    now = [0.0]
    costs, store = StepCosts(K), CostFile(tmp_path, "a" * 64)
    keeper = CostKeeper(costs, store, clock=lambda: now[0])
    for _ in range(20):
        costs.observe(1, 0, 0.01)
    keeper.save_periodically()
    assert store.load() == {}
    now[0] = 1000.0
    keeper.save_periodically()
    assert store.load() == costs.table()
    # Nothing new: the file is left alone.
    store.path.unlink()
    now[0] = 2000.0
    keeper.save_periodically()
    assert store.load() == {}


def test_the_fingerprint_knows_the_model_from_others(tiny_models):
    prints = {family: fingerprint(model) for family, model in tiny_models.items()}
    assert len(set(prints.values())) == len(prints)
    model = tiny_models["qwen3_5"]
    assert fingerprint(model) == prints["qwen3_5"]
    changed = dataclasses.replace(model, config=model.config | {"quantization": {"bits": 4}})
    assert fingerprint(changed) != prints["qwen3_5"]
