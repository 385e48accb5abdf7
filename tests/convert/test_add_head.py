"""One run, a second one, a forced one, and every reason to refuse."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from mlx_mtp.convert import add_head as module
from mlx_mtp.convert.add_head import Request, add_head
from mlx_mtp.convert.console import Console
from mlx_mtp.convert.output import SidecarWriter
from mlx_mtp.convert.quantization import Flags
from mlx_mtp.errors import CheckpointError, ConvertError, ModelError, UnsupportedModelError
from mlx_mtp.models.loader import load_model
from tests.convert.checkpoints import (
    Raw,
    bf16,
    encode_all,
    read_file,
    write_file,
    write_source,
    write_target,
)
from tests.tiny_models import Layout, hf_tensors, write_checkpoint

LAYOUT = Layout("qwen3_next")
FOUR = {"group_size": 64, "bits": 4, "mode": "affine"}


class Directories:
    """A source and a target, and what was said."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.source, self.target = root / "source", root / "target"
        self.sidecar = self.target / "mtp.safetensors"
        write_source(self.source, LAYOUT, shards=3)
        write_target(self.target, LAYOUT, FOUR)
        self._capsys = capsys

    def run(self, **options: object) -> str:
        """Run the converter; what it printed."""
        request = Request(str(self.target), str(self.source), **options)
        self._capsys.readouterr()
        add_head(request, Console())
        captured = self._capsys.readouterr()
        return captured.out + captured.err

    def refused(self, error: type[ModelError], match: str, **options: object) -> str:
        """Run it, expect this error and an unchanged directory."""
        before = snapshot(self.target)
        with pytest.raises(error, match=match) as caught:
            self.run(**options)
        assert snapshot(self.target) == before
        return str(caught.value)


def snapshot(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.fixture
def dirs(tmp_path, capsys) -> Directories:
    return Directories(tmp_path, capsys)


def test_header_says_how_it_was_made(dirs):
    dirs.run()
    _, metadata = read_file(dirs.sidecar)
    files = json.loads(metadata.pop("source_files"))
    assert list(files) == [f"model-0000{i}-of-00003.safetensors" for i in (2, 3)]
    for name, told in files.items():
        assert told["size"] == (dirs.source / name).stat().st_size
        assert len(told["head_sha256"]) == 64
        assert set(told["head_sha256"]) != {"0"}
    table = json.loads(metadata.pop("quantization"))
    assert table["fc"] == {"bits": 4, "group_size": 64, "mode": "affine"}
    assert table["layers.0.mlp.gate"]["bits"] == 8
    assert metadata.pop("created_by").startswith("mlx-mtp ")
    assert metadata == {
        "format": "mlx",
        "mlx_mtp_format_version": "1",
        "source": str(dirs.source),
        "source_revision": "",
        "source_norm_convention": "hf",
        "norm_convention": "mlx",
        "bits": "4",
        "group_size": "64",
        "mode": "affine",
        "hidden_size": "64",
        "vocab_size": "96",
        "num_hidden_layers": "4",
    }


def test_nothing_but_the_sidecar_is_written(dirs):
    before = snapshot(dirs.target)
    dirs.run()
    after = snapshot(dirs.target)
    assert after.pop("mtp.safetensors")
    assert after == before


def test_a_second_run_does_nothing_and_says_so(dirs):
    dirs.run()
    first = dirs.sidecar.stat()
    assert "nothing to do" in dirs.run()
    second = dirs.sidecar.stat()
    # Not all of it: to read a file may change when it was read.
    assert (second.st_ino, second.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)


def test_the_same_head_from_another_place_is_the_same(dirs, tmp_path):
    dirs.run()
    moved = shutil.move(dirs.source, tmp_path / "moved")
    dirs.source = moved
    assert "nothing to do" in dirs.run()


def test_another_head_wants_force(dirs):
    dirs.run()
    message = dirs.refused(ConvertError, "--force", flags=Flags(bits=8))
    assert "bits 4, not 8" in message
    dirs.run(flags=Flags(bits=8), force=True)
    assert read_file(dirs.sidecar)[1]["bits"] == "8"
    dirs.refused(ConvertError, "bits 8, not 4")


def test_other_weights_in_the_same_source_are_noticed(dirs):
    dirs.run()
    shard = dirs.source / "model-00003-of-00003.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    dirs.refused(ConvertError, "other weights")
    dirs.run(force=True)
    assert "nothing to do" in dirs.run()


def test_a_sidecar_of_unknown_origin_or_a_damaged_one_is_not_replaced(dirs):
    write_file(dirs.sidecar, {"mtp.x": Raw("U8", np.zeros(3, np.uint8))}, {})
    dirs.refused(ConvertError, "not made by this program")
    dirs.sidecar.write_bytes(b"nothing")
    dirs.refused(ConvertError, "--force")
    dirs.run(force=True)
    assert read_file(dirs.sidecar)[1]["mlx_mtp_format_version"] == "1"


def test_dry_run_tells_and_writes_nothing(dirs):
    before = snapshot(dirs.target)
    said = dirs.run(dry_run=True)
    assert "wrote nothing" in said
    assert "4 bits, groups of 64, affine" in said
    assert snapshot(dirs.target) == before


def test_output_is_a_model_of_links_and_the_model_is_left_alone(dirs, tmp_path):
    write_checkpoint(dirs.target, Layout("qwen3_next", with_head=False))
    before = snapshot(dirs.target)
    output = tmp_path / "new" / "place"
    dirs.run(output=output)
    assert snapshot(dirs.target) == before
    assert (output / "config.json").samefile(dirs.target / "config.json")
    assert load_model(output, enable_mtp=True).head is not None
    assert "nothing to do" in dirs.run(output=output)
    (output / "config.json").unlink()
    (output / "config.json").write_text("{}")
    with pytest.raises(ConvertError, match="not the same file"):
        dirs.run(output=output, force=True)


def test_a_target_with_a_head_in_its_own_files_needs_none(dirs):
    write_checkpoint(dirs.target, LAYOUT)
    assert "in its own files" in dirs.run()
    assert not dirs.sidecar.exists()
    dirs.run(force=True)
    assert dirs.sidecar.exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("hidden_size", 128), ("vocab_size", 97), ("head_dim", 16), ("num_experts", 4)],
        *[("num_attention_heads", 8), ("num_key_value_heads", 1), ("moe_intermediate_size", 64)],
    ],
)
def test_a_mismatch_names_both_values(dirs, field, value):
    write_target(dirs.target, LAYOUT, FOUR, **{field: value})
    message = dirs.refused(ConvertError, field)
    theirs = json.loads((dirs.source / "config.json").read_text())[field]
    assert f"{field} is {theirs}" in message
    assert f"{value} in the model's" in message


def test_tensors_that_contradict_their_own_config_are_named_with_both_shapes(dirs):
    """A pruned head: its router and its stacks have fewer experts than either config says."""
    raws, _ = encode_all(hf_tensors(LAYOUT), "BF16")
    pruned = {k: v for k, v in raws.items() if not k.startswith("mtp.layers.0.mlp.experts.5.")}
    gate = "mtp.layers.0.mlp.gate.weight"
    pruned[gate] = Raw("BF16", raws[gate].bits[:5])
    (dirs.source / "model.safetensors.index.json").unlink()
    for path in dirs.source.glob("*.safetensors"):
        path.unlink()
    write_file(dirs.source / "model.safetensors", pruned, {"format": "pt"})
    message = dirs.refused(CheckpointError, "does not fit")
    assert "(5, 64)" in message
    assert "(6, 64)" in message


def test_another_number_of_layers_is_a_warning(dirs):
    write_target(dirs.target, LAYOUT, FOUR, num_hidden_layers=6)
    said = dirs.run()
    assert "warning: " in said
    assert "4 layers" in said
    assert "has 6" in said


def test_a_mixture_of_experts_for_a_dense_trunk(dirs):
    dense = Layout("qwen3_5")
    write_target(dirs.target, dense, FOUR)
    (dirs.source / "config.json").unlink()
    dirs.refused(ConvertError, "num_experts 0")


def rewrite(dirs: Directories, change) -> None:
    """The source as one file, with its tensors changed."""
    raws, _ = encode_all(hf_tensors(LAYOUT), "BF16")
    change(raws)
    for path in dirs.source.glob("model*"):
        path.unlink()
    write_file(dirs.source / "model.safetensors", raws, {"format": "pt"})


def test_a_source_without_a_head_says_so_plainly(dirs):
    rewrite(dirs, lambda raws: [raws.pop(k) for k in list(raws) if "mtp." in k])
    message = dirs.refused(ConvertError, "has no MTP head")
    for part in ("'mtp.'", "'model.language_model.mtp.'", "Qwen3-Coder-Next", "REAM", "Check"):
        assert part in message


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (
            lambda raws: raws.pop("mtp.fc.weight"),
            CheckpointError,
            r"no tensor mtp\.fc\.weight \(expected shape \(64, 128\)\)",
        ),
        (
            lambda raws: raws.pop("mtp.layers.0.mlp.experts.3.up_proj.weight"),
            CheckpointError,
            "expert 3 is missing",
        ),
        (
            lambda raws: raws.pop("mtp.layers.0.mlp.shared_expert_gate.weight"),
            CheckpointError,
            "shared_expert_gate",
        ),
        (
            lambda raws: [
                raws.pop(k) for k in list(raws) if k.startswith("mtp.") and "shared" in k
            ],
            CheckpointError,
            "shared_expert",
        ),
        (
            lambda raws: raws.update({"mtp.fc.weight": Raw("I64", np.zeros((64, 128), "<i8"))}),
            CheckpointError,
            r"mtp\.fc\.weight .* type I64",
        ),
        (
            lambda raws: raws.update({"mtp.fc.weight": Raw("F8_E4M3", np.zeros((64, 128), "u1"))}),
            CheckpointError,
            r"is FP8 and has no mtp\.fc\.weight_scale_inv",
        ),
        (
            lambda raws: raws.update({"mtp.fc.qweight": Raw("U8", np.zeros((1,), "u1"))}),
            ConvertError,
            "a quantization that is not supported",
        ),
        (
            lambda raws: raws.update({"mtp.layers.1.x.weight": Raw("U8", np.zeros((1,), "u1"))}),
            ConvertError,
            "has 2 layers",
        ),
        (
            lambda raws: raws.update({"model.mtp.fc.weight": raws["mtp.fc.weight"]}),
            CheckpointError,
            "two heads",
        ),
        (
            lambda raws: raws.update({"mtp.extra.weight": raws["mtp.fc.weight"]}),
            CheckpointError,
            r"no place for: mtp\.extra\.weight",
        ),
        (
            lambda raws: raws.update(
                {
                    "mtp.layers.0.mlp.experts.2.up_proj.weight": Raw(
                        "BF16", bf16(np.zeros((16, 64), np.float32))
                    )
                }
            ),
            CheckpointError,
            r"experts\.2\.up_proj\.weight has shape \(16, 64\)",
        ),
    ],
)
def test_a_source_that_is_wrong_is_refused_by_name(dirs, change, error, match):
    rewrite(dirs, change)
    dirs.refused(error, match)


def test_a_truncated_a_missing_and_a_lying_shard(dirs):
    shard = dirs.source / "model-00003-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    dirs.refused(CheckpointError, "truncated")
    shard.unlink()
    dirs.refused(CheckpointError, "is missing, though")
    write_file(shard, {"other": Raw("U8", np.zeros(3, np.uint8))}, {"format": "pt"})
    dirs.refused(CheckpointError, "though model.safetensors.index.json says so")
    (dirs.source / "model.safetensors.index.json").write_text("{}")
    dirs.refused(CheckpointError, "index.json can't be read")


def test_targets_that_are_no_models(dirs):
    config = dirs.target / "config.json"
    config.write_text(json.dumps({"model_type": "llama"}))
    dirs.refused(UnsupportedModelError, "qwen3_next")
    config.write_text(json.dumps({"model_type": "qwen3_next", "hidden_size": 64}))
    dirs.refused(ConvertError, "not complete")
    config.unlink()
    dirs.refused(ModelError, "no config.json")


@pytest.mark.parametrize("name", ["no-such-directory", "a/b/c", "https://example.org/x"])
def test_sources_that_are_neither_directory_nor_hub_id(dirs, name):
    dirs.source = Path(name)
    with pytest.raises(ConvertError, match="neither an existing directory nor a hub id"):
        add_head(Request(str(dirs.target), name), Console())


def test_revision_is_for_the_hub(dirs):
    dirs.refused(ConvertError, "--revision is for a hub id", revision="main")


def test_a_disk_too_small_is_told_before_anything_is_written(dirs, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    dirs.refused(ConvertError, "has 1.0 kB free; the head takes")


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "disk is full"), (errno.EACCES, "may not write"), (errno.EIO, "error")],
)
def test_a_disk_that_fails_half_way_leaves_nothing(dirs, monkeypatch, number, words):
    calls = 0

    def fail(self: SidecarWriter, name: str, row: int, data: np.ndarray) -> None:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise OSError(number, os.strerror(number))
        original(self, name, row, data)

    original = SidecarWriter.write
    monkeypatch.setattr(SidecarWriter, "write", fail)
    message = dirs.refused(ConvertError, "Nothing was changed")
    assert words in message


def test_a_file_too_large_for_the_process_leaves_nothing(dirs):
    """A real failing write: the kernel refuses it."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        dirs.refused(ConvertError, "can't be written")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(dirs):
    dirs.target.chmod(0o555)
    dirs.refused(ConvertError, "--output")


def test_files_of_many_sizes_are_committed_by_their_index(dirs):
    """Sharding, and the way back to one file."""
    write_checkpoint(dirs.target, Layout("qwen3_next", with_head=False))
    dirs.run()
    single = snapshot(dirs.target)
    dirs.run(force=True, max_file_bytes=40_000)
    names = sorted(path.name for path in dirs.target.glob("mtp*"))
    assert "mtp.safetensors" not in names
    assert "mtp.safetensors.index.json" in names
    shards = [name for name in names if name.endswith(".safetensors")]
    assert len(shards) > 2
    assert all((dirs.target / name).stat().st_size < 50_000 for name in shards)
    together = {}
    for name in shards:
        tensors, metadata = read_file(dirs.target / name)
        together |= tensors
        assert metadata["norm_convention"] == "mlx"
    whole = {name: raw.bits.tobytes() for name, raw in together.items()}
    assert "nothing to do" in dirs.run(max_file_bytes=40_000)
    assert load_model(dirs.target, enable_mtp=True).head is not None
    dirs.run(force=True)
    assert [path.name for path in dirs.target.glob("mtp*")] == ["mtp.safetensors"]
    assert dirs.sidecar.read_bytes() == single["mtp.safetensors"]
    tensors, _ = read_file(dirs.sidecar)
    assert {name: raw.bits.tobytes() for name, raw in tensors.items()} == whole


def test_leftovers_of_a_killed_run_are_removed_and_those_of_a_running_one_kept(dirs):
    (dirs.target / ".mtp-1-0.tmp").write_bytes(b"half")
    write_target(dirs.target, LAYOUT, FOUR)
    with SidecarWriter(dirs.target, [], {}) as running:
        assert not (dirs.target / ".mtp-1-0.tmp").exists()
        mine = list(dirs.target.glob(".mtp-*.tmp"))
        assert len(mine) == 1
        mine[0].rename(dirs.target / ".mtp-2-0.tmp")  # as of another process
        dirs.run()
        assert (dirs.target / ".mtp-2-0.tmp").exists()
        assert running is not None
    (dirs.target / ".mtp-2-0.tmp").unlink()
    assert sorted(p.name for p in dirs.target.iterdir()) == ["config.json", "mtp.safetensors"]
