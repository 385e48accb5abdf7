"""Runs a downloaded suite and compares how its cases end with what is written down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance.adapters.suite_names import stands_for
from tests.conformance.sources import Source, directory

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL = "mlx-mtp-demo"
_SECONDS = 3000
_NOT_PASSED_ON = ("MLX_MTP_", "PYTEST_", "SUITE_")
_QUIETLY = ("-q", "--timeout=120", "--tb=short")


@dataclass(frozen=True)
class Suite:
    """Some of a project's tests.

    Args:
        name: of the list of expected outcomes.
        source: where the tests come from.
        adapter: the plugin that points them at a server of ours.
        files: what pytest is given, below the source's directory.
        folder: where pytest runs, below the source's directory.
        paths: of imports, below that folder.
        model: the name by which the tests ask for a model.
        arguments: more of pytest's.
    """

    name: str
    source: Source
    adapter: str
    files: tuple[str, ...]
    folder: str = "."
    paths: tuple[str, ...] = (".",)
    model: str = MODEL
    arguments: tuple[str, ...] = ()

    @property
    def excluded(self) -> dict[str, str]:
        """Cases that aren't run, each with its reason."""
        return self._lists["excluded"]

    @property
    def passing(self) -> list[str]:
        """Cases that must pass; without parameters, a name stands for all of a test's cases."""
        return self._lists["passing"]

    @property
    def _lists(self) -> dict:
        return tomllib.loads((HERE / "expected" / f"{self.name}.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Outcome:
    """How a suite ended.

    Args:
        outcomes: "passed", "failed" or "skipped" for each case that ran.
        words: the end of what pytest said of those that did not pass.
        excluded: the cases that were left out.
        output: the end of all of pytest's words.
    """

    outcomes: dict[str, str]
    words: dict[str, str]
    excluded: list[str]
    output: str = field(repr=False)


def run(suite: Suite) -> Outcome:
    """Run all cases but the excluded ones."""
    source = directory(suite.source)
    folder = source / suite.folder
    adapters = HERE / "adapters"
    paths = [adapters, *(folder / path for path in suite.paths)]
    with tempfile.TemporaryDirectory() as temporary:
        told = Path(temporary) / "outcomes.json"
        environment = {
            **{
                k: v
                for k, v in os.environ.items()
                if not k.startswith(("MLX_MTP_", "PYTEST_", "SUITE_"))
            },
            "MLX_MTP_CACHE_DIR": temporary,
            "SUITE_EXCLUDED": json.dumps(list(suite.excluded)),
            "SUITE_OUTCOMES": str(told),
            "SUITE_MODEL": suite.model,
            "SUITE_ROOT": str(ROOT),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        }
        plugins = ["-p", "suite_outcomes", "-p", suite.adapter, "-p", "no:cacheprovider"]
        files = [str((adapters if f.startswith("suite_") else folder) / f) for f in suite.files]
        command = [sys.executable, "-m", "pytest", *plugins, *suite.arguments, *_QUIETLY, *files]
        process = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
        output = process.stdout[-6000:] + process.stderr[-2000:]
        assert told.exists(), output
        return Outcome(**json.loads(told.read_text()), output=output)


def differences(suite: Suite, outcome: Outcome) -> list[str]:
    """How the outcome differs from what is written down, a line each."""
    found = []
    for case, ended in sorted(outcome.outcomes.items()):
        listed = any(stands_for(name, case) for name in suite.passing)
        if ended != "passed":
            found.append(f"{case} {ended}: {outcome.words.get(case, '')}")
        elif not listed:
            found.append(f"{case} passed, but stands in no list")
    for name in suite.passing:
        if not any(stands_for(name, case) for case in outcome.outcomes):
            found.append(f"{name} is to pass, but did not run")
    for name in suite.excluded:
        if not any(stands_for(name, case) for case in outcome.excluded):
            found.append(f"{name} is excluded, but there is no such case")
    return found


def summary(suite: Suite, outcome: Outcome) -> str:
    """How many passed, and how many were left out."""
    passed = list(outcome.outcomes.values()).count("passed")
    ran, left = len(outcome.outcomes), len(outcome.excluded)
    return f"{suite.name}: {passed} of {ran} passed, {left} left out"
