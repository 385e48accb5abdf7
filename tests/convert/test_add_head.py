"""`add_head`: a first run, a repeated one, a forced one, and every reason to refuse."""

import contextlib
import json
import re
import resource
import shutil

import mlx.core as mx
import pytest

from mlx_mtp.convert import convert as module
from mlx_mtp.convert.convert import add_head
from mlx_mtp.convert.files import SafetensorsFile, new_sidecar
from mlx_mtp.errors import CheckpointError, ConvertError, ModelError, UnsupportedModelError
from mlx_mtp.models.head_weights import read_sidecar
from mlx_mtp.models.loader import load_model
from tests.convert.conftest import FOUR, LAYOUT, snapshot
from tests.support.checkpoints import read_file, split_sidecar, write_file, write_target
from tests.support.tiny_models import Layout, write_checkpoint

EXPERT = "mtp.layers.0.mlp.experts.2.up_proj.weight"


def test_nothing_but_the_sidecar_is_written_and_its_header_says_how_it_was_made(pair):
    before = snapshot(pair.target)
    assert "wrote nothing" in pair.run(dry_run=True)
    assert snapshot(pair.target) == before
    assert "4 bits, groups of 64, affine" in pair.run()
    after = snapshot(pair.target)
    assert after.pop("mtp.safetensors")
    assert after == before
    metadata = pair.metadata()
    files = json.loads(metadata.pop("source_files"))
    assert list(files) == [f"model-0000{i}-of-00003.safetensors" for i in (2, 3)]
    table = json.loads(metadata.pop("quantization"))
    assert table["fc"] == FOUR
    assert table["layers.0.mlp.gate"]["bits"] == 8
    assert metadata.pop("created_by").startswith("mlx-mtp ")
    expected = {"format": "mlx", "mlx_mtp_format_version": "1", "source": str(pair.source)}
    expected |= {"source_norm_convention": "hf", "norm_convention": "mlx", "source_revision": ""}
    expected |= {"hidden_size": "64", "vocab_size": "96", "num_hidden_layers": "4"}
    assert metadata == expected | {name: str(value) for name, value in FOUR.items()}


def test_the_same_head_is_recognized_and_another_one_wants_force(pair, tmp_path):
    pair.run()
    # The head is recognized even if its source has moved.
    pair.source = shutil.move(pair.source, tmp_path / "moved")
    inode = pair.sidecar.stat().st_ino
    assert "nothing to do" in pair.run()
    assert pair.sidecar.stat().st_ino == inode
    pair.refused(ConvertError, "bits 4, not 8.*--force", flags={"bits": 8})
    pair.run(flags={"bits": 8}, force=True)
    shard = pair.source / "model-00003-of-00003.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    pair.refused(ConvertError, "other weights", flags={"bits": 8})
    pair.sidecar.write_bytes(b"damaged")
    pair.refused(ConvertError, "not made by this program.*--force")
    pair.run(force=True)


def test_an_older_sidecar_in_several_files_is_replaced_as_a_whole(pair):
    pair.run()
    split_sidecar(pair.target)
    assert "nothing to do" in pair.run()
    pair.run(force=True, flags={"bits": 8})
    assert [path.name for path in pair.target.glob("mtp*")] == ["mtp.safetensors"]
    assert read_sidecar(pair.target).tensors["fc.weight"].shape == (64, 128 * 8 // 32)


def test_output_is_a_model_of_links_and_the_model_is_left_alone(pair, tmp_path):
    write_checkpoint(pair.target, Layout("qwen3_next", with_head=False))
    before = snapshot(pair.target)
    output = tmp_path / "new" / "place"
    pair.run(output=output)
    assert snapshot(pair.target) == before
    assert (output / "config.json").samefile(pair.target / "config.json")
    assert load_model(output, enable_mtp=True).head is not None
    assert "nothing to do" in pair.run(output=output)
    (output / "config.json").unlink()
    (output / "config.json").write_text("{}")
    with pytest.raises(ConvertError, match="not the same file"):
        pair.run(output=output, force=True)
    # A target that has a head in its own files needs no other.
    write_checkpoint(pair.target, LAYOUT)
    assert "in its own files" in pair.run()
    assert not pair.sidecar.exists()


def test_a_mismatch_names_both_values_and_of_layers_is_a_warning(pair):
    theirs = json.loads((pair.source / "config.json").read_text())
    fields = {"hidden_size": 128, "vocab_size": 97, "num_attention_heads": 8, "head_dim": 16}
    fields |= {"num_key_value_heads": 1, "num_experts": 4, "moe_intermediate_size": 64}
    for field, value in fields.items():
        write_target(pair.target, LAYOUT, FOUR, **{field: value})
        pair.refused(ConvertError, f"{field} is {theirs[field]} in .* {value} in the model's")
    write_target(pair.target, LAYOUT, FOUR, num_hidden_layers=6)
    said = pair.run()
    assert all(words in said for words in ("warning: ", "has 4 layers", "has 6"))
    write_target(pair.target, Layout("qwen3_5"), FOUR)
    (pair.source / "config.json").unlink()
    pair.refused(ConvertError, "num_experts 0", force=True)


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ("mtp.", r"no MTP head.*'model\.language_model\.mtp\.'.*Qwen3-Coder-Next"),
        ("mtp.fc", r"Missing 1 parameters: fc\.weight"),
        ("mtp.layers.0.mlp.experts.3.up_proj", "expert 3 is missing"),
        # A pruned source: its stacks have fewer experts than either config says.
        ("mtp.layers.0.mlp.experts.5", r"does not fit.*\(6, .*\(5, "),
    ],
)
def test_what_is_missing_of_a_source_is_named(pair, part, match):
    pair.rewrite(lambda own: [own.pop(name) for name in list(own) if name.startswith(part)])
    pair.refused(ModelError, match)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("mtp.fc.weight", mx.zeros((64, 128), mx.int64), r"mtp\.fc\.weight .*type I64"),
        ("mtp.fc.qweight", mx.zeros(1, mx.int32), "a quantization that is not supported"),
        ("model.mtp.fc.weight", mx.zeros((64, 128)), "two heads"),
        ("mtp.extra.weight", mx.zeros((64, 128)), r"not in model: extra\.weight"),
        (EXPERT, mx.zeros((16, 64), mx.bfloat16), r"experts\.2\.up_proj.* shape \(16, 64\)"),
    ],
)
def test_a_tensor_that_is_wrong_is_refused_by_name(pair, name, value, match):
    pair.rewrite(lambda own: own.update({name: value}))
    pair.refused(ModelError, match)


def test_copies_of_the_trunk_are_left_out(pair):
    names = ("mtp.embed_tokens.weight", "mtp.shared_head.head.weight")
    pair.rewrite(lambda own: own.update(dict.fromkeys(names, own["lm_head.weight"])))
    assert pair.run().count("is left out, as the trunk's own is used") == 2
    assert not read_file(pair.sidecar)[0].keys() & set(names)


def test_a_packed_source_that_is_wrong_is_refused(pair, tmp_path):
    pair.run()
    tensors, metadata = read_file(pair.sidecar)
    pair.source, pair.target = pair.target, write_target(tmp_path / "second", LAYOUT)
    for scales, match in (((64, 3), "malformed"), ((63, 2), r"\(63, 2\)")):
        tensors["mtp.fc.scales"] = mx.zeros(scales, mx.bfloat16)
        write_file(pair.source / "mtp.safetensors", tensors, metadata)
        pair.refused(CheckpointError, match)


def test_a_truncated_a_missing_and_a_lying_shard(pair):
    shard = pair.source / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    pair.refused(CheckpointError, "truncated")
    shard.unlink()
    pair.refused(CheckpointError, "is missing, though")
    write_file(shard, {"other": mx.zeros(3)})
    pair.refused(CheckpointError, r"though model\.safetensors\.index\.json says so")
    (pair.source / "model.safetensors.index.json").write_text("{}")
    pair.refused(CheckpointError, r"index\.json can't be read")


def test_damaged_and_short_files_are_refused_by_name(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsFile(path)
    write_file(path, {"x": mx.zeros(6)})
    whole = path.read_bytes()
    tensor = SafetensorsFile(path).tensors["x"]
    for content in (b"", whole[:5], (500).to_bytes(8, "little") + b"{}", whole[:-1]):
        path.write_bytes(content)
        found = re.escape(f"{path} ({len(content)} bytes) is truncated, damaged or not")
        with pytest.raises(CheckpointError, match=found):
            SafetensorsFile(path)
    with pytest.raises(CheckpointError, match="truncated while"):
        tensor.read()


def test_targets_that_are_no_models_and_sources_that_are_none(pair):
    pair.refused(ConvertError, "--revision is for a hub id", revision="main")
    for name in ("no-such-directory", "a/b/c", "https://example.org/x"):
        with pytest.raises(ConvertError, match="neither an existing directory nor a hub id"):
            add_head(str(pair.target), name)
    config = pair.target / "config.json"
    config.write_text(json.dumps({"model_type": "llama"}))
    pair.refused(UnsupportedModelError, "qwen3_next")
    config.write_text(json.dumps({"model_type": "qwen3_next", "hidden_size": 64}))
    pair.refused(ConvertError, "config.json can't be used")
    config.unlink()
    pair.refused(ModelError, "no config.json")


@pytest.mark.parametrize(
    ("change", "bits", "said"),
    [
        (1.0, None, "equal to the trunk's."),
        (1.0, 4, "equal to the trunk's as far as 4 bits, groups of 32, affine can tell"),
        (1.0, 8, "equal to the trunk's as far as 8 bits, groups of 32, affine can tell"),
        (1.5, None, "different from the trunk's (relative error 33.3%)"),
        (1.5, 4, "different from the trunk's (relative error 3"),
        (None, None, "of shape (50, 64), the trunk's of (96, 64)"),
        (None, 4, "of shape (50, 64), the trunk's of (96, 8)"),
    ],
)
def test_copies_of_the_trunk_are_left_out_and_compared(pair, change, bits, said):
    """Copies are compared with the target's trunk, quantized or not, or else with the source's."""
    copies = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
    copies["shared_head.head"] = "lm_head"

    def add(own: dict[str, mx.array]) -> None:
        if bits:
            table = {"bits": bits, "group_size": 32}
            write_target(pair.target, LAYOUT, table)
            packed = {}
            for name in copies.values():
                names = (f"{name}.{part}" for part in ("weight", "scales", "biases"))
                packed |= zip(names, mx.quantize(own[f"{name}.weight"], **table))
            write_file(pair.target / "model.safetensors", packed)
        for name, trunk in copies.items():
            matrix = own[f"{trunk}.weight"]
            own[f"mtp.{name}.weight"] = matrix[:50] if change is None else matrix * change

    pair.rewrite(add)
    lines = [line for line in pair.run().splitlines() if "is left out" in line]
    assert len(lines) == 3
    assert all(said in line and ("warning" in line) == (change != 1.0) for line in lines)
    assert not [name for name in read_file(pair.sidecar)[0] if name[4:-7] in copies]
    # The checksums cover only the tensors that the head takes over.
    sums = pair.metadata()["source_files"]
    pair.rewrite(lambda own: None)
    pair.run(force=True)
    assert json.loads(sums).popitem()[1]["head_sha256"] in pair.metadata()["source_files"]


def test_copies_are_not_compared_without_a_trunk(pair):
    def keep_the_head(own: dict[str, mx.array]) -> None:
        own["mtp.lm_head.weight"] = own["lm_head.weight"]
        for name in [name for name in own if not name.startswith("mtp.")]:
            del own[name]

    pair.rewrite(keep_the_head)
    assert "trunk's own is used: not compared: " in pair.run()


def test_a_disk_too_small_is_noticed_before_anything_is_written(pair, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    pair.refused(ConvertError, "has 1.0 kB free; the head takes")


def test_a_file_too_large_for_the_process_leaves_nothing(pair):
    """A real write that the kernel refuses halfway changes nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        pair.refused(ConvertError, "can't be written: File too large.* Nothing was changed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_leftovers_of_a_killed_run_are_removed_and_those_of_a_running_one_kept(pair):
    killed, running = pair.target / ".mtp-1.tmp", pair.target / ".mtp-2.tmp"
    killed.write_bytes(b"half")
    with contextlib.suppress(KeyboardInterrupt), new_sidecar(pair.target, {}, dict, []) as path:
        assert not killed.exists()
        path.rename(running)  # as if another process were writing it
        pair.run()
        assert running.exists()
        raise KeyboardInterrupt
    running.unlink()
    assert sorted(snapshot(pair.target)) == ["config.json", "mtp.safetensors"]
