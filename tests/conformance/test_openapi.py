"""Requests made from OpenAI's own OpenAPI description: each gets an answer that fits it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.sources import Repository, directory
from tests.conformance.test_suites import HERE
from tests.support.harness import MEASURED
from tests.support.process import MODEL, Server

OPENAPI = Repository(
    "openai-openapi",
    "https://github.com/openai/openai-openapi",
    "f85dbe223d40e1a31cba812ab2d755c7e98a92a3",
)
SECONDS = 90
_CHATS = "/chat/completions"
PATHS = (
    *(_CHATS, f"{_CHATS}/{{completion_id}}", f"{_CHATS}/{{completion_id}}/messages"),
    *("/completions", "/models", "/models/{model}", "/responses", "/responses/{response_id}"),
)
# The only operation that describes errors without the enclosing `error` object; OpenAI's servers
# don't send such errors.
LEFT_OUT = "deleteResponse"
# The description has no status for a refusal, so statuses are not compared.
CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance"


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_answer_fits_openais_description(mtp_server: Server, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    report = tmp_path / "report.json"
    program = Path(sys.executable).parent / "st"
    command = [str(program), "run", str(directory(OPENAPI) / "openapi.json")]
    command += ["--url", f"{mtp_server.url}/v1", "--checks", CHECKS, "--max-time", str(SECONDS)]
    command += ["--continue-on-failure", "--no-color", "--seed", "1", "--workers", "4"]
    command += ["--request-timeout", "60", "--generation-database", "none"]
    command += ["--suppress-health-check", "all", "--phases", "examples,coverage,fuzzing"]
    command += ["--report-json-path", str(report)]
    command += [word for path in PATHS for word in ("--include-path", path)]
    command += ["--exclude-operation-id", LEFT_OUT]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "suite_openapi", "SUITE_MODEL": MODEL}
    environment["PYTHONPATH"] = str(HERE / "adapters")
    how = {"capture_output": True, "text": True, "timeout": 3000}
    ended = subprocess.run(command, env=environment, cwd=tmp_path, **how)
    told = ended.stdout[-8000:] + ended.stderr[-2000:]
    assert report.exists(), told
    found = json.loads(report.read_text())
    assert not found["failures"], told
    # A bug of Python 3.11 that schemathesis sometimes hits while it generates requests.
    own = ended.stdout.count("AST constructor recursion depth mismatch")
    assert sum(error["count"] for error in found["errors"]) <= own, told
    cases = found["test_cases"]
    assert cases["generated"] > 200
    MEASURED.append(f"schemathesis with OpenAI's description, {SECONDS} s: {cases}")
