"""Several ranks answer as one does, as threads of this process and as processes."""

import itertools
import json
import os
import pickle
import queue
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_mtp.engine.follow import follow
from mlx_mtp.models.loader import load_model
from tests.engine.ranks import PROCESSES, answers
from tests.exchange import Exchange
from tests.tiny_models import FAMILIES, Layout, write_checkpoint

DEPTHS = (0, 1, 2, 3, "erratic")
KINDS = ("greedy", "sampled", "greedy grammars", "sampled grammars")
QUICK = {
    ("qwen3_next", "erratic", "sampled grammars"),
    ("qwen3_5", 3, "sampled"),
    ("qwen3_5_moe", 1, "greedy grammars"),
}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.full)
    for case in itertools.product(FAMILIES, DEPTHS, KINDS)
]


class Queue:
    """Both ends of a link between threads."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.own_done = self.nbytes = 0

    def send(self, message: object) -> None:
        self.messages.put(pickle.dumps(message))

    def receive(self) -> object:
        return pickle.loads(self.messages.get(timeout=60))

    def close(self) -> None:
        pass

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)


@pytest.mark.parametrize(("family", "depth", "kind"), CASES)
def test_ranks_answer_as_one(tmp_path, monkeypatch, references, ties, family, depth, kind):
    write_checkpoint(tmp_path, Layout(family, stacked_experts=family == "qwen3_5_moe"))
    models = [load_model(tmp_path, enable_mtp=True, part=(rank, 2)) for rank in range(2)]
    link = Queue()

    def work(rank: int):
        if rank:
            return follow(models[rank], "mtp", link)
        try:
            return answers(models[0], link, depth, kind)
        finally:
            link.send(None)

    wanted = references(family, kind)
    found, reused = Exchange(2, monkeypatch).run(work)[0]
    check(ties, wanted, found)
    assert reused > 50, "the second round begins with what the first has saved"


def test_processes_answer_as_one(tmp_path, references, ties):
    family, _, kind = PROCESSES
    write_checkpoint(tmp_path / family, Layout(family))
    ranks = ring(tmp_path, ["tests.engine.ranks", str(tmp_path)])
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    found, reused = json.loads((tmp_path / "answers.json").read_text())
    check(ties, references(family, kind), found)
    assert reused > 20


def check(ties, wanted, found) -> None:
    for name, tokens in found.items():
        ties.check(name, tokens, wanted[name.split()[1]])


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
