"""The norms get their 1 exactly once, by where a head comes from and never by their values."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.errors import ConvertError
from mlx_mtp.models.loader import load_model
from tests.convert.checkpoints import Raw, encode, encode_all, expected_head, write_file
from tests.tiny_models import Layout, hf_tensors

LAYOUT = Layout("qwen3_next")
NORM = "pre_fc_norm_hidden.weight"
CONV = "model.layers.0.linear_attn.conv1d.weight"
CONVS = {
    "hf": {CONV: Raw("BF16", np.zeros((8, 1, 4), np.uint16))},
    "mlx": {CONV: Raw("BF16", np.zeros((8, 4, 1), np.uint16))},
}


@pytest.fixture
def head(pair):
    """Writes a head alone in MLX's layout, with or without the 1; returns the true weight."""
    expected = expected_head(encode_all(hf_tensors(LAYOUT), "BF16")[1])

    def put(convention, metadata, beside=None, elsewhere=None):
        raws = dict(CONVS.get(beside, {}))
        for name, values in expected.items():
            is_norm = values.ndim == 1
            stored = values - (is_norm and convention == "hf")
            raws[f"mtp.{name}"] = encode(stored, "F32" if is_norm else "BF16")
        for path in pair.source.glob("*.safetensors*"):
            path.unlink()
        write_file(pair.source / "head.safetensors", raws, metadata)
        if elsewhere:
            write_file(pair.source / "model.safetensors", CONVS[elsewhere], {"format": elsewhere})
        return expected[NORM]

    return put


@pytest.mark.parametrize(
    ("convention", "metadata", "where"),
    [
        ("hf", {"norm_convention": "hf"}, {"beside": "mlx"}),
        ("mlx", {"norm_convention": "mlx", "format": "pt"}, {"beside": "hf"}),
        # Whoever wrote it turned both or neither; that counts before a mark in the header.
        *[(c, {"format": mark}, {"beside": c}) for c in ("hf", "mlx") for mark in ("mlx", "pt")],
        ("hf", {"format": "pt"}, {}),
        ("hf", {}, {"elsewhere": "hf"}),
    ],
)
def test_the_files_say(pair, head, convention, metadata, where):
    expected = head(convention, metadata, **where)
    np.testing.assert_array_equal(pair.convert()[NORM].bits, expected)
    assert pair.metadata()["source_norm_convention"] == convention
    assert pair.metadata()["norm_convention"] == "mlx"


@pytest.mark.parametrize("metadata", [{}, {"format": "mlx"}, {"norm_convention": "other"}])
@pytest.mark.parametrize("where", [{}, {"elsewhere": "mlx"}], ids=["alone", "beside an MLX trunk"])
def test_guessing_is_an_error(pair, head, metadata, where):
    """Even beside a converted trunk: raw heads are put there too."""
    head("mlx", metadata, **where)
    pair.refused(ConvertError, r"--mtp-norms hf .*--mtp-norms mlx")


@pytest.mark.parametrize("convention", ["hf", "mlx"])
@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"format": "mlx"}])
def test_the_flag_decides(pair, head, convention, metadata):
    expected = head(convention, metadata)
    got = pair.convert(mtp_norms=convention)
    np.testing.assert_array_equal(got[NORM].bits, expected)


def test_contradictions_are_errors(pair, head):
    head("mlx", {"norm_convention": "mlx"})
    pair.refused(ConvertError, "says hf, but the header", mtp_norms="hf")
    other = {"mtp.shared_head.head.weight": Raw("BF16", np.zeros((8, 4), np.uint16))}
    write_file(pair.source / "other.safetensors", other, {"norm_convention": "hf"})
    pair.refused(ConvertError, "can't be determined")


@pytest.mark.parametrize("mean", [0.27, 0.49, 1.0, -0.9])
def test_values_never_decide(pair, mean):
    """Zero-centred norms with means that look like anything get their 1."""
    stored = encode(np.full(64, mean, np.float32), "BF16")
    pair.rewrite(lambda raws: raws.update({f"mtp.{NORM}": stored}))
    expected = (stored.bits.astype(np.uint32) << 16).view(np.float32) + np.float32(1)
    np.testing.assert_array_equal(pair.convert()[NORM].bits, expected)


def test_the_one_is_added_without_a_loss_and_survives_the_loader(pair):
    """In BF16 1 + 0.0021 would be 1; here it is the float32 sum."""
    pair.write(LAYOUT)
    pair.run()
    sidecar = pair.source / "mtp.safetensors"
    sidecar.write_bytes(pair.sidecar.read_bytes())
    from_sidecar = load_model(pair.source, enable_mtp=True)
    assert from_sidecar.head_source == "sidecar mtp.safetensors"
    sidecar.unlink()
    from_files = load_model(pair.source, enable_mtp=True)
    one, other = (dict(tree_flatten(m.head.parameters())) for m in (from_sidecar, from_files))
    for name, value in other.items():
        assert mx.array_equal(one[name], value), name
