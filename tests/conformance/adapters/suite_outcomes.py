"""Leaves out the excluded cases, and records the outcomes of the others."""

import json
import os
from pathlib import Path

import pytest
from suite_names import stands_for

_ORDER = ("passed", "skipped", "failed")
_excluded: list[str] = json.loads(os.environ["SUITE_EXCLUDED"])
_outcomes: dict[str, str] = {}
_words: dict[str, str] = {}
_left_out: list[str] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = []
    for item in items:
        is_excluded = any(stands_for(name, item.nodeid) for name in _excluded)
        (_left_out if is_excluded else kept).append(item.nodeid if is_excluded else item)
    items[:] = kept


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome = report.outcome
    before = _outcomes.get(report.nodeid, "passed")
    _outcomes[report.nodeid] = max(before, outcome, key=_ORDER.index)
    if outcome != "passed":
        _words[report.nodeid] = str(report.longrepr)[-2000:]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome == "failed":
        _outcomes[report.nodeid] = "failed"
        _words[report.nodeid] = str(report.longrepr)[-2000:]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    told = {"outcomes": _outcomes, "words": _words, "excluded": _left_out}
    Path(os.environ["SUITE_OUTCOMES"]).write_text(json.dumps(told))
