"""The command line: arguments, exit statuses, convert, and what is printed where."""

from __future__ import annotations

import argparse
import json

import pytest

from mlx_mtp import cli
from mlx_mtp.convert import commands
from mlx_mtp.convert.target import MODES
from mlx_mtp.errors import ConvertError, UsageError
from mlx_mtp.models.loader import load_model
from tests.conftest import DEMO
from tests.convert.checkpoints import read_file, write_source
from tests.convert.conftest import LAYOUT
from tests.tiny_models import Layout


@pytest.fixture
def run(monkeypatch, capsys):
    """A command's status and what it printed."""
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)
    parser = argparse.ArgumentParser()
    commands.add_subcommands(parser.add_subparsers(dest="command"))

    def run(*arguments):
        options = parser.parse_args([str(a) for a in arguments])
        capsys.readouterr()
        return options.run(options), capsys.readouterr().out

    return run


def test_add_mtp_weights(run, pair, capsys):
    arguments = ["--mlx-model-path", pair.target, "--source-model", pair.source]
    arguments += ["--bits", 8, "--group-size", 32, "--mode", "affine", "--mtp-norms", "hf"]
    status, said = run("add-mtp-weights", *arguments)
    assert status == 0
    assert f"mlx-mtp serve {pair.target} --enable-mtp" in said
    assert (pair.metadata()["bits"], pair.metadata()["group_size"]) == ("8", "32")
    assert "Next" not in run("add-mtp-weights", *arguments, "--force", "--dry-run")[1]
    output = pair.target.parent / "output"
    _, said = run("add-mtp-weights", *arguments, "--output", output)
    assert f"mlx-mtp serve {output} --enable-mtp" in said
    assert (output / "mtp.safetensors").exists()
    with pytest.raises(ConvertError, match="--revision"):
        run("add-mtp-weights", *arguments, "--revision", "v1")
    assert cli.main(["add-mtp-weights", *map(str, arguments[:3]), "nowhere"]) == 2
    assert "mlx-mtp: 'nowhere' is neither" in capsys.readouterr().err


def test_convert_makes_a_model_with_its_head_in_one_go(run, tmp_path):
    assert tuple(MODES) == commands.MODE_NAMES
    output = tmp_path / "made"
    status, said = run("convert", DEMO, "--output", output, "-q", "--bits", 8)
    assert status == 0
    assert f"mlx-mtp serve {output}" in said
    assert load_model(output, enable_mtp=True).head_source == "sidecar mtp.safetensors"
    assert json.loads((output / "config.json").read_text())["quantization"]["bits"] == 8
    assert read_file(output / "mtp.safetensors")[1]["bits"] == "8"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    with pytest.raises(ConvertError, match="already exists"):
        run("convert", DEMO, "--output", output)


def test_convert_refuses_before_the_trunk_is_converted_and_leaves_nothing(run, tmp_path):
    with pytest.raises(UsageError, match="--quantize"):
        run("convert", DEMO, "--output", tmp_path / "made", "--bits", 4)
    sources = {
        "has no MTP head": (Layout("qwen3_next", with_head=False), "BF16"),
        r"quantized \(fp8\)": (LAYOUT, "FP8"),
        # mlx-lm knows the experts of this family's trunk only when they are stacked.
        "mlx-lm can't convert": (Layout("qwen3_5_moe"), "BF16"),
    }
    for match, (layout, storage) in sources.items():
        write_source(tmp_path / "source", layout, storage)
        with pytest.raises(ConvertError, match=match):
            run("convert", tmp_path / "source", "--output", tmp_path / "made")
        assert [path.name for path in tmp_path.iterdir()] == ["source"]
