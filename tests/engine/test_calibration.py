"""Step costs: measured while nobody asks, kept, and never in the way."""

import dataclasses
import itertools
import json
import os

import pytest

from mlx_mtp.build import build_engine
from mlx_mtp.calibration import cost_file
from mlx_mtp.calibration.calibrator import (
    Calibration,
    Calibrator,
    Cell,
    cells_to_measure,
)
from mlx_mtp.calibration.chunks import ChunkCalibration
from mlx_mtp.calibration.cost_file import fingerprint
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine import engine as engine_module
from mlx_mtp.engine.core import EngineCore
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.speculative.costs import COPY, HEAD, StepCosts
from mlx_mtp.speculative.drafter import MTPDrafter
from mlx_mtp.speculative.prefill_costs import PrefillCosts
from tests.engine.test_engine import Client
from tests.harness import greedy, plain, request
from tests.tiny_models import VOCAB
from tests.waiting import wait_until

TABLE = {1: {HEAD: {0: 1.0, 3: 2.0}, COPY: {16: 3.0}}, 16: {HEAD: {0: 1.0}}}
CHUNKS = {64: 2e-4, 512: 1e-4}, 1e-9
MARK = "a" * 64
CELLS = [Cell(1, 0), Cell(1, 2), Cell(1, 16, COPY), Cell(3, 0), Cell(3, 1)]


@pytest.fixture
def runner(tiny_models) -> ModelRunner:
    model = tiny_models["qwen3_next"]
    return ModelRunner(model, MTPDrafter(model), VOCAB)


def keeper(folder, table=None, mark=MARK, **more) -> Calibrator:
    costs, chunks = StepCosts(), PrefillCosts(512)
    costs.load(table or {})
    chunks.load(*CHUNKS if table else ({}, 0.0))
    config = EngineConfig()
    return Calibrator(costs, ChunkCalibration(chunks, config), config, folder, mark, **more)


def measured(costs: StepCosts) -> set[Cell]:
    table = costs.table()
    return {Cell(n, x, s) for n, row in table.items() for s, curve in row.items() for x in curve}


def test_it_measures_step_by_step_and_begins_a_cell_anew_when_it_was_left(runner, monkeypatch):
    costs, texts, original = StepCosts(), set(), EngineCore.add

    def add(core, sequence):
        texts.add(sequence.prompt)
        if sequence.drafting.copier is not None:
            texts.add(tuple(sequence.drafting.copier.run))
        original(core, sequence)

    monkeypatch.setattr(EngineCore, "add", add)
    config = EngineConfig(calibration_seconds=3600.0, prefill_step_size=64)
    work = Calibration(costs, config, CELLS)
    for number in itertools.count():
        if work.over:
            break
        work.step(runner)
        if number % 29 == 28:  # A request comes.
            work.leave()
            assert not runner.batches.prefilling and not runner.batches.ready
            assert runner.batches.decoding is None
        assert number < 400
    assert measured(costs) == set(CELLS)
    # Equal tokens would share their experts, and cost less than those of requests.
    assert len(texts) == 4 and all(len(set(text)) > 4 for text in texts)
    assert all(seconds > 0 for row in costs.table()[1].values() for seconds in row.values())


def test_its_time_is_bounded_and_a_failure_ends_it(runner, monkeypatch):
    """By a clock that moves a tenth of a second each time it is read."""
    ticks, costs = itertools.count(), StepCosts()
    config = EngineConfig(calibration_seconds=8.0)
    work = Calibration(costs, config, CELLS, clock=lambda: 0.1 * next(ticks))
    while not work.over:
        work.step(runner)
    assert 8.0 < 0.1 * next(ticks) < 16.0  # a step reads it more than once
    calls, original = itertools.count(), MTPDrafter.propose

    def failing(self, *parts):
        if next(calls) == 20:
            raise MemoryError("no room")
        return original(self, *parts)

    monkeypatch.setattr(MTPDrafter, "propose", failing)
    costs = StepCosts()
    work = Calibration(costs, EngineConfig(calibration_seconds=3600.0), CELLS)
    while not work.over:
        work.step(runner)
    assert measured(costs) < set(CELLS)


def test_what_an_earlier_run_measured_is_not_measured_again_but_for_one_row():
    every = cells_to_measure({}, 32, (HEAD, COPY))
    known: dict = {}
    for rows, drafts, source in every:
        known.setdefault(rows, {}).setdefault(source, {})[drafts] = 1.0
    assert {cell.rows for cell in cells_to_measure(known, 32, (HEAD, COPY))} == {1}
    del known[4][HEAD][3]
    again = cells_to_measure(known, 32, (HEAD, COPY))
    assert {cell for cell in again if cell.rows == 4} == {cell for cell in every if cell.rows == 4}
    assert max(cell.rows for cell in cells_to_measure({}, 3, (HEAD, COPY))) == 2
    assert all(every.count(cell) == 3 for cell in every if cell.drafts)
    without = cells_to_measure({}, 32, (COPY,))
    assert {cell.drafts for cell in without if cell.source == HEAD} == {0}
    assert COPY not in {cell.source for cell in cells_to_measure({}, 32, (HEAD,))}
    for table, sources in (({}, (HEAD, COPY)), ({}, (COPY,)), (known, (HEAD,))):
        cells = cells_to_measure(table, 32, sources)
        assert all(one != following for one, following in itertools.pairwise(cells))
        # Each kind has plain steps of as many rows before and after it.
        for before, cell, behind in zip(cells, cells[1:], cells[2:]):
            plain = Cell(cell.rows, 0)
            assert cell == plain or before == behind == plain


def test_a_request_that_comes_meanwhile_waits_for_one_step_at_most(tiny_models):
    """Chunks are measured first, then decode steps."""
    model = tiny_models["qwen3_5"]
    config = EngineConfig(calibration_seconds=3600.0, prefill_step_size=64, max_decode_pause=1000.0)
    client = Client(build_engine(model, config, VOCAB, ()))
    steps, original = [], Calibrator.step

    def counted(self, *parts):
        steps.append(len(client.outputs))
        return original(self, *parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calibrator, "step", counted)
        patch.setattr(engine_module, "QUIET_SECONDS", 0.2)
        for number in range(3):
            enough = len(steps) + 5
            wait_until(lambda enough=enough: len(steps) >= enough or not client.engine.measuring)
            wanted = request(f"r{number}", [5, 6, 7], greedy(20, ignore_eos=True))
            client.engine.expect()
            before = len(steps)
            client.engine.submit(wanted)
            client.wait(wanted.request_id)
            assert tuple(client.tokens(wanted.request_id)) == plain(model, wanted, VOCAB).tokens
            # It may have been in a step when the request came, and goes on when that has ended.
            assert sum(told == number for told in steps[before:]) <= 2
    stats = client.engine.stats()
    client.engine.stop()
    assert (stats.prompt_tokens, stats.generation_tokens) == (9, 60)


def test_a_thread_that_dies_while_it_measures_is_restarted_once(tiny_models, monkeypatch):
    monkeypatch.setattr(engine_module, "QUIET_SECONDS", 0.0)
    config = EngineConfig(calibration_seconds=3600.0, prefill_step_size=64)
    monkeypatch.setattr(StepCosts, "observe", lambda *_: 1 / 0)
    client = Client(build_engine(tiny_models["qwen3_5"], config, VOCAB, ()))
    wait_until(lambda: client.engine.stats().num_restarts and not client.engine.measuring)
    monkeypatch.undo()
    client.engine.submit(request("r", [5, 6, 7], greedy(4)))
    client.wait("r")
    assert client.engine.stats().num_restarts == 1
    client.engine.stop()


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


def test_costs_learned_in_use_are_kept_and_a_bad_folder_or_file_hurts_nobody(
    serve, tiny_models, tmp_path, caplog
):
    serve(num_draft_tokens=2, calibration_seconds=9.0)
    assert list(tmp_path.iterdir()) == []  # A fixed depth measures and keeps nothing.
    serve(60)
    (kept,) = tmp_path.iterdir()
    mark = fingerprint(tiny_models["qwen3_5"])
    assert list(keeper(tmp_path, mark=mark).file.load().steps) == [1]
    kept.write_text("{")
    serve()
    assert json.loads(kept.read_text())["steps"]
    serve(folder=kept / "folder")
    assert "Step costs are not kept" in caplog.text


def test_costs_of_other_models_and_draft_vocabularies_are_kept_apart(tiny_models):
    model = tiny_models["qwen3_5"]
    changed = dataclasses.replace(model, config=model.config | {"quantization": {"bits": 4}})
    marks = {fingerprint(each) for each in (*tiny_models.values(), changed)}
    marks |= {fingerprint(model, 20), fingerprint(model, 30), fingerprint(model, None, ("other",))}
    assert len(marks) == len(tiny_models) + 4


def test_files_are_replaced_whole_now_and_then_and_damaged_or_foreign_ones_are_ignored(
    tmp_path, caplog, monkeypatch
):
    now = [0.0]
    kept = keeper(tmp_path / "not" / "there", TABLE, clock=lambda: now[0])
    path = kept.file.path
    kept.save_periodically()
    assert not any(kept.file.load())
    with monkeypatch.context() as patch:
        patch.setattr(cost_file.os, "replace", lambda source, target: os.stat("missing"))
        kept.save()
    assert os.listdir(path.parent) == []
    now[0] = 1000.0
    kept.save_periodically()
    assert os.listdir(path.parent) == [path.name]
    assert kept.file.load() == (TABLE, *CHUNKS)
    assert keeper(tmp_path / "not" / "there", mark=MARK[:-1] + "b").file.load() == ({}, {}, 0.0)
    good = path.read_text()
    damaged = [good[: len(good) // 2], "", "[1, 2]", "[" * 100_000, "null", "{}", "\0"]
    row = {"mtp": {"0": 1.0}}
    steps = [[], {"1": 3}, {"1": {"mtp": 3}}, {"one": row}, {"0": row}, {"1": {"mtp": {"-1": 1}}}]
    steps.append({"1" + "0" * 400: row})  # more than a float holds
    bad = (0.0, 1e-300, 1e300, float("nan"), float("inf"), "fast")
    steps += [{"1": {"mtp": {"0": value}}} for value in bad]
    changes = [{"format": 0}, {"fingerprint": "c" * 64}, {"saved_at": "yesterday"}]
    changes += [{"saved_at": 0.0}, {"saved_at": 1e12}, *({"steps": each} for each in steps)]
    changes += [{"chunks": {"64": value}} for value in bad] + [{"per_context": -1.0}]
    damaged += [json.dumps(json.loads(good) | change) for change in changes]
    damaged.append(good + " " * cost_file._LARGEST)
    path.unlink()
    for content in (None, *(text.encode() for text in damaged), b"\xff\xfe\x00"):
        if content is None:
            os.mkfifo(path)  # whose reader would wait for ever
        else:
            path.unlink()
            path.write_bytes(content)
        caplog.clear()
        assert not any(kept.file.load()), content and content[:80]
        assert str(path) in caplog.text and "_File" not in caplog.text
