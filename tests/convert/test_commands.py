"""The command line: arguments, exit statuses, inspect, convert, and what is printed where."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.convert import commands
from mlx_mtp.convert.commands import add_subcommands
from mlx_mtp.convert.console import Console
from mlx_mtp.convert.memory import weights_in_memory, weights_on_disk
from mlx_mtp.errors import ConvertError, UnsupportedModelError, UsageError
from mlx_mtp.models.loader import load_model
from mlx_mtp.units import size_text
from tests.conftest import DEMO
from tests.convert.checkpoints import read_file, write_source, write_target
from tests.convert.fake_hub import FakeHub
from tests.tiny_models import FAMILIES, Layout, write_checkpoint

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
    assert "--source-model" in bare.stderr


def test_the_parser_is_there_before_mlx():
    code = (
        "import sys, mlx_mtp.convert.commands; "
        "sys.exit(any(m in sys.modules for m in ('mlx.core', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def rows(said: str) -> dict[str, str]:
    return {line[:14].strip(): line[14:] for line in said.splitlines()}


def test_inspect_the_bundled_model(run):
    status, said = run("inspect")
    told = rows(said)
    assert status == 0
    assert told["model"] == str(DEMO)
    assert told["family"].startswith("qwen3_next: 8 layers, 2 of them with attention")
    assert told["quantization"] == "none"
    size = sum(path.stat().st_size for path in DEMO.glob("model*.safetensors"))
    assert told["weights"] == f"{size_text(size)} in 2 file(s)"
    assert told["MTP head"].startswith("in model-00002-of-00002.safetensors: 2.6 MB")
    assert told["next"] == f"mlx-mtp serve {DEMO} --enable-mtp"


def test_inspect_a_model_without_and_with_a_sidecar(run, tmp_path):
    write_checkpoint(tmp_path, Layout("qwen3_5", with_head=False))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization"] = {"bits": 4, "group_size": 64, "model.layers.1.x": {"bits": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "README.md").write_text("---\nbase_model: Qwen/Original\n---\n")
    told = rows(run("inspect", tmp_path)[1])
    assert told["family"].endswith("dense")
    assert told["quantization"].endswith("affine; 1 matrices have their own")
    assert told["MTP head"] == "none"
    assert f"--mlx-model-path {tmp_path} --source-model Qwen/Original" in told["next"]
    without = told["per token"]
    assert "with 1" not in told["per window"]
    write_source(tmp_path / "source", Layout("qwen3_5"))
    arguments = ["--mlx-model-path", tmp_path, "--source-model", tmp_path / "source"]
    run("add-mtp-weights", *arguments)
    told = rows(run("inspect", tmp_path)[1])
    assert f"4 bits, affine; from {tmp_path / 'source'}, by mlx-mtp" in told["MTP head"]
    assert told["next"].endswith("--enable-mtp")
    assert told["per token"] != without
    assert "with 1" in told["per window"]
    (tmp_path / "mtp.safetensors").write_bytes(b"")
    assert "can't be read" in rows(run("inspect", tmp_path)[1])["MTP head"]


def test_inspect_tells_the_memory_of_tokens_and_rows(run, tmp_path):
    """Four layers, two with attention, and the head's own; tests/cache/test_memory.py measures."""
    write_checkpoint(tmp_path, LAYOUT)
    told = rows(run("inspect", tmp_path, "--dtype", "bfloat16")[1])
    layer = 2 * 2 * 32 * 2  # keys and values, heads, width, bytes
    assert told["per token"].startswith(f"{2 * layer:,} bytes of the trunk's keys and values and ")
    assert f"and {layer:,} of the head's; a row's room grows by 256 tokens" in told["per token"]
    state, tail = 2 * 4 * 32 * 32 * 4, 2 * 3 * (2 * 64 + 128) * 2
    assert f"{state:,} recurrent state (float32), {tail:,} convolution" in told["per row"]
    assert told["per row"].startswith(f"{state + tail + 8:,} bytes at any length")
    conv_input, written = 2 * 256 * 2, 2 * (64 * 2 + 4 * 33 * 4)
    assert (
        f" {conv_input + 4:,} with 0, {2 * (conv_input + written) + 4:,} with 1, "
        in (told["per window"])
    )
    # The model's context is shorter than the usual examples.
    assert {label for label in told if " x " in label} == {"1 x 512", "16 x 512", "rows x tokens"}
    window = 4 * (conv_input + written) + 4
    one = 768 * 3 * layer + state + tail + 8 + window  # room for 512 tokens and two windows
    assert told["1 x 512"].startswith(f"{size_text(one)}; ")
    assert told["16 x 512"].startswith(f"{size_text(16 * one)}; ")
    wide = rows(run("inspect", tmp_path, "--dtype", "float32")[1])
    assert wide["per token"].startswith(f"{4 * layer:,} bytes")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_told_are_those_that_are_loaded(tmp_path, family):
    layout = Layout(family, stacked_experts=family == "qwen3_5_moe", dtype=mx.bfloat16)
    write_checkpoint(tmp_path, layout)
    for has_head in (True, False):
        told = weights_in_memory(tmp_path, has_head=has_head, dtype="auto")
        loaded = load_model(tmp_path, enable_mtp=has_head)
        parameters = [value for _, value in tree_flatten(loaded.model.parameters())]
        assert told.nbytes == sum(value.nbytes for value in parameters)
        assert told.dtype == loaded.causal_lm.model.norm.weight.dtype


def test_inspect_reads_no_weights(tmp_path):
    before = mx.get_active_memory()
    assert weights_in_memory(DEMO, has_head=True, dtype="auto").nbytes > 20_000_000
    assert mx.get_active_memory() - before < 1_000_000


def test_inspect_tells_what_another_machine_would_take():
    """A mixture of experts in bfloat16, which no CPU computes."""
    told = weights_in_memory(DEMO, has_head=True, dtype="bfloat16")
    stored = sum(path.stat().st_size for path in DEMO.glob("model*.safetensors"))
    assert told.dtype == mx.bfloat16
    assert 0 <= stored - told.nbytes < 100_000  # the files' headers


def test_inspect_falls_back_on_the_files_sizes(run, tmp_path):
    write_checkpoint(tmp_path, LAYOUT)
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_hidden_layers"] = 6  # of which two have no tensors
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = (tmp_path / "model.safetensors").stat().st_size
    for dtype in ("float32", "float16"):
        told = rows(run("inspect", tmp_path, "--dtype", dtype)[1])
        assert told["memory"] == f"{size_text(size)} of weights as stored; computed in {dtype}"
    for where in ({"torch_dtype": "float16"}, {"text_config": {"dtype": "float16"}}):
        expected = mx.float32 if mx.default_device() == mx.cpu else mx.float16
        assert weights_on_disk(size, where, "auto").dtype == expected


def test_inspect_refuses_what_no_family_serves(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UnsupportedModelError, match="llama"):
        run("inspect", tmp_path)


@pytest.mark.parametrize("with_head", [True, False])
def test_inspect_on_the_hub_downloads_no_weights(tmp_path, with_head):
    write_source(tmp_path / "model", Layout("qwen3_next", with_head=with_head), shards=3)
    with FakeHub.of("Some/Model", tmp_path / "model").serve() as hub:
        code = (
            "from mlx_mtp.convert.inspect_model import inspect_model;"
            "print('\\n'.join(inspect_model('Some/Model')))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        told = rows(done.stdout)
        assert hub.downloaded == {"config.json", "model.safetensors.index.json"}
    shards = [size for name, size in sizes(tmp_path / "model").items() if name.startswith("model-")]
    if with_head:
        assert told["weights"] == f"{size_text(sum(shards))} in 3 file(s)"
        assert told["MTP head"].startswith("in model-00002-of-00003.safetensors, model-00003")
    else:
        assert told["MTP head"] == "none"


def sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.iterdir()}


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
    with pytest.raises(ConvertError, match="exists already"):
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
