"""The bundled model in a server process, measured over HTTP; and what `make bench` starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.concurrency import contenders
from mlx_mtp import cli
from mlx_mtp.bench.tables import NOTHING
from tests.bench.test_commands import table_of
from tests.process import Server, running

# So many tokens that they don't come in one piece, however late they are read.
FEW = ("--rounds", "1", "--max-tokens", "64", "--seed", "3")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--enable-mtp", "--mtp-num-draft-tokens", "3", "--api-key", "k") as server:
        yield server


def test_latency(server, capsys, tmp_path):
    command = ["bench", "latency", server.url, *FEW, "--prompts", "story,short"]
    written = tmp_path / "a.json"
    assert cli.main([*command, "--api-key", "k", "--json", str(written)], {}) == 0
    out = capsys.readouterr().out
    _, story, short = table_of(out)
    assert NOTHING not in (*story.values(), *short.values())
    assert 10 < int(story[1]) < 60
    # The server counts in each chunk, so nothing is estimated.
    assert "Note" not in out
    content = json.loads(written.read_text())
    assert [s["split"] for s in content["summaries"]] == ["told", "told"]
    for wave in content["waves"]:
        (answer,) = wave["answers"]
        assert sum(answer["tokens"]) in (answer["num_tokens"], answer["num_tokens"] - 1)
        assert len(answer["times"]) < answer["num_tokens"]
        assert 0 < answer["num_accepted"] <= answer["num_drafts"]


def test_concurrency(server, capsys):
    command = ["bench", "concurrency", server.url, *FEW, "--prompts", "story"]
    assert cli.main([*command, "--concurrency", "1,3"], {"MLX_MTP_API_KEY": "k"}) == 0
    _, one, three = table_of(capsys.readouterr().out)
    assert (one[0], three[0]) == ("1", "3")
    assert NOTHING not in (*one.values(), *three.values())


def test_a_key_that_is_missing(server, capsys):
    assert cli.main(["bench", "latency", server.url], {}) == 1
    assert "--api-key" in capsys.readouterr().err


def test_the_contenders_of_make_bench_can_be_started(tmp_path):
    first, off, *mtp = contenders(tmp_path)
    assert first.name == "mlx_lm.server"
    assert (tmp_path / "float32" / "config.json").is_file()
    assert [c.name for c in mtp] == [*(f"MTP, k = {k}" for k in (1, 2, 3)), "MTP, auto"]
    for contender in (off, *mtp):
        start_of_ours = contender.command.index("mlx_mtp") + 1
        given = cli._parser().parse_args(contender.command[start_of_ours:])
        assert given.command == "serve"
        assert getattr(given, "enable_mtp", False) == (contender is not off)


@pytest.mark.full
def test_make_bench():
    command = [sys.executable, "-m", "benchmarks.concurrency", *FEW, "--concurrency", "1,2"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    header, *rows = table_of(done.stdout)
    assert list(header.values()) == ["server", "1 at once", "2 at once", "drafts accepted"]
    assert len(rows) == 6
