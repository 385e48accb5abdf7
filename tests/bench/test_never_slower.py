"""How the benchmark of all draft settings summarizes its rounds."""

import math

import pytest

from benchmarks.never_slower import _FIXED, _bounds, _Cell, _overall, _parsed, _summary
from mlx_mtp.errors import UsageError


def test_the_best_choice_is_picked_in_the_other_half_of_the_rounds():
    # "mtp 3" is fast only in every other round, by luck; "mtp 2" is equally fast in all rounds.
    rounds = [
        dict.fromkeys(_FIXED, 1.0)
        | {"default": 2.0, "mtp 2": 1.9, "mtp 3": 1.0 if number % 2 else 4.0}
        for number in range(8)
    ]
    row = _summary(_Cell("story", 4, False), rounds)
    assert row["best"] == "mtp 2 and mtp 3" and row["mtp 2"] == pytest.approx(1.9)
    assert row["over none"] == pytest.approx(2.0)
    # These rounds are compared with "mtp 2", the others with "mtp 3".
    assert row["over best"] == pytest.approx(math.sqrt(2.0 / 1.9 * 2.0))
    assert "story 4" in _overall([row, row])


def test_bounds_are_those_of_students_t():
    logs = [math.log(x) for x in (1.1, 1.2, 1.3, 1.25, 1.15, 1.2, 1.22, 1.18)]
    low, high = _bounds(logs)
    mean, spread = sum(logs) / 8, math.log(high / low) / 2
    deviation = math.sqrt(sum((x - mean) ** 2 for x in logs) / 7)
    assert spread == pytest.approx(2.3646 * deviation / math.sqrt(8), rel=5e-3)


@pytest.mark.parametrize("name", ["story", "story x", "nothing 4", "story 4 later"])
def test_a_wrong_cell_is_named(name):
    with pytest.raises(UsageError, match="is no cell"):
        _parsed(name)
    assert _parsed("agent 4 poisson").name == "agent 4 poisson"
