"""The command line: arguments, exit statuses, convert, and what is printed."""

import json

import pytest

from mlx_mtp.cli import main as cli
from mlx_mtp.convert import commands
from mlx_mtp.models.loader import load_model
from tests.conftest import DEMO
from tests.support.checkpoints import read_file, write_source
from tests.support.tiny_models import Layout


@pytest.fixture
def run(monkeypatch, capsys):
    """Returns a function that runs a command, expects its exit status and returns its output."""
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)

    def run(*arguments, status=0):
        assert cli.main([str(each) for each in arguments]) == status
        return "".join(capsys.readouterr())

    return run


def test_add_mtp_weights(run, pair):
    assert "add-mtp-weights needs a MODEL" in run("add-mtp-weights", status=2)
    arguments = ["add-mtp-weights", "--mlx-model-path", pair.target, "--source-model", pair.source]
    arguments += ["--bits", 8, "--group-size", 32, "--mode", "affine", "--mtp-norms", "hf"]
    assert f"mlx-mtp serve {pair.target}" in run(*arguments)
    assert (pair.metadata()["bits"], pair.metadata()["group_size"]) == ("8", "32")
    output = pair.target.parent / "output"
    assert f"mlx-mtp serve {output}" in run(*arguments, "--output", output)
    assert "mlx-mtp: --revision is for" in run(*arguments, "--revision", "v1", status=2)
    # A model that has its head is served unchanged.
    assert f"mlx-mtp serve {DEMO}" in run("add-mtp-weights", DEMO, "--output", output / "none")


def test_convert_makes_a_model_with_its_head_in_one_go(run, tmp_path):
    output = tmp_path / "made"
    said = run("convert", "--model", DEMO, "--output", output, "-q", "--bits", 8)
    assert f"mlx-mtp serve {output}" in said
    assert load_model(output, enable_mtp=True).head_source == "sidecar mtp.safetensors"
    assert json.loads((output / "config.json").read_text())["quantization"]["bits"] == 8
    assert read_file(output / "mtp.safetensors")[1]["bits"] == "8"
    assert "already exists" in run("convert", DEMO, "--output", output, status=2)


def test_convert_refuses_before_the_trunk_is_converted_and_leaves_nothing(run, tmp_path):
    options = ["--output", tmp_path / "made"]
    assert "need --quantize" in run("convert", DEMO, *options, "--bits", 4, status=2)
    write_source(tmp_path / "source", Layout("qwen3_next", with_head=False))
    assert "has no MTP head" in run("convert", tmp_path / "source", *options, status=2)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
