"""What chunks cost, measured while nobody asks."""

import itertools

import pytest

from mlx_mtp.calibration.chunks import ChunkCalibration
from mlx_mtp.config import EngineConfig
from mlx_mtp.engine.runner import ModelRunner
from mlx_mtp.speculative.drafter import MTPDrafter
from mlx_mtp.speculative.prefill_costs import PrefillCosts
from tests.tiny_models import VOCAB

LONGEST = 128


@pytest.fixture
def runner(tiny_models) -> ModelRunner:
    model = tiny_models["qwen3_next"]
    return ModelRunner(model, MTPDrafter(model), VOCAB)


def begun(costs: PrefillCosts, **settings) -> ChunkCalibration:
    """By a clock that moves a tenth of a second with each chunk."""
    config = EngineConfig(**({"calibration_seconds": 1e9, "max_decode_pause": 1e9} | settings))
    ticks = itertools.count()
    return ChunkCalibration(costs, config, lambda: 0.1 * next(ticks))


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [
        ({}, [16, 32, 64, 128]),
        ({"max_decode_pause": 50.0}, [16, 32]),  # which are measured in any case
        ({"max_decode_pause": 0.0}, []),
        ({"exact": True}, []),
        ({"calibration_seconds": 0.0}, []),
        ({"calibration_seconds": 1.0}, [16]),  # of which it has a part
    ],
)
def test_lengths_are_measured_as_far_as_they_are_used_and_time_allows(runner, settings, lengths):
    costs = PrefillCosts(LONGEST)
    work = begun(costs, **settings)
    while not work.over:
        work.step(runner)
        assert runner.batches.decoding is None and not runner.batches.ready
    assert not runner.batches.prefilling
    found = {length: length * unit for length, unit in costs.table()[0].items()}
    assert list(found) == lengths and found == pytest.approx(dict.fromkeys(lengths, 0.1))
    if settings == {}:
        # Longer ones take no more time here: the first prompt has them at once, beside rows too.
        assert costs.fastest(10_000) == LONGEST == costs.longest_within(0.12, 0)
        again = PrefillCosts(LONGEST)
        again.load(*costs.table())
        assert begun(again).over


def test_a_failure_or_the_threads_death_ends_it(runner, monkeypatch):
    dying = begun(PrefillCosts(LONGEST))
    with monkeypatch.context() as patch:
        patch.setattr(PrefillCosts, "observe", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dying.step(runner)
    monkeypatch.setattr(MTPDrafter, "propose", lambda *_: 1 / 0)
    failing = begun(PrefillCosts(LONGEST))
    failing.step(runner)
    assert dying.over and failing.over and not runner.batches.prefilling
