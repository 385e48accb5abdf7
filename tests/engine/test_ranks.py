"""Several processes on this machine, joined by mlx's ring, answer as one process does."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.engine.ranks import CASES
from tests.tiny_models import FAMILIES, Layout, write_checkpoint


def ring(tmp_path: Path, argv: list[str], size: int = 2) -> list[subprocess.Popen[str]]:
    """Start a process for each rank, as mlx.launch does."""
    hosts, socks = tmp_path / "hosts.json", [socket.socket() for _ in range(size)]
    for each in socks:
        each.bind(("127.0.0.1", 0))
    hosts.write_text(json.dumps([[f"127.0.0.1:{each.getsockname()[1]}"] for each in socks]))
    for each in socks:
        each.close()
    environ = {**os.environ, "MLX_HOSTFILE": str(hosts)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [
        subprocess.Popen(
            [sys.executable, "-m", *argv], env={**environ, "MLX_RANK": str(rank)}, **pipes
        )
        for rank in range(size)
    ]


def test_two_ranks_answer_as_one(tmp_path, references, ties):
    for family in FAMILIES:
        layout = Layout(family, stacked_experts=family == "qwen3_5_moe")
        write_checkpoint(tmp_path / family, layout)
    result = tmp_path / "answers.json"
    ranks = ring(tmp_path, ["tests.engine.ranks", str(tmp_path), str(result)])
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    for (family, _, kind, _), (answers, reused) in zip(CASES, json.loads(result.read_text())):
        assert reused > 50, "the second round begins with what the first has saved"
        for name, tokens in answers.items():
            ties.check(f"{family} {name}", tokens, references(family, kind)[name.split()[1]])
