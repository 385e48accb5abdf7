"""The coding agents: how each is installed, configured, and run without a terminal."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clients.npm import HERE, environment

FOLDER = HERE / "agents"
VERSIONS: Mapping[str, str] = json.loads((FOLDER / "package.json").read_text())["dependencies"]
RUN_SECONDS = 1200
CODEX = ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


@dataclass(frozen=True)
class Agent:
    """A command-line agent; `name` is its name in `mlx-mtp connect`."""

    name: str
    package: str  # name on npm
    command: Callable[[str], list[str]]  # for a question; may use the shell tool without permission
    tool: str  # name of the shell tool
    parameter: str = "command"  # of the shell tool; takes the command line
    variables: Mapping[str, str] = field(default_factory=dict)  # besides `connect`'s configuration

    def __str__(self) -> str:
        return self.name

    @property
    def version(self) -> str:
        return VERSIONS[self.package]

    def call(self, line: str) -> dict[str, Any]:
        arguments = {self.parameter: line, "description": "Runs a command"}
        if self.name not in ("claude", "opencode"):
            del arguments["description"]
        return {"name": self.tool, "arguments": arguments}


AGENTS = (
    Agent("opencode", "opencode-ai", lambda q: ["opencode", "run", q], "bash"),
    # As root, Claude Code refuses to run with its permission checks switched off.
    Agent(
        "claude",
        "@anthropic-ai/claude-code",
        lambda q: ["claude", "-p", q, "--allowedTools", "Bash"],
        "Bash",
    ),
    Agent("codex", "@openai/codex", lambda q: [*CODEX, q], "exec_command", "cmd"),
    Agent(
        "continue",
        "@continuedev/cli",
        lambda q: ["cn", "-p", q, "--allow", "Bash"],
        "Bash",
        variables={"CONTINUE_TELEMETRY_ENABLED": "0"},
    ),
)


def run(
    agent: Agent, place: Path, url: str, home: Path, question: str
) -> subprocess.CompletedProcess[str]:
    """Configure an agent for the server at `url` with `connect --write`, and ask it something."""
    work = home / "project"
    work.mkdir(parents=True, exist_ok=True)
    environ = environment(place, home, **agent.variables)
    connect = [sys.executable, "-m", "mlx_mtp", "connect", agent.name, "--url", url, "--write"]
    quietly = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "env": environ}
    done = subprocess.run(connect, timeout=60, **quietly)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Wrote {home}")
    return subprocess.run(agent.command(question), cwd=work, timeout=RUN_SECONDS, **quietly)
