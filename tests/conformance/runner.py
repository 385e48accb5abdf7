"""Runs a downloaded suite and compares how its cases end with what is written down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

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
        name: of the list of expected outcomes: `passing` and `excluded` cases, these with reasons.
            Without parameters, a name stands for all of a test's cases.
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

    @cached_property
    def expected(self) -> dict[str, Any]:
        return tomllib.loads((HERE / "expected" / f"{self.name}.toml").read_text("utf-8"))


def run(suite: Suite) -> dict[str, Any]:
    """Run all cases but the excluded ones.

    Returns:
        `outcomes`: "passed", "failed" or "skipped" for each case that ran; `words`: the end of what
        pytest said of those that did not pass; `excluded`: the cases that were left out; `output`.
    """
    folder = directory(suite.source) / suite.folder
    adapters = HERE / "adapters"
    with tempfile.TemporaryDirectory() as temporary:
        told = Path(temporary) / "outcomes.json"
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(_NOT_PASSED_ON)},
            "MLX_MTP_CACHE_DIR": temporary,
            "SUITE_EXCLUDED": json.dumps(list(suite.expected["excluded"])),
            "SUITE_OUTCOMES": str(told),
            "SUITE_MODEL": suite.model,
            "SUITE_ROOT": str(ROOT),
            "PYTHONPATH": os.pathsep.join(
                map(str, [adapters, *(folder / path for path in suite.paths)])
            ),
        }
        plugins = ["-p", "suite_outcomes", "-p", suite.adapter, "-p", "no:cacheprovider"]
        files = [str((adapters if f.startswith("suite_") else folder) / f) for f in suite.files]
        command = [sys.executable, "-m", "pytest", *plugins, *suite.arguments, *_QUIETLY, *files]
        process = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
        output = process.stdout[-6000:] + process.stderr[-2000:]
        assert told.exists(), output
        return {**json.loads(told.read_text()), "output": output}


def differences(suite: Suite, ended: dict[str, Any]) -> list[str]:
    """How the outcomes differ from what is written down, a line each."""
    passing, excluded, found = suite.expected["passing"], suite.expected["excluded"], []
    for case, outcome in sorted(ended["outcomes"].items()):
        if outcome != "passed":
            found.append(f"{case} {outcome}: {ended['words'].get(case, '')}")
        elif not any(stands_for(name, case) for name in passing):
            found.append(f"{case} passed, but stands in no list")
    for name in passing:
        if not any(stands_for(name, case) for case in ended["outcomes"]):
            found.append(f"{name} is to pass, but did not run")
    for name in excluded:
        if not any(stands_for(name, case) for case in ended["excluded"]):
            found.append(f"{name} is excluded, but there is no such case")
    return found
