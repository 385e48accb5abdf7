"""Checkpoints that users reported: FP8 releases, heads alone, and heads that came with a model."""

import contextlib
import json
import re
import resource
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.cli import main as cli
from mlx_mtp.config import EngineConfig
from mlx_mtp.convert.convert import add_head, convert_model
from mlx_mtp.convert.source import check_format_on_hub, find_source
from mlx_mtp.errors import CheckpointError, ConvertError, ModelError
from mlx_mtp.models.loader import load_model
from tests.conftest import DEMO
from tests.convert.test_kill import forked
from tests.support.cases import EOS
from tests.support.checkpoints import (
    encode_all,
    expected_head,
    read_file,
    write_file,
    write_source,
    write_target,
)
from tests.support.fake_hub import FakeHub
from tests.support.harness import MEASURED, Driver, greedy, request
from tests.support.tiny_models import FAMILIES, VOCAB, Layout, change_json, config_json, hf_tensors

NOT_CONVERTED = ("lm_head.weight", "embed_tokens.weight", "mtp.fc.weight", "in_proj_a.weight")
FP8 = {
    "qwen3_next, one by one": (Layout("qwen3_next"), 3),
    "qwen3_next, its head stacked": (Layout("qwen3_next", stacked_experts=True), 1),
    "dense": (Layout("qwen3_5"), 1),
    "dense, tied": (Layout("qwen3_5", tied=True), 4),
    "one by one": (Layout("qwen3_5_moe"), 4),
    "stacked": (Layout("qwen3_5_moe", stacked_experts=True), 1),
}
PLAIN = {"quantize": False, "flags": {}, "revision": None, "verify": False}
LONGEST_MESSAGE = 700


def add_tokenizer(path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, path)


def answers(path, depth: int) -> dict[str, list[int]]:
    model = load_model(path, enable_mtp=True, dtype="float32")
    config = EngineConfig(num_draft_tokens=depth)
    driver = Driver(model, vocab_size=VOCAB, stop_ids=(EOS,), config=config)
    for number in range(4):
        driver.add(request(f"r{number}", [5, 9, 2 + number, 33], greedy(16)))
    return driver.run()


@pytest.mark.parametrize("storage", ["FP8", pytest.param("BF16", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", FP8)
def test_what_is_converted_answers_as_the_original_in_float32(tmp_path, kind, storage):
    (layout, shards), source = FP8[kind], tmp_path / "source"
    meant = write_source(source, layout, storage, shards=shards, bf16=NOT_CONVERTED)
    add_tokenizer(source)
    convert_model(str(source), tmp_path / "made", dtype="float32", **PLAIN)
    write_source(tmp_path / "dequantized", layout, "F32")
    write_file(tmp_path / "dequantized" / "model.safetensors", meant)
    assert answers(tmp_path / "made", 3) == answers(tmp_path / "dequantized", 0)
    head = read_file(tmp_path / "made" / "mtp.safetensors")[0]
    for name, values in expected_head(meant).items():
        assert mx.array_equal(head[f"mtp.{name}"].astype(mx.bfloat16), values.astype(mx.bfloat16))
    assert "quantization_config" not in json.loads((tmp_path / "made/config.json").read_text())


def test_an_fp8_release_becomes_a_quantized_model_that_is_served(tmp_path, capsys):
    source, made = tmp_path / "source", tmp_path / "made"
    write_source(source, Layout("qwen3_5_moe"), "FP8", bf16=NOT_CONVERTED, shards=3)
    add_tokenizer(source)
    options = ["-q", "--bits", "8", "--group-size", "32"]
    assert cli.main(["convert", str(source), "--output", str(made), *options]) == 0
    said = capsys.readouterr().out
    assert said.index("Planned peak of memory") < said.index("Wrote mtp.safetensors")
    assert json.loads((made / "config.json").read_text())["quantization"]["bits"] == 8
    index = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == read_file(made / "model.safetensors")[0].keys()
    assert answers(made, 3) == answers(made, 0)
    # Its head alone can be added to a model that was converted elsewhere.
    target = write_target(tmp_path / "target", Layout("qwen3_5_moe"), {"bits": 4, "group_size": 32})
    add_head(str(target), str(source))
    assert read_file(target / "mtp.safetensors")[1]["bits"] == "4"


def without(*parts: str):
    def change(tensors: dict[str, mx.array]) -> None:
        for name in [name for name in tensors if any(part in name for part in parts)]:
            del tensors[name]

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("layers.0.mlp.experts.0.up_proj.weight_scale"), r"is FP8 and has no .*_scale_inv"),
        (without("mlp.experts.2."), r"expert 2 is missing|mlp\.experts\.2\."),
        (without("mlp.gate.weight"), "mlp-mtp|Missing"),
        (without("mtp."), "has no MTP head"),
        (lambda own: own.update({f"model.x{n}.weight": mx.zeros(1) for n in range(90)}), "others"),
    ],
)
def test_what_can_not_be_converted_is_named_briefly(tmp_path, capsys, change, words):
    source = tmp_path / "source"
    write_source(source, Layout("qwen3_5_moe"), "FP8")
    tensors, _ = encode_all(hf_tensors(Layout("qwen3_5_moe")), "FP8")
    change(tensors)
    write_file(source / "model.safetensors", tensors)
    add_tokenizer(source)
    assert cli.main(["convert", str(source), "--output", str(tmp_path / "made")]) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert re.search(words, said)
    assert len(said.replace(str(tmp_path), "")) < LONGEST_MESSAGE
    assert len(re.findall(r"[\w.]+\.(?:weight|gate_up_proj)\b", said)) <= 6
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_fp8_release_is_refused_with_the_command_that_makes_a_model_of_it(tmp_path):
    path = tmp_path / "Qwen3-Tiny-FP8"
    write_source(path, Layout("qwen3_next"), "FP8", bf16=NOT_CONVERTED)
    command = rf"is an FP8 release.*`mlx-mtp convert {path} -q --output Qwen3-Tiny-4bit`"
    for stated in (True, False):
        if not stated:
            change_json(path / "config.json", quantization_config=None)
        with pytest.raises(ModelError, match=command):
            load_model(path, enable_mtp=False)
    write_source(path, Layout("qwen3_next"), "FP8")
    with FakeHub.of("Qwen/Tiny-FP8", path).serve_here(tmp_path / "hub") as hub:
        with pytest.raises(ModelError, match="convert Qwen/Tiny-FP8 -q --output Tiny-4bit"):
            check_format_on_hub("Qwen/Tiny-FP8")
        assert hub.downloaded == {"config.json"}
    change_json(path / "config.json", quantization_config={"quant_method": "awq"})
    with pytest.raises(ConvertError, match=r"quantized \(awq\).*mlx-mtp convert ORIGINAL"):
        convert_model(str(path), tmp_path / "made", dtype=None, **PLAIN)


HEADS = {"4bit": {"bits": 4, "group_size": 32}, "bf16": {"bits": 16}, "mxfp8": {"mode": "mxfp8"}}


def write_head_alone(path, pair, layout: Layout, flags, metadata) -> dict[str, mx.array]:
    """Write a repository of a head alone, as MLX programs publish them; returns its tensors."""
    pair.write(layout)
    tensors = pair.convert(flags=flags)
    path.mkdir()
    config = {"model_type": "qwen3_5_mtp", "block_size": 3, "text_config": config_json(layout)}
    config["text_config"] = config["text_config"].get("text_config", config["text_config"])
    (path / "config.json").write_text(json.dumps(config))
    write_file(path / "model.safetensors", tensors, metadata)
    pair.sidecar.unlink()
    return tensors


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        pytest.param(kind, family, marks=() if one == two else pytest.mark.full)
        for one, kind in enumerate(HEADS)
        for two, family in enumerate(FAMILIES)
    ],
)
def test_a_head_alone_is_taken_as_it_is(pair, tmp_path, kind, family):
    metadata = {"format": "mlx"} if kind != "bf16" else {}
    path = tmp_path / f"Tiny-MTP-{kind}"
    tensors = write_head_alone(path, pair, Layout(family), HEADS[kind], metadata)
    pair.source = path
    got = pair.convert()
    assert got.keys() == tensors.keys()
    assert all(mx.array_equal(got[name], value) for name, value in tensors.items())
    assert pair.metadata()["source_norm_convention"] == "mlx"
    with pytest.raises(ModelError, match=r"head alone.*add-mtp-weights MODEL --source-model"):
        load_model(path, enable_mtp=False)
    # The file can also be placed beside the model.
    shutil.copy(path / "model.safetensors", pair.sidecar)
    pair.source = None
    assert "came with its head: nothing to do" in pair.run()


def test_heads_alone_are_preferred_where_they_are_known_and_there(pair, tmp_path):
    path = tmp_path / "alone"
    write_head_alone(path, pair, Layout("qwen3_5"), {"bits": 16}, {"format": "mlx"})
    model = "mlx-community/Qwen3.5-4B-MLX-8bit"
    with FakeHub.of("mlx-community/Qwen3.5-4B-MTP-bf16", path).serve_here(tmp_path / "hub"):
        assert find_source(model).name == "mlx-community/Qwen3.5-4B-MTP-bf16"
    with FakeHub.of("Qwen/Qwen3.5-4B", pair.source).serve_here(tmp_path / "other"):
        assert find_source(model).name == "Qwen/Qwen3.5-4B"


@pytest.mark.parametrize(
    ("place", "prefix", "metadata"),
    [
        ("mtp.safetensors", "mtp.", {"format": "mlx"}),
        ("mtp.safetensors", "language_model.mtp.", {"format": "mlx"}),
        ("mtp.safetensors", "", {}),
        ("mtp/weights.safetensors", "mtp.", {}),
        ("model-mtp.safetensors", "mtp.", {"format": "mlx"}),
        ("model-mtp.safetensors", "", {"format": "mlx"}),
        ("mtp.safetensors", "mtp.", {}),
    ],
)
@pytest.mark.parametrize("bits", [4, pytest.param(16, marks=pytest.mark.full)])
def test_a_head_that_came_with_a_model_is_served(pair, tmp_path, place, prefix, metadata, bits):
    pair.write(Layout("qwen3_5_moe"))
    tensors = pair.convert(flags={"bits": bits})
    write_source(tmp_path / "trunk", Layout("qwen3_5_moe"))
    add_tokenizer(tmp_path / "trunk")
    model = tmp_path / "model"
    convert_model(str(tmp_path / "trunk"), model, dtype="float32", **PLAIN)
    (model / "mtp.safetensors").unlink()
    (model / place).parent.mkdir(exist_ok=True)
    write_file(model / place, {prefix + name: v for name, v in tensors.items()}, metadata)
    if prefix == "mtp." and place == "mtp.safetensors" and not metadata:
        with pytest.raises(CheckpointError, match=r"add-mtp-weights .* --force"):
            load_model(model, enable_mtp=True)
        return
    got = dict(tree_flatten(load_model(model, enable_mtp=True, memory=1).head.parameters()))
    assert got.keys() == tensors.keys()
    for name in tensors:
        wanted = tensors[name]
        assert mx.array_equal(got[name].astype(wanted.dtype), wanted), name
    assert add_head(str(model), None) is None


def wide_tensors(layout: Layout) -> dict[str, mx.array]:
    """Returns an FP8 checkpoint with 8 M elements in an MLP's matrix or a stack of 32 experts."""
    tensors: dict[str, mx.array] = {}

    def add(name: str, *shape: int) -> None:
        tensors[name] = mx.random.randint(0, 120, shape).astype(mx.uint8)
        blocks = [-(-size // 128) for size in shape[-2:]]
        tensors[f"{name}_scale_inv"] = mx.full((*shape[:-2], *blocks), 0.01, mx.bfloat16)

    for name, value in hf_tensors(layout).items():
        prefix, _, part = name.partition("experts.")
        if part == "gate_up_proj":
            add(name, 32, 8192, 64)
        elif part == "down_proj":
            add(name, 32, 64, 4096)
        elif part.startswith("0."):
            for number in range(32):
                shape = [4096 if size == 32 else size for size in value.shape]
                add(f"{prefix}experts.{number}.{part[2:]}", *shape)
        elif name.endswith("mlp.gate.weight"):
            tensors[name] = mx.zeros((32, 64), mx.bfloat16)
        elif 96 in value.shape and ".mlp." in name:
            add(name, *(131072 if size == 96 else size for size in value.shape))
        elif not part:
            tensors[name] = mx.array(value).astype(mx.bfloat16)
    return tensors


def convert_and_measure(source: Path, output: Path) -> None:
    """Convert, and write the output and this process's peak memory to a file."""
    with (source / "said").open("w") as file, contextlib.redirect_stdout(file):
        assert cli.main(["convert", str(source), "--output", str(output), "-q"]) == 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        file.write(f"\npeak {peak * (1 if sys.platform == 'darwin' else 1024)}")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dense", "one by one", "stacked"])
def test_memory_stays_within_one_and_a_half_of_what_is_planned(tmp_path, kind):
    layout, source = FP8[kind][0], tmp_path / "source"
    sizes = {"num_experts": 32, "moe_intermediate_size": 4096}
    sizes = {"intermediate_size": 131072} if kind == "dense" else sizes
    config = config_json(layout)
    config["text_config"] |= sizes
    source.mkdir()
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps(config))
    write_file(source / "model.safetensors", wide_tensors(layout))
    add_tokenizer(source)
    assert forked(convert_and_measure, source, tmp_path / "made") == 0
    said = (source / "said").read_text()
    planned, in_use = re.search(r"peak of memory: ([\d.]+) MB, of which ([\d.]+) MB", said).groups()
    peak = int(re.search(r"peak (\d+)", said)[1]) / 1e6
    MEASURED.append(f"convert, {kind}: planned {planned} MB, measured {peak:.1f} MB")
    assert float(planned) - float(in_use) > 80  # torch uses up to 400 MB
    assert 0.5 * float(planned) < peak < 1.5 * float(planned)
