"""The figures beside the bundled models: they meet the goals, agree, and are in the README."""

import json

import pytest

from demo_model.report import disagreements, shortcomings, table
from tests.conftest import DEMO, DENSE_DEMO

MAX_BYTES = 40_000_000


def evaluation(directory):
    return json.loads((directory / "metrics.json").read_text())["evaluation"]


def test_the_bundled_model_meets_every_goal():
    """Exact match, the worst task, acceptance of open text and its fall with depth."""
    assert shortcomings(evaluation(DEMO)["torch"]) == []
    assert shortcomings(evaluation(DEMO)["engine"]) == []


@pytest.mark.parametrize("directory", [DEMO, DENSE_DEMO], ids=["moe", "dense"])
def test_pytorch_and_the_engine_agree(directory):
    found = evaluation(directory)
    assert disagreements(found["torch"], found["engine"]) == []
    assert table(found) in (directory / "README.md").read_text(encoding="utf-8")


def test_something_hidden_is_found_as_far_as_it_was_trained():
    recall = evaluation(DEMO)["engine"]["recall"]
    assert {"256", "3900"} <= recall.keys()
    assert all(share >= 0.95 for length, share in recall.items() if int(length) <= 3900)


def test_both_models_together_are_small():
    files = [path for each in (DEMO, DENSE_DEMO) for path in each.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_BYTES
