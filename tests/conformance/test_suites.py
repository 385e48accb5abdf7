"""Other projects' API tests against a real server with MTP on the bundled model."""

from __future__ import annotations

import pytest

from tests.conformance.runner import Suite, differences, run, summary
from tests.conformance.suites import SUITES
from tests.harness import MEASURED


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_a_suite_ends_as_it_is_written_down(suite: Suite) -> None:
    outcome = run(suite)
    MEASURED.append(summary(suite, outcome))
    found = differences(suite, outcome)
    assert not found, "\n\n".join([*found, outcome.output])
