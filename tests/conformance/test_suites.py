"""Other projects' API tests against a real server with MTP on the bundled model."""

from __future__ import annotations

import pytest

from tests.conformance.runner import SUITES, Suite, differences, run
from tests.harness import MEASURED


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_a_suite_ends_as_it_is_written_down(suite: Suite) -> None:
    ended = run(suite)
    passed = list(ended["outcomes"].values()).count("passed")
    ran, left = len(ended["outcomes"]), len(ended["excluded"])
    MEASURED.append(f"{suite.name}: {passed} of {ran} passed, {left} left out")
    found = differences(suite, ended)
    assert not found, "\n\n".join([*found, ended["output"]])
