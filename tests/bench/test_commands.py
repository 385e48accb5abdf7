"""`mlx-mtp bench` as a whole: what is printed, what is written, and how it fails."""

import csv
import importlib.util
import json
import re

import pytest

from benchmarks.__main__ import main as benchmarks
from benchmarks.over_http import contenders
from mlx_mtp.bench.answer import Split, TimedAnswer
from mlx_mtp.bench.measure import Wave, summarize
from mlx_mtp.bench.report import footnotes
from mlx_mtp.cli import main as cli
from tests.bench import fake_server as fake
from tests.bench.fake_server import measured, piece, refusal

FEW = ("--rounds", "2", "--max-tokens", "4", "--seed", "11")


@pytest.fixture
def bench(capsys):
    """Returns a function that runs the command: exit status, standard output, standard error."""

    def run(*arguments, **environ):
        status = cli.main(["bench", *map(str, arguments)], environ)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_an_unknown_benchmark_is_named(capsys):
    for name, near in (("hots", "; did you mean host?"), ("nosuch", "")):
        assert benchmarks([name]) == 2
        fault = (
            f"benchmarks: There is no benchmark '{name}'{near} (python -m benchmarks lists all)\n"
        )
        assert capsys.readouterr() == ("", fault)
    assert benchmarks([]) == 0
    assert "\nhost " in capsys.readouterr().out


def table_of(out: str) -> list[list[str]]:
    """Returns the rows of the only printed table, header first."""
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1, "the columns are aligned"
    assert set(lines[1]) == set("|:- ")
    return [[c.strip() for c in row.strip("|").split("|")] for row in (lines[0], *lines[2:])]


def test_latency(serve, bench):
    server = serve()
    status, out, err = bench("latency", server.url, *FEW)
    assert status == 0 and err.splitlines()[-1].startswith("round 2 of 2: long, 1 at once, ")
    assert out.startswith(f"{fake.MODEL} at {server.url}/v1\n\n| prompts ")
    _, *rows = table_of(out)
    assert [row[0] for row in rows] == ["short", "medium", "long"]
    for row in rows:
        assert (row[1], row[2], row[8], row[10]) == ("9", "2", "1.00", "-")
        assert all(re.fullmatch(r"\d+(\.\d)? ms", cell) for cell in row[3:8])
    assert out.endswith(
        "\n\nRounds: 2, after 1 of warm-up; answers of at most 4 tokens; temperature 0; "
        "--seed 11.\n"
    )
    assert len(server.questions) == 1 + 3 * 3


def test_concurrency(serve, bench):
    server = serve()
    _, out, _ = bench("concurrency", server.url, *FEW, "--prompts", "story")
    _, *rows = table_of(out)
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "16", "32"]
    assert all(re.fullmatch(r"[\d.]+ to [\d.]+", row[2]) for row in rows)
    assert len(server.asked) == 1 + 3 * 63
    assert all("story" in text for text in server.questions[1:])


def test_compare(serve, bench):
    one, other = serve(key="k"), serve(key="l")
    both = ("compare", one.url, f"{other.url}/v1/", *FEW, "--concurrency", "1,3")
    keys = ("--api-key", "k", "--api-key", "l")
    status, out, _ = bench(*both, *keys, "--model", "b")
    assert status == 0
    assert out.startswith(f"A: b at {one.url}/v1\nB: b at {other.url}/v1\n")
    header, *rows = table_of(out)
    assert [row[0] for row in rows] == ["1", "3"]
    assert all(re.fullmatch(r"[\d.]+ \([\d.]+ to [\d.]+\)", row[i]) for row in rows for i in (3, 6))
    assert header[3] == header[6] == "B / A (range)"
    assert sorted(one.questions) == sorted(other.questions)
    status, _, err = bench(*both, *("--model", "m") * 3)
    assert (status, err) == (2, "mlx-mtp: --model is given 3 times, for 2 server(s).\n")


def test_the_key_may_come_from_the_environment(serve, bench):
    command = ("concurrency", serve(key="k,l").url, *FEW, "--concurrency", "1")
    assert bench(*command, MLX_MTP_API_KEY="k,l")[0] == 0
    assert bench(*command, "--api-key", "k,l", MLX_MTP_API_KEY="x")[0] == 0
    status, out, err = bench(*command)
    assert (status, out) == (1, "")
    assert re.fullmatch(r"mlx-mtp: .*401.*--api-key.*\n", err)


def test_files(serve, bench, tmp_path):
    shown, everything = tmp_path / "a.csv", tmp_path / "a.json"
    url = serve(key="secret").url
    command = ("compare", url, url, *FEW, "--concurrency", "1,2", "--api-key", "secret")
    assert bench(*command, "--csv", shown, "--json", everything)[0] == 0
    assert "secret" not in everything.read_text()
    content = json.loads(everything.read_text())
    assert (content["command"], content["settings"]["urls"]) == ("bench compare", [url] * 2)
    summaries = content["summaries"]
    with shown.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{k: "" if v is None else str(v) for k, v in s.items()} for s in summaries]
    # Every figure can be recomputed from the waves.
    waves = []
    for wave in content["waves"]:
        del wave["rate"]
        answers = tuple(TimedAnswer(**a | {"split": Split(a["split"])}) for a in wave["answers"])
        waves.append(Wave(**wave | {"answers": answers}))
    for ours, theirs in zip(summarize(waves, ["A", "B"], reference="A"), summaries, strict=True):
        assert ours == pytest.approx(theirs)


def test_a_plot(serve, bench, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path, server = tmp_path / "rates.png", serve()
    command = ("concurrency", server.url, *FEW, "--concurrency", "1,2", "--plot", path)
    assert bench(*command)[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    server.asked.clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, _, err = bench(*command)
    assert (status, err) == (2, "mlx-mtp: --plot needs matplotlib: pip install matplotlib.\n")
    assert not server.asked, "it fails before the measurement"


def test_a_file_that_cant_be_written_fails_before_the_measurement(serve, bench, tmp_path):
    server = serve()
    for flag in ("--csv", "--json", "--plot"):
        status, _, err = bench("concurrency", server.url, flag, tmp_path / "none" / "x")
        assert (status, err.startswith(f"mlx-mtp: {tmp_path}")) == (2, True)
    assert not server.asked


def test_notes_say_what_is_estimated(serve, bench):
    several = measured(piece("a"), piece("b c d"), fake.closing(), fake.end(4), fake.DONE)
    status, out, _ = bench("latency", serve(several).url, *FEW, "--prompts", "short")
    assert status == 0
    assert "\nNote: chunks hold several tokens and the server doesn't say how many" in out


def test_a_server_that_fails_or_is_not_there(serve, bench):
    broken = serve(lambda _: refusal("broken", 500))
    for url, status, words in (
        (broken.url, 1, r"mlx-mtp: http://fake-0/v1/\S+ answered 500: broken\.\n"),
        ("http://nobody", 1, r".*can't be reached: Connection refused. Is the server running\?\n"),
        ("127.0.0.1:8000", 2, ".*it should look like http://127.0.0.1:8000.*\n"),
    ):
        found, out, err = bench("latency", url, *FEW)
        assert (found, out) == (status, "")
        assert re.fullmatch(words, err)


def test_notes_name_those_they_are_about():
    def summary(subject: str, concurrency: int, **more: object) -> dict[str, object]:
        fields = {"split": Split.TOLD, "tokens_per_chunk": 1.0, "gap_p50": 0.1, "retries": 0}
        return {"subject": subject, "concurrency": concurrency, **fields, **more}

    doubtful = {"split": Split.TEXT, "tokens_per_chunk": 0.5, "retries": 3}
    alone = footnotes([summary("A", 1, **doubtful), summary("A", 2, gap_p50=None, retries=2)])
    assert [note.split(" ")[0] for note in alone] == ["chunks", "usage", "some", "5"]
    (both,) = footnotes([summary(name, 1, split=Split.CHUNKS) for name in "AB"] + [summary("C", 1)])
    assert both.startswith("A; B: the server sends no usage")
    assert footnotes([summary("A", 1)]) == []


def test_what_make_bench_starts_can_be_started(tmp_path):
    first, off, *mtp = contenders(tmp_path)
    assert first.name == "mlx_lm.server"
    assert (tmp_path / "float32" / "config.json").is_file()
    assert [c.name for c in mtp] == [*(f"MTP, k = {k}" for k in (1, 2, 3)), "MTP, auto"]
    for contender in (off, *mtp):
        start_of_ours = contender.command.index("mlx_mtp") + 1
        given = cli._parser().parse_args(contender.command[start_of_ours:])
        assert given.command == "serve"
        assert getattr(given, "enable_mtp", False) == (contender is not off)
