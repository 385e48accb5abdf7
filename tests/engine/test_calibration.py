"""Step costs are measured while the engine is idle, kept in a file, and delay no request."""

import dataclasses
import itertools
import json
import os
import time

import pytest

from mlx_mtp.build import build_engine
from mlx_mtp.calibration import calibrator as calibrator_module
from mlx_mtp.calibration import cost_file
from mlx_mtp.calibration.calibrator import Calibrator, steps_to_measure
from mlx_mtp.calibration.cost_file import CostFile, fingerprint
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine import engine as engine_module
from mlx_mtp.engine.chunk_costs import CHUNK, CONTEXT, PrefillCosts
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.engine.scheduler import Scheduler
from mlx_mtp.speculative.costs import HOST, MTP, RAGGED, SYNC, CostKey, StepCosts
from mlx_mtp.speculative.drafter import MTPDrafter
from tests.engine.test_engine import Client
from tests.support.harness import curve, greedy, plain, request
from tests.support.tiny_models import VOCAB
from tests.support.waiting import wait_until

STEPS = curve(MTP, 1, {0: 1.0, 3: 2.0}) | curve(HOST, 1, {16: 3.0}) | curve(MTP, 16, {0: 1.0})
CHUNKS = curve(CHUNK, 1, {64: 2e-4, 128: 1e-4}) | curve(CONTEXT, 1, {1: 1e-9})
MARK = "a" * 64
CELLS = [CostKey(MTP, 1, 0), CostKey(MTP, 1, 2), CostKey(MTP, 1, 0), CostKey(HOST, 1, 16)]
CELLS += [CostKey(MTP, 1, 0), CostKey(MTP, 3, 0), CostKey(RAGGED, 3, 16), CostKey(MTP, 3, 0)]
CELLS += [CostKey(MTP, 3, 1), CostKey(MTP, 3, 0), CostKey(SYNC, 3, 0), CostKey(MTP, 3, 0)]
LONGEST = 128


@pytest.fixture
def runner(tiny_models) -> ModelRunner:
    model = tiny_models["qwen3_next"]
    return ModelRunner(model, MTPDrafter(model), VOCAB)


class Calibration(Calibrator):
    """A calibrator with its own costs and given cells of steps; by default without a time limit."""

    def __init__(self, cells=(), folder=None, mark=MARK, table=None, clock=None, **settings):
        self.steps, self.chunks = StepCosts(), PrefillCosts(LONGEST)
        settings = {"calibration_seconds": 1e9, "prefill_step_size": LONGEST} | settings
        clock = {} if clock is None else {"clock": clock}
        config = EngineConfig(**settings)
        super().__init__(self.steps, self.chunks, config, folder, mark, **clock)
        self._cells = [cell for cell in self._cells if cell.kind == CHUNK] + [*cells]
        for each in (self.steps, self.chunks) if table else ():
            each.load_table(table)

    def run(self, runner) -> set[CostKey]:
        """Measure everything; returns the measured cells."""
        while self.busy:
            self.step(runner)
        return {*self.steps.table(), *self.chunks.table()}


def ticking(seconds: float):
    """Returns a clock that moves by `seconds` each time it is read."""
    ticks = itertools.count()
    return lambda: seconds * next(ticks)


def test_it_measures_step_by_step_and_begins_a_cell_anew_when_it_was_left(runner, monkeypatch):
    texts, original = set(), Scheduler.add

    def add(scheduler, sequence):
        texts.add(sequence.prompt)
        texts.update(tuple(drafter.next_run) for drafter in sequence.drafting.host.values())
        original(scheduler, sequence)

    monkeypatch.setattr(Scheduler, "add", add)
    work = Calibration(CELLS)
    for number in itertools.count():
        if not work.busy:
            break
        work.step(runner)
        if number % 29 == 28:  # A request arrives.
            work.pause()
            assert not runner.batches.prefilling and not runner.batches.ready
            assert runner.batches.decoding is None
        assert number < 400
    table = work.steps.table()
    assert {*table} == set(CELLS)
    # Equal tokens would choose the same experts, and cost less than the tokens of real requests.
    assert len(texts) == 6 and all(len(set(text)) > 4 for text in texts)
    assert all(seconds > 0 for seconds in table.values())


@pytest.mark.parametrize(
    ("settings", "tick", "lengths"),
    [
        ({"max_decode_pause": 1e9}, None, [16, 32, 64, 128]),
        ({"max_decode_pause": 1e-6}, None, [16, 32]),  # always measured
        ({"max_decode_pause": 0.0}, None, []),
        ({"max_decode_pause": 1e9, "exact": True}, None, []),
        ({"max_decode_pause": 1e9, "calibration_seconds": 0.0}, None, []),
        # Chunks get a quarter of the time; measuring one reads the clock 5 to 10 times.
        ({"max_decode_pause": 1e9, "calibration_seconds": 12.0}, 0.1, [16]),
    ],
)
def test_chunks_are_measured_as_far_as_they_are_used_and_time_allows(
    runner, settings, tick, lengths
):
    work = Calibration(clock=tick and ticking(tick), **settings)
    assert sorted(cell.size for cell in work.run(runner)) == lengths
    assert not runner.batches.all
    if lengths == [16, 32, 64, 128]:
        assert not Calibration(table=work.chunks.table(), **settings).run(runner) - {
            *work.chunks.table()
        }


def test_rounds_in_which_two_steps_end_or_none_are_averaged(runner, monkeypatch):
    """Every step takes 10 ms, but the host sees 4 and 16 ms, in turns."""
    observe, rounds = calibrator_module._CellDrafts.observe, itertools.cycle((0.004, 0.016))

    def uneven(drafts, head, shape, seconds):
        observe(drafts, head, shape, None if seconds is None else next(rounds))

    monkeypatch.setattr(calibrator_module._CellDrafts, "observe", uneven)
    work = Calibration(CELLS[:5], max_decode_pause=0.0)
    assert work.run(runner) == {*CELLS[:5]}
    assert list(work.steps.table().values()) == pytest.approx([0.01] * 3)


def test_its_time_is_bounded_and_a_failure_ends_what_is_like_it(runner, monkeypatch):
    clock = ticking(0.1)
    work = Calibration(CELLS, calibration_seconds=8.0, clock=clock)
    work.run(runner)
    assert 8.0 < clock() < 16.0  # a step reads the clock more than once
    calls, original = itertools.count(), MTPDrafter.propose

    def failing(self, *parts):
        if next(calls) == 20:
            raise MemoryError("no room")
        return original(self, *parts)

    monkeypatch.setattr(MTPDrafter, "propose", failing)
    measured = Calibration(CELLS, max_decode_pause=1e9).run(runner)
    assert {cell.kind for cell in measured} >= {CHUNK} and not measured >= set(CELLS)
    monkeypatch.setattr(PrefillCosts, "observe", lambda *_: 1 / 0)
    dying = Calibration(CELLS, max_decode_pause=1e9)
    with pytest.raises(ZeroDivisionError):
        dying.step(runner)
    dying.reset()
    assert not dying.busy


def test_what_an_earlier_run_measured_is_not_measured_again():
    both = (MTP, HOST)
    every = steps_to_measure({}, 32, both)
    known = dict.fromkeys(every, 1.0)
    assert steps_to_measure(known, 32, both) == []
    del known[CostKey(MTP, 4, 3)]
    again = steps_to_measure(known, 32, both)
    assert {cell for cell in again if cell.rows == 4} == {cell for cell in every if cell.rows == 4}
    assert max(cell.rows for cell in steps_to_measure({}, 3, both)) == 2
    assert all(every.count(cell) == 3 for cell in every if cell.size)
    assert {cell.size for cell in steps_to_measure({}, 32, (HOST,)) if cell.kind == MTP} == {0}
    assert HOST not in {cell.kind for cell in steps_to_measure({}, 32, (MTP,))}
    for table, kinds in (({}, both), ({}, (HOST,)), (known, (MTP,))):
        cells = steps_to_measure(table, 32, kinds)
        assert all(one != following for one, following in itertools.pairwise(cells))
        # Each drafting cell has plain steps of the same number of rows before and after it.
        for before, cell, behind in zip(cells, cells[1:], cells[2:]):
            plain = CostKey(MTP, cell.rows, 0)
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
            client.engine.expect_request()
            before = len(steps)
            client.engine.submit(wanted)
            client.wait(wanted.request_id)
            assert tuple(client.tokens(wanted.request_id)) == plain(model, wanted, VOCAB).tokens
            # A calibration step can be running when the request arrives, and another can follow.
            assert sum(told == number for told in steps[before:]) <= 2
    stats = client.engine.stats()
    client.engine.stop()
    assert (stats.prompt_tokens, stats.generation_tokens) == (9, 60)


def test_a_thread_that_dies_while_it_measures_is_restarted_once(tiny_models, monkeypatch):
    monkeypatch.setattr(engine_module, "QUIET_SECONDS", 0.0)
    config = EngineConfig(calibration_seconds=3600.0, prefill_step_size=64)
    monkeypatch.setattr(calibrator_module, "typical_costs", lambda *_: 1 / 0)
    client = Client(build_engine(tiny_models["qwen3_5"], config, VOCAB, ()))
    wait_until(lambda: client.engine.stats().num_restarts and not client.engine.measuring)
    monkeypatch.undo()
    client.engine.submit(request("r", [5, 6, 7], greedy(4)))
    client.wait("r")
    assert client.engine.stats().num_restarts == 1
    client.engine.stop()


@pytest.fixture
def serve(tiny_models, tmp_path):
    """A function that starts an engine with a cost folder, answers a request and stops it."""

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
    assert list(tmp_path.iterdir()) == []  # Nothing is measured or kept at a fixed depth.
    serve(60)
    (kept,) = tmp_path.iterdir()
    mark = fingerprint(tiny_models["qwen3_5"], None, ("mtp", "copy"))
    assert {cell.rows for cell in CostFile(tmp_path, mark).load()} == {1}
    kept.write_text("{")
    serve()
    assert json.loads(kept.read_text())
    serve(folder=kept / "folder")
    assert "Step costs are not kept" in caplog.text


def test_costs_of_other_models_and_draft_vocabularies_are_kept_apart(tiny_models):
    model = tiny_models["qwen3_5"]
    changed = dataclasses.replace(model, config=model.config | {"quantization": {"bits": 4}})
    marks = {fingerprint(each, None, ("mtp",)) for each in (*tiny_models.values(), changed)}
    more = ((20, ("mtp",)), (30, ("mtp",)), (None, ("other",)))
    marks |= {fingerprint(model, *settings) for settings in more}
    assert len(marks) == len(tiny_models) + 4


def test_files_are_replaced_whole_now_and_then_and_damaged_or_foreign_ones_are_ignored(
    tmp_path, caplog, monkeypatch
):
    now, folder, table = [0.0], tmp_path / "not" / "there", STEPS | CHUNKS
    kept = Calibration(folder=folder, table=table, clock=lambda: now[0])
    path = kept.file.path
    kept.save_periodically()
    assert not kept.file.load()
    with monkeypatch.context() as patch:
        patch.setattr(cost_file.os, "replace", lambda source, target: os.stat("missing"))
        kept.save()
    assert os.listdir(path.parent) == []
    now[0] = 1000.0
    kept.save_periodically()
    assert os.listdir(path.parent) == [path.name]
    assert kept.file.load() == table
    again = Calibration(folder=folder)
    assert again.steps.table() == STEPS and again.chunks.table() == CHUNKS
    assert CostFile(folder, "b" + MARK[1:]).load() == {}
    good, month = path.read_text(), 30 * 24 * 3600.0
    for age, count in ((0.9 * month, len(table)), (1.1 * month, 0), (-1.1 * month, 0)):
        os.utime(path, (0.0, time.time() - age))
        assert len(kept.file.load()) == count
    damaged = [good[: len(good) // 2], "", "[1, 2]", "[" * 100_000, "null", "{}", "\0", "3", "[3]"]
    costs = [["mtp", 1, 0], ["mtp", "one", 0, 1.0], ["mtp", 0, 0, 1.0], ["mtp", 1, -1, 1.0]]
    costs += [["mtp", 10**400, 0, 1.0]]  # more than a float holds
    bad = (0.0, 1e-300, 1e300, float("nan"), float("inf"), "fast")
    costs += [[kind, 1, 16, value] for kind in (MTP, CHUNK, CONTEXT) for value in bad]
    damaged += [json.dumps([*json.loads(good), each]) for each in costs]
    damaged.append(good + " " * cost_file._LARGEST)
    path.unlink()
    for content in (None, *(text.encode() for text in damaged), b"\xff\xfe\x00"):
        if content is None:
            os.mkfifo(path)  # reading it would block forever
        else:
            path.unlink()
            path.write_bytes(content)
        caplog.clear()
        assert not kept.file.load(), content and content[:80]
        assert str(path) in caplog.text and "pydantic" not in caplog.text
