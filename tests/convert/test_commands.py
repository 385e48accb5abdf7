"""The command line: arguments, exit statuses, convert, and what is printed where."""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_mtp.convert import commands
from mlx_mtp.convert.commands import add_subcommands
from mlx_mtp.convert.console import Console
from mlx_mtp.errors import ConvertError, UsageError
from mlx_mtp.models.loader import load_model
from mlx_mtp.units import size_text
from tests.conftest import DEMO
from tests.convert.checkpoints import read_file, write_source, write_target
from tests.tiny_models import Layout

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "add_mtp_weights.py"
LAYOUT = Layout("qwen3_next")


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_subcommands(parser.add_subparsers())
    return parser


@pytest.fixture
def run(parser, monkeypatch, capsys):
    """A command's status and what it printed."""
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)

    def run(*arguments: object) -> tuple[int, str]:
        options = parser.parse_args([str(a) for a in arguments])
        capsys.readouterr()
        status = options.run(options)
        return status, capsys.readouterr().out

    return run


def test_add_mtp_weights(run, tmp_path):
    write_source(tmp_path / "source", LAYOUT)
    write_target(tmp_path / "target", LAYOUT)
    status, said = run(
        *("add-mtp-weights", "--mlx-model-path", tmp_path / "target"),
        *("--source-model", tmp_path / "source", "--bits", 8, "--group-size", 32),
        *("--mode", "affine", "--mtp-norms", "hf"),
    )
    assert status == 0
    assert f"mlx-mtp serve {tmp_path / 'target'} --enable-mtp" in said
    metadata = read_file(tmp_path / "target" / "mtp.safetensors")[1]
    assert (metadata["bits"], metadata["group_size"]) == ("8", "32")


def test_the_script_works_alone(tmp_path):
    """Without the package on the path, and from any directory."""
    write_source(tmp_path / "source", LAYOUT)
    write_target(tmp_path / "target", LAYOUT)
    command = [sys.executable, "-P", str(SCRIPT), "--mlx-model-path", "target"]
    done = subprocess.run(
        [*command, "--source-model", "source"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "target" / "mtp.safetensors").exists()
    assert not done.stderr
    wrong = subprocess.run(
        [*command, "--source-model", "nowhere"], cwd=tmp_path, capture_output=True, text=True
    )
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("add_mtp_weights.py: 'nowhere' is neither")
    bare = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert bare.returncode == 2
    assert re.fullmatch(r"add_mtp_weights\.py: .* --source-model \(see .* --help\)\n", bare.stderr)


def test_the_parser_is_there_before_mlx():
    code = (
        "import sys, mlx_mtp.convert.commands; "
        "sys.exit(any(m in sys.modules for m in ('mlx.core', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_convert_makes_a_model_with_its_head_in_one_go(run, tmp_path):
    output = tmp_path / "made"
    status, said = run("convert", DEMO, "--output", output, "-q", "--bits", 8)
    assert status == 0
    assert f"mlx-mtp serve {output}" in said
    assert load_model(output, enable_mtp=True).head_source == "sidecar mtp.safetensors"
    config = json.loads((output / "config.json").read_text())
    assert config["quantization"]["bits"] == 8
    metadata = read_file(output / "mtp.safetensors")[1]
    assert metadata["bits"] == "8"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    with pytest.raises(ConvertError, match="already exists"):
        run("convert", DEMO, "--output", output)


def test_convert_refuses_before_the_trunk_is_converted(run, tmp_path):
    with pytest.raises(UsageError, match="--quantize"):
        run("convert", DEMO, "--output", tmp_path / "made", "--bits", 4)
    write_source(tmp_path / "none", Layout("qwen3_next", with_head=False))
    with pytest.raises(ConvertError, match="has no MTP head"):
        run("convert", tmp_path / "none", "--output", tmp_path / "made")
    write_source(tmp_path / "fp8", LAYOUT, "FP8")
    with pytest.raises(ConvertError, match=r"quantized \(fp8\)"):
        run("convert", tmp_path / "fp8", "--output", tmp_path / "made")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8", "none"]


def test_convert_that_fails_leaves_nothing(run, tmp_path):
    """mlx-lm knows the experts of this family's trunk only when they are stacked."""
    write_source(tmp_path / "source", Layout("qwen3_5_moe"))
    with pytest.raises(ConvertError, match="mlx-lm can't convert"):
        run("convert", tmp_path / "source", "--output", tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_where_a_terminal_is_and_lines_where_none_is():
    for err in (Terminal(), io.StringIO()):
        out = io.StringIO()
        with Console(out, err).progress("Working", 4000, 1000) as advance:
            for _ in range(3):
                advance(1000)
        if err.isatty():
            assert "\rWorking [" in err.getvalue()
            assert err.getvalue().endswith("\r")
            assert out.getvalue().startswith("Working: 3.0 kB in ")
        else:
            assert not err.getvalue()
            lines = out.getvalue().splitlines()
            assert lines[0] == "Working: 3.0 kB to do"
            assert lines[1:-1] == ["Working: 2.0 kB of 4.0 kB", "Working: 3.0 kB of 4.0 kB"]


def test_a_bar_is_cleared_when_the_work_fails():
    err, out = Terminal(), io.StringIO()
    with pytest.raises(RuntimeError), Console(out, err).progress("Working", 10):
        raise RuntimeError
    assert err.getvalue().endswith(" \r")
    assert not out.getvalue()


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (3.3e9, "3.3 GB"), (5e12, "5000.0 GB")],
)
def test_sizes_are_for_people(size, text):
    assert size_text(int(size)) == text
