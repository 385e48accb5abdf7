"""`mlx-mtp bench` as a whole: what is printed, what is written, and how it fails."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import subprocess
import sys

import pytest

from mlx_mtp import cli
from mlx_mtp.bench import plot
from mlx_mtp.bench.answer import Split
from mlx_mtp.bench.stats import Summary
from mlx_mtp.bench.tables import contenders_table, footnotes, render
from tests.bench.fake_server import (
    DONE,
    MODEL,
    FakeServer,
    Reply,
    closing,
    end,
    piece,
    plain_stream,
    refusal,
)

FEW = ("--rounds", "2", "--max-tokens", "4", "--seed", "11")


@pytest.fixture
def bench(capsys):
    """Status, standard output and standard error of a run."""

    def run(*arguments: object, **environ: str) -> tuple[int, str, str]:
        status = cli.main(["bench", *map(str, arguments)], environ)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def table_of(out: str) -> list[dict[int, str]]:
    """The rows of the one table that was printed, cells by number; its header first."""
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1, "the columns are aligned"
    assert set(lines[1]) == set("|:- ")
    rows = [lines[0], *lines[2:]]
    return [dict(enumerate(c.strip() for c in row.strip("|").split("|"))) for row in rows]


def test_latency(bench):
    with FakeServer() as fake:
        status, out, err = bench("latency", fake.url, *FEW)
    assert (status, err) == (0, "")
    assert out.startswith(f"{MODEL} at {fake.url}/v1\n")
    _, *rows = table_of(out)
    assert [row[0] for row in rows] == ["short", "medium", "long"]
    assert all(row[1] == "9" and row[2] == "2" for row in rows)
    assert all(re.fullmatch(r"\d+(\.\d)? ms", row[3]) for row in rows)
    assert "2 rounds after 1 of warm-up, answers of at most 4 tokens" in out
    assert "--seed 11." in out
    lengths = [len(body["messages"][0]["content"].split()) for body in fake.asked[1:]]
    assert len(lengths) == 3 * 3
    assert lengths[0] < 50 < 400 <= lengths[1] < 500 < 3000 <= lengths[2]


def test_concurrency(bench):
    with FakeServer() as fake:
        status, out, _ = bench("concurrency", fake.url, *FEW, "--prompts", "story")
    assert status == 0
    _, *rows = table_of(out)
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "16", "32"]
    assert len(fake.asked) == 1 + 3 * 63
    assert all("story" in body["messages"][0]["content"] for body in fake.asked[1:])


def test_compare(bench):
    with FakeServer() as one, FakeServer() as other:
        urls = (one.url, f"{other.url}/v1/")
        status, out, _ = bench("compare", *urls, *FEW, "--concurrency", "1,3", "--model", "b")
    assert status == 0
    assert out.startswith(f"A: b at {one.url}/v1\nB: b at {other.url}/v1\n")
    header, *rows = table_of(out)
    assert [row[0] for row in rows] == ["1", "3"]
    assert all(re.fullmatch(r"[\d.]+ \([\d.]+ to [\d.]+\)", row[3]) for row in rows)
    assert header[3] == header[6] == "B / A (range)"

    def questions(fake: FakeServer) -> list[str]:
        return sorted(body["messages"][0]["content"] for body in fake.asked)

    assert questions(one) == questions(other)


def test_two_models_and_two_keys_of_one_address(bench):
    with FakeServer(key="k") as fake:
        both = ("compare", fake.url, fake.url, *FEW, "--concurrency", "1")
        keys = ("--api-key", "k", "--api-key", "k")
        status, out, _ = bench(*both, *keys, "--model", "a", "--model", "b")
        assert status == 0
        assert "A: a at" in out and "B: b at" in out
        status, _, err = bench(*both, "--api-key", "k", "--api-key", "x")
        assert status == 1 and "401" in err
        status, _, err = bench(*both, *("--model", "m") * 3)
        assert status == 2
        assert err == "mlx-mtp: --model is given 3 times, for 2 server(s).\n"


def test_the_key_may_come_from_the_environment(bench):
    with FakeServer(key="k") as fake:
        command = ("concurrency", fake.url, *FEW, "--concurrency", "1")
        assert bench(*command, MLX_MTP_API_KEY="k")[0] == 0
        assert bench(*command, "--api-key", "k", MLX_MTP_API_KEY="x")[0] == 0
        status, out, err = bench(*command)
    assert (status, out) == (1, "")
    assert err.startswith("mlx-mtp: ") and "--api-key" in err
    assert err.count("\n") == 1


def test_files(bench, tmp_path):
    table, everything = tmp_path / "a.csv", tmp_path / "a.json"
    with FakeServer() as fake:
        command = ("compare", fake.url, fake.url, *FEW, "--concurrency", "1,2", "--api-key", "k")
        assert bench(*command, "--csv", table, "--json", everything)[0] == 0
    assert '"k"' not in everything.read_text()
    content = json.loads(everything.read_text())
    assert content["command"] == "bench compare"
    assert content["settings"]["seed"] == 11
    assert content["settings"]["urls"] == [fake.url] * 2
    # What was summarized can be read back, and the CSV says the same.
    summaries = [Summary(**s | {"split": Split(s["split"])}) for s in content["summaries"]]
    assert [(s.subject, s.concurrency) for s in summaries] == [
        *(("A", 1), ("A", 2), ("B", 1), ("B", 2))
    ]
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    written = [
        {k: "" if v is None else str(v) for k, v in dataclasses.asdict(s).items()}
        for s in summaries
    ]
    assert rows == written
    # Every figure can be computed anew from the waves.
    for summary in summaries:
        waves = [
            wave
            for wave in content["waves"]
            if (wave["subject"], wave["concurrency"]) == (summary.subject, summary.concurrency)
        ]
        assert [wave["round"] for wave in waves] == [0, 1]
        answers = [answer for wave in waves for answer in wave["answers"]]
        assert len(answers) == summary.answers
        assert sum(answer["num_tokens"] for answer in answers) == summary.tokens
        assert min(wave["rate"] for wave in waves) == summary.rate_min
        for wave in waves:
            assert min(answer["sent"] for answer in wave["answers"]) == 0
            ended = max(answer["ended"] for answer in wave["answers"])
            total = sum(answer["num_tokens"] for answer in wave["answers"])
            assert wave["rate"] == pytest.approx(total / ended)


def test_a_plot(bench, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "rates.png"
    with FakeServer() as fake:
        command = ("compare", fake.url, fake.url, *FEW, "--concurrency", "1,2,4")
        assert bench(*command, "--plot", path)[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_plot_without_matplotlib_fails_before_the_measurement(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with FakeServer() as fake:
        status, _, err = bench("concurrency", fake.url, "--plot", tmp_path / "x.png")
    assert status == 2
    assert err == "mlx-mtp: --plot needs matplotlib: pip install matplotlib.\n"
    assert not fake.asked


@pytest.mark.parametrize("flag", ["--csv", "--json", "--plot"])
def test_a_file_that_cant_be_written_fails_before_the_measurement(bench, tmp_path, flag):
    with FakeServer() as fake:
        for path in (tmp_path, tmp_path / "none" / "x"):
            status, _, err = bench("concurrency", fake.url, flag, path)
            assert status == 2
            assert err.startswith(f"mlx-mtp: {path} ")
    assert not fake.asked


def test_a_server_without_usage_is_told_so(bench):
    def chat(body):
        if "stream_options" in body:
            return refusal("unknown: stream_options")
        return plain_stream(body)

    with FakeServer(chat) as fake:
        status, out, _ = bench("latency", fake.url, *FEW, "--prompts", "short")
    assert status == 0
    assert "Note: the server sends no usage: its tokens are a count of chunks" in out
    assert table_of(out)[1][1] == "-"


def test_chunks_of_several_tokens_are_told_as_an_estimate(bench):
    def chat(_):
        return Reply([piece("a"), piece("b c d"), closing(), end(4), DONE])

    with FakeServer(chat) as fake:
        _, out, _ = bench("latency", fake.url, *FEW, "--prompts", "short")
    assert "Note: chunks hold several tokens and the server doesn't say how many" in out


def test_a_server_that_dies(bench):
    def chat(body):
        return plain_stream(body) if body["max_tokens"] == 8 else Reply([piece("a")], breaks=True)

    with FakeServer(chat) as fake:
        status, out, err = bench("concurrency", fake.url, *FEW)
    assert (status, out) == (1, "")
    assert err.startswith(f"mlx-mtp: {fake.url}/v1 ended an answer in the middle: ")
    assert err.count("\n") == 1
    # Its port is free now.
    status, _, err = bench("latency", fake.url)
    assert status == 1
    assert "Is the server running?" in err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["dance"],
        ["latency"],
        ["latency", "http://x", "--concurrency", "1"],
        ["latency", "http://x", "--plot", "x.png"],
        ["latency", "http://x", "--prompts", "short,huge"],
        ["concurrency", "http://x", "--concurrency", "1,0"],
        ["concurrency", "http://x", "--concurrency", ""],
        ["concurrency", "http://x", "--prompts", "short,long"],
        ["concurrency", "http://x", "--rounds", "0"],
        ["concurrency", "http://x", "--temperature", "-1"],
        ["concurrency", "http://x", "--timeout", "0"],
        ["compare", "http://x"],
        ["offline", "--depths", "9"],
        ["offline", "--depths", "0"],
        ["offline", "a", "b"],
    ],
)
def test_a_wrong_command_line_is_a_usage_error(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *argv], {})
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"mlx-mtp bench[a-z ]*: .+ \(see mlx-mtp bench[a-z ]* --help\)\n", error)


def test_an_address_without_its_scheme(bench):
    status, _, err = bench("latency", "127.0.0.1:8000")
    assert status == 2
    assert "it should look like http://127.0.0.1:8000" in err


def test_help_and_mistakes_load_nothing_heavy():
    code = """
import sys
from mlx_mtp import cli
for argv in (["--help"], ["latency", "--help"], ["offline", "--depths", "x"]):
    try:
        cli.main(["bench", *argv], {})
    except SystemExit:
        pass
heavy = {"mlx", "transformers", "fastapi", "httpx", "numpy", "pydantic", "matplotlib"}
sys.exit(", ".join(heavy & sys.modules.keys()) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the engine without HTTP" in done.stdout


def test_tables_are_aligned_markdown():
    assert render(["a", "bcd"], [["xyz", "1"], ["", "22"]]).splitlines() == [
        "| a   | bcd |",
        "| :-- | --: |",
        "| xyz |   1 |",
        "|     |  22 |",
    ]


def summary(subject: str, concurrency: int, **more: object) -> Summary:
    fields = {f.name: None for f in dataclasses.fields(Summary)} | {
        "subject": subject,
        "prompts": "short",
        "concurrency": concurrency,
        "split": Split.TOLD,
        "tokens_per_chunk": 1.0,
        "gap_p50": 0.1,
        "rate": 100.0,
        "num_drafts": 0,
        "num_accepted": 0,
        "retries": 0,
    }
    return Summary(**fields | more)


def test_contenders_stand_below_each_other():
    told = contenders_table(
        [
            summary("off", 1, rate_ratio=1.0),
            summary("off", 4, rate_ratio=1.0),
            summary("on", 1, rate=150.4, rate_ratio=1.504, num_drafts=10, num_accepted=10),
            summary("on", 4, rate=90.0, rate_ratio=0.9, num_drafts=30, num_accepted=20),
        ],
        "server",
    )
    header, off, on = table_of(told)
    assert list(header.values()) == ["server", "1 at once", "4 at once", "drafts accepted"]
    assert list(off.values()) == ["off", "100 (1.00)", "100 (1.00)", "-"]
    assert list(on.values()) == ["on", "150 (1.50)", "90 (0.90)", "75.0%"]


def test_notes_name_those_they_are_about():
    doubtful = {"split": Split.TEXT, "tokens_per_chunk": 0.5, "retries": 3}
    alone = footnotes([summary("A", 1, **doubtful), summary("A", 2, gap_p50=None)])
    assert [note.split(" ")[0] for note in alone] == ["chunks", "usage", "some", "3"]
    both = footnotes([summary(name, 1, split=Split.CHUNKS) for name in "AB"] + [summary("C", 1)])
    assert len(both) == 1
    assert both[0].startswith("A; B: the server sends no usage")
    assert footnotes([summary("A", 1)]) == []
