"""How the benchmark of the policy's estimates sums up what came of them."""

import itertools
import random
from xml.etree import ElementTree

import pytest

from benchmarks.calibrated import (
    _ACCEPTANCES,
    _LAST,
    _MATCHES,
    _POSITIONS,
    _Draft,
    _of_drafts,
    _Step,
    _svg,
    calibrated,
    of_steps,
)
from mlx_mtp.speculative.costs import StepShape


def test_true_estimates_lie_on_the_diagonal():
    chance = random.Random(1)
    estimates = [chance.random() for _ in range(20_000)]
    drafts = [_Draft("head", each, chance.random() < each, 1, 0, -1.0) for each in estimates]
    drafts += [_Draft("copies", 0.75, False, 7, 3, 0.4)] * 40
    *of_head, of_copies = _of_drafts(drafts, _ACCEPTANCES, lambda each: each.estimated)
    assert sum(point.number for point in of_head) == len(estimates)
    for point in of_head:
        assert point.measured == pytest.approx(point.estimated, abs=0.04)
    assert of_copies == ("copies", "0.7 to 0.8", 40, 0.75, 0.0)
    _, of_copies = _of_drafts(drafts, _POSITIONS, lambda each: each.position)
    assert of_copies == ("copies", "5 to 8", 40, 0.75, 0.0)
    of_copies = [*_of_drafts(drafts[-40:], _MATCHES, lambda each: each.match)]
    assert of_copies == [("copies", "3", 40, 0.75, 0.0)]
    of_copies = [*_of_drafts(drafts[-40:], _LAST, lambda each: each.last)]
    assert of_copies == [("copies", "half", 40, 0.75, 0.0)]


def test_costs_are_relative_to_those_of_steps_of_as_many_rows():
    steps = [
        _Step(source, StepShape(rows, drafts, 0, drafts / rows), rows * cost * wrong / 100, cost)
        for rows in (2, 4)
        for source, drafts, cost, wrong in (
            *[("head", 0, 1.0, 1.0)] * 60,
            *[("head", 2 * rows, 1.5, 1.0)] * 50,
            *[("copies", 4 * rows, 2.0, 1.25)] * 40,
        )
    ]
    found = {point[:3]: point[3:] for point in of_steps(steps)}
    for rows in (2, 4):
        assert found["head", f"{rows} x 1", 60] == pytest.approx((1.0, 1.0))
        assert found["head", f"{rows} x 3", 50] == pytest.approx((1.5, 1.5))
        assert found["copies", f"{rows} x 5 to 8", 40] == pytest.approx((2.0, 2.5))
    points = [*of_steps(steps)]
    picture = ElementTree.fromstring(_svg(("of drafts", 1.0, []), ("of steps", 4.0, points)))
    assert len(picture.findall("{*}circle")) == len(points) + 2  # and the legend


@pytest.mark.full
def test_estimates_and_outcomes_of_a_run(tmp_path):
    file = tmp_path / "estimates.svg"
    rows = [*calibrated(work=("same",), streams=(4,), rounds=4, picture=file)]
    drafts = [each for each in rows if isinstance(each, dict) and "drafts" in each]
    for group, source in (
        *itertools.product(("acceptance", "position"), ("head", "copies")),
        ("match", "copies"),
        ("last run", "copies"),
    ):
        own = [each for each in drafts if each["source"] == source and group in each]
        expected, right = (
            sum(each[name] * each["drafts"] for each in own) for name in ("estimated", "measured")
        )
        assert 0.7 < right / expected < 1.4
    assert file.stat().st_size > 1000
