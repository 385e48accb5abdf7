"""Other projects' API tests against a real server with MTP on the bundled model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.adapters.suite_names import stands_for
from tests.conformance.sources import Package, directory
from tests.support.harness import MEASURED
from tests.support.process import MODEL

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_SECONDS = 3000
_NOT_PASSED_ON = ("MLX_MTP_", "PYTEST_", "SUITE_")
_QUIETLY = ("-q", "--timeout=120", "--tb=short")


@dataclass(frozen=True)
class Suite:
    """A selection of a project's tests, read from a file in `expected`."""

    name: str  # name of the file in `expected`
    source: Package
    passing: Sequence[str]  # cases that must pass, in the syntax of `stands_for`
    excluded: Mapping[str, str]  # cases that aren't run, each with the reason
    adapter: str  # the plugin that points them at a server of ours
    files: Sequence[str]  # arguments of pytest, relative to `folder` or the adapters
    folder: str = "."  # where pytest runs, relative to the source's directory
    paths: Sequence[str] = (".",)  # import paths, relative to `folder`
    model: str = MODEL  # the name by which the tests ask for a model
    arguments: Sequence[str] = ()  # further pytest arguments; ADAPTERS is the adapters' folder

    @classmethod
    def load(cls, path: Path) -> Suite:
        told = tomllib.loads(path.read_text("utf-8"))
        source = Package(**told["source"])
        return cls(path.stem, source, told["passing"], told["excluded"], **told["suite"])


SUITES = [Suite.load(path) for path in sorted((HERE / "expected").glob("*.toml"))]


def run(suite: Suite) -> dict[str, Any]:
    """Run all cases but the excluded ones; returns the report of `suite_outcomes`, and `output`."""
    folder = directory(suite.source) / suite.folder
    adapters = HERE / "adapters"
    with tempfile.TemporaryDirectory() as temporary:
        told = Path(temporary) / "outcomes.json"
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(_NOT_PASSED_ON)},
            "MLX_MTP_CACHE_DIR": temporary,
            "SUITE_EXCLUDED": json.dumps(list(suite.excluded)),
            "SUITE_OUTCOMES": str(told),
            "SUITE_MODEL": suite.model,
            "SUITE_ROOT": str(ROOT),
            "PYTHONPATH": os.pathsep.join(str(folder / p) for p in (adapters, *suite.paths)),
        }
        plugins = ["-p", "suite_outcomes", "-p", suite.adapter, "-p", "no:cacheprovider"]
        files = [str((adapters if f.startswith("suite_") else folder) / f) for f in suite.files]
        arguments = [word.replace("ADAPTERS", str(adapters)) for word in suite.arguments]
        command = [sys.executable, "-m", "pytest", *plugins, *arguments, *_QUIETLY, *files]
        quietly = {"capture_output": True, "text": True, "timeout": _SECONDS}
        process = subprocess.run(command, cwd=folder, env=environment, **quietly)
        output = process.stdout[-6000:] + process.stderr[-2000:]
        assert told.exists(), output
        return {**json.loads(told.read_text()), "output": output}


def differences(suite: Suite, ended: dict[str, Any]) -> list[str]:
    """Returns how the outcomes differ from the expected ones, one line per difference."""
    found = []
    for case, outcome in sorted(ended["outcomes"].items()):
        if outcome != "passed":
            found.append(f"{case} {outcome}: {ended['words'].get(case, '')}")
        elif not any(stands_for(name, case) for name in suite.passing):
            found.append(f"{case} passed, but stands in no list")
    for names, cases in ((suite.passing, "outcomes"), (suite.excluded, "excluded")):
        for name in names:
            if not any(stands_for(name, case) for case in ended[cases]):
                found.append(f"{name}: there is no such case")
    return found


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_a_suite_ends_as_it_is_written_down(suite: Suite) -> None:
    ended = run(suite)
    ran, left = len(ended["outcomes"]), len(ended["excluded"])
    MEASURED.append(f"{suite.name}: {ran} ran, {left} left out")
    found = differences(suite, ended)
    assert not found, "\n\n".join([*found, ended["output"]])
