"""`mlx-mtp inspect`: the plan that `serve` would make, the model, its head and the next command."""

import argparse
import gc
import json
import re

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.build import plan_engine
from mlx_mtp.cli import main as cli
from mlx_mtp.console import size_text
from mlx_mtp.engine.memory import default_plan
from mlx_mtp.inspect.found import find_model
from mlx_mtp.inspect.memory import memory_demand
from mlx_mtp.machine import MemoryLimit
from mlx_mtp.models.loader import load_model
from mlx_mtp.options import SERVE_FLAGS
from mlx_mtp.settings import resolve
from tests.conftest import DEMO
from tests.support.checkpoints import write_source
from tests.support.fake_hub import FakeHub
from tests.support.foreign_values import STEERING, places, replaced, steers
from tests.support.tiny_models import FAMILIES, Layout, change_json, write_checkpoint

LAYOUT = Layout("qwen3_next")


@pytest.fixture
def run(monkeypatch, capsys):
    """Returns a function that runs a command: its printed rows by label, or its error."""
    monkeypatch.setattr("mlx_mtp.convert.commands.signal.signal", lambda *_: None)

    def run(*arguments: object, status: int = 0) -> dict[str, str]:
        capsys.readouterr()
        assert cli.main([str(a) for a in arguments], {}) == status
        shown = capsys.readouterr()
        return {"error": shown.err} if status else rows(shown.out)

    return run


def rows(said: str) -> dict[str, str]:
    return {line[:14].strip(): line[14:] for line in said.splitlines()}


def sizes(pattern: str) -> int:
    return sum(path.stat().st_size for path in DEMO.glob(pattern))


def test_the_bundled_model(run):
    told = run("inspect")
    assert told["model"] == str(DEMO)
    assert told["family"].startswith("qwen3_next: 8 layers, 2 of them with attention")
    assert told["quantization"] == "none"
    assert told["weights"] == f"{size_text(sizes('model*.safetensors'))} in 2 files"
    assert told["MTP head"].startswith("in model-00002-of-00002.safetensors: 2.6 MB")
    assert told["next"] == f"mlx-mtp serve {DEMO}"


def test_the_first_line_says_whether_it_fits(run):
    for limit, words in (
        ("8GB", "yes, in 8.0 GB (--memory-limit): context up to 65,536 tokens"),
        ("300MB", "yes, in 300.0 MB (--memory-limit): context up to "),
        ("40MB", "no. Not enough memory. Of 40.0 MB (--memory-limit) the weights take "),
        ("100MB", "no. Not enough memory: one request of 512 tokens needs "),
    ):
        told = run("inspect", "--memory-limit", limit)
        label, text = next(iter(told.items()))
        assert label == "fits" and text.startswith(words)
        assert told["next"].startswith("mlx-mtp serve") == words.startswith("yes")
        assert text.endswith(" of the model's 65,536 tokens") == (limit == "300MB")


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.full)])
def test_a_models_files_do_not_steer_the_terminal(tmp_path, capfd, every):
    """No escape sequence in the files' strings and names is printed, not even in an error."""
    for path in DEMO.glob("*.*"):
        (tmp_path / path.name).symlink_to(path)
    quantized = {"quantization": {"bits": 4, "group_size": 64, "mode": "affine"}}
    for name, changes in {
        "config.json": quantized,
        "generation_config.json": {},
        "tokenizer_config.json": {},
        "model.safetensors.index.json": {},
    }.items():
        document = json.loads((DEMO / name).read_text()) | changes
        if "weight_map" in document:
            document["weight_map"] = dict([document["weight_map"].popitem()])
        path = tmp_path / name
        path.unlink()
        path.write_text(json.dumps(document))
        versions = [replaced(document, place, STEERING) for place in places(document)]
        for key in ("quantization", "weight_map"):
            versions.append(document | {key: {STEERING: STEERING}})
        for version in versions[::every]:
            path.write_text(json.dumps(version))
            status = cli.main(["inspect", str(tmp_path)], {})
            shown = capfd.readouterr()
            assert not steers(shown.out + shown.err), version
            assert status == 0 or shown.err.splitlines()[-1].startswith("mlx-mtp: ")
        path.unlink()
        path.symlink_to(DEMO / name)


@pytest.mark.parametrize("nbytes", [300 * 10**6, 1_700 * 10**6, 8 * 10**9])
def test_the_plan_is_that_of_serve(nbytes):
    options = resolve(argparse.Namespace(memory_limit=nbytes), SERVE_FLAGS, {})
    loaded = load_model(DEMO, enable_mtp=True, lazy=True)
    demand = memory_demand(find_model(None), "auto")
    ours = default_plan(demand.footprint, MemoryLimit(nbytes, "--memory-limit"), demand.allowed)
    assert ours == plan_engine(loaded, options).memory


def test_a_model_without_and_with_a_sidecar(run, tmp_path):
    write_checkpoint(tmp_path, Layout("qwen3_5", with_head=False))
    change_json(
        tmp_path / "config.json",
        quantization={"bits": 4, "group_size": 64, "model.layers.1.x": {"bits": 8}},
    )
    write_source(tmp_path / "source", Layout("qwen3_5"))
    bare = run("inspect", tmp_path)
    assert bare["family"].endswith("dense")
    assert bare["quantization"].endswith("affine; 1 matrices differ")
    assert bare["MTP head"] == "none"
    assert "would refuse it" in bare["next"]
    assert bare["fits"].startswith("no, it can't be served. ") and "no tokenizer" in bare["fits"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    bare = run("inspect", tmp_path)
    assert bare["next"].startswith(f"mlx-mtp add-mtp-weights {tmp_path}; or")
    run("add-mtp-weights", tmp_path, "--source-model", tmp_path / "source")
    told = run("inspect", tmp_path)
    assert f"4 bits, affine; from {tmp_path / 'source'}, by mlx-mtp" in told["MTP head"]
    assert told["next"] == f"mlx-mtp serve {tmp_path}"
    assert told["per token"] != bare["per token"]
    assert ["with 1" in each["per window"] for each in (bare, told)] == [False, True]
    (tmp_path / "mtp.safetensors").write_bytes(b"")
    damaged = run("inspect", tmp_path)
    assert "can't be read" in damaged["MTP head"] and "mtp.safetensors" in damaged["fits"]


def test_a_missing_shard_is_named_in_the_first_line(run, tmp_path):
    write_source(tmp_path, Layout("qwen3_next"), shards=3)
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    label, text = next(iter(run("inspect", tmp_path).items()))
    assert label == "fits" and text.startswith("no, it can't be served. ")
    assert "model-00001-of-00003.safetensors" in text
    write_source(tmp_path, Layout("qwen3_next"), shards=3)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()  # the file with the head
    assert "00003.safetensors is missing" in run("inspect", tmp_path, status=2)["error"]


def test_the_memory_of_tokens_and_rows(run, tmp_path):
    """The figures equal those computed by hand; tests/cache/test_memory.py measures the memory."""
    write_checkpoint(tmp_path, LAYOUT)
    told = run("inspect", tmp_path, "--dtype", "bfloat16")
    layer = 2 * 2 * 32 * 2  # keys and values, heads, width, bytes
    state, tail = 2 * 4 * 32 * 32 * 4, 2 * 3 * (2 * 64 + 128) * 2
    conv_input, written = 2 * 256 * 2, 2 * (256 * 2 + 4 * 34 * 4)  # with deltas and gates
    for label, words in (
        ("per token", f"{2 * layer:,} bytes of the trunk's keys and values and {layer:,} of the "),
        ("per row", f"{state + tail + 4:,} bytes at any length: {state:,} recurrent state (float"),
        ("per window", f" {conv_input + 4:,} with 0, {2 * (conv_input + written) + 4:,} with 1, "),
    ):
        assert words in told[label]
    shape = memory_demand(find_model(str(tmp_path)), "bfloat16").footprint
    for count in (1, 16):
        assert told[f"{count} x 512"].startswith(f"{size_text(count * shape.row_bytes(512))}; ")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_shown_are_those_that_are_loaded(tmp_path, family):
    layout = Layout(family, stacked_experts=family == "qwen3_5_moe", dtype=mx.bfloat16)
    write_checkpoint(tmp_path, layout)
    shown = memory_demand(find_model(str(tmp_path)), "auto")
    loaded = load_model(tmp_path, enable_mtp=True)
    parameters = [value for _, value in tree_flatten(loaded.model.parameters())]
    weights = shown.footprint.weights + shown.footprint.head
    assert weights == sum(value.nbytes for value in parameters)
    assert shown.dtype == loaded.causal_lm.model.norm.weight.dtype


def test_no_weights_are_read_also_in_another_machines_type():
    """The plan of a MoE model in bfloat16, which no CPU can compute, reads no weights."""
    gc.collect()  # Memory left by earlier tests could be freed in between, and hide an increase.
    before = mx.get_active_memory()
    shown = memory_demand(find_model(None), "bfloat16")
    assert mx.get_active_memory() - before < 1_000_000
    assert shown.dtype == mx.bfloat16
    weights = shown.footprint.weights + shown.footprint.head
    assert 0 <= sizes("model*.safetensors") - weights < 100_000  # the files' headers


def test_the_files_sizes_stand_for_weights_that_cannot_be_loaded(run, tmp_path):
    write_checkpoint(tmp_path, LAYOUT)
    change_json(tmp_path / "config.json", num_hidden_layers=6)  # two of them have no tensors
    size = (tmp_path / "model.safetensors").stat().st_size
    told = run("inspect", tmp_path, "--dtype", "float16")
    assert told["memory"] == f"{size_text(size)} of weights as stored; computed in float16"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "llama" in run("inspect", tmp_path, status=2)["error"]


@pytest.mark.parametrize("head", ["inside", "beside"])
def test_on_the_hub_no_weights_are_downloaded(run, tmp_path, head):
    model = tmp_path / "model"
    write_source(model, Layout("qwen3_next", with_head=head == "inside"), shards=3)
    if head == "beside":
        (model / "mtp.safetensors").write_bytes(b"x" * 5000)
    (model / "README.md").write_text("---\nbase_model:\n- Qwen/Original\n---\n")
    with FakeHub.of("Some/Model", model).serve_here(tmp_path / "hub") as hub:
        told = run("inspect", "Some/Model", "--memory-limit", "8GiB")
        del hub.files["model-00001-of-00003.safetensors"]
        text = run("inspect", "Some/Model", "--memory-limit", "8GiB")["fits"]
        assert text.startswith("no, it can't be served. Some/Model has no model-00001-of-00003.saf")
        assert hub.downloaded == {"config.json", "model.safetensors.index.json"}
    assert told["fits"].startswith("yes, in 8.6 GB")
    if head == "inside":
        shards = sum(path.stat().st_size for path in model.glob("model-*"))
        assert told["weights"] == f"{size_text(shards)} in 3 files"
        assert told["MTP head"].startswith("in model-00002-of-00003.safetensors, model-00003")
    else:
        assert told["MTP head"] == "in mtp.safetensors: 5.0 kB"


def test_what_one_of_several_ranks_needs(run, tmp_path):
    alone, each = run("inspect"), run("inspect", "--ranks", 2)
    taken = [float(re.search(r"weights ([\d.]+) MB", told["shares"])[1]) for told in (alone, each)]
    assert 0.5 < taken[1] / taken[0] < 0.6, "the embedding is on both"
    assert each["next"].startswith("mlx.launch -n 2 -- mlx-mtp serve ")
    assert "can't be cut for 3 ranks" in run("inspect", "--ranks", 3, status=2)["error"]
