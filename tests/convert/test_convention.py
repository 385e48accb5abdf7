"""1 is added to norms exactly once, depending on the head's origin and never on the values."""

import mlx.core as mx
import pytest

from mlx_mtp.errors import ConvertError
from tests.convert.conftest import LAYOUT
from tests.support.checkpoints import encode_all, expected_head, is_norm, write_file
from tests.support.tiny_models import hf_tensors

NORM = "pre_fc_norm_hidden.weight"
CONV = "model.layers.0.linear_attn.conv1d.weight"
CONVS = {"hf": {CONV: mx.zeros((8, 1, 4))}, "mlx": {CONV: mx.zeros((8, 4, 1))}}


@pytest.fixture
def head(pair):
    """Returns a function that writes a head with or without the 1, and returns its true norms."""
    expected = expected_head(encode_all(hf_tensors(LAYOUT))[1])

    def put(convention, metadata, beside=None, elsewhere=None):
        tensors = dict(CONVS.get(beside, {}))
        for name, values in expected.items():
            tensors[f"mtp.{name}"] = values - (is_norm(name) and convention == "hf")
        for path in pair.source.glob("*.safetensors*"):
            path.unlink()
        write_file(pair.source / "head.safetensors", tensors, metadata)
        if elsewhere:
            write_file(pair.source / "model.safetensors", CONVS[elsewhere], {"format": elsewhere})
        return {name: values for name, values in expected.items() if is_norm(name)}

    return put


def check(got, norms):
    assert len(norms) == 7
    for name, values in norms.items():
        assert mx.array_equal(got[name], values), name


@pytest.mark.parametrize(
    ("convention", "metadata", "where"),
    [
        ("hf", {"norm_convention": "hf"}, {"beside": "mlx"}),
        ("mlx", {"norm_convention": "mlx", "format": "pt"}, {"beside": "hf"}),
        # One program wrote both, so the trunk's layout beside the head overrides the format mark.
        *[(c, {"format": mark}, {"beside": c}) for c in ("hf", "mlx") for mark in ("mlx", "pt")],
        ("hf", {"format": "pt"}, {}),
        ("mlx", {"format": "mlx"}, {}),
        ("mlx", {"format": "mlx"}, {"elsewhere": "hf"}),
        ("hf", {}, {"elsewhere": "hf"}),
    ],
)
def test_the_files_say(pair, head, convention, metadata, where):
    norms = head(convention, metadata, **where)
    check(pair.convert(), norms)
    assert pair.metadata()["source_norm_convention"] == convention
    assert pair.metadata()["norm_convention"] == "mlx"


@pytest.mark.parametrize("metadata", [{}, {"norm_convention": "other"}])
@pytest.mark.parametrize("where", [{}, {"elsewhere": "mlx"}], ids=["alone", "beside an MLX trunk"])
def test_without_a_statement_the_flag_decides(pair, head, metadata, where):
    """Without a stated convention --mtp-norms is required, even beside a converted trunk."""
    norms = head("mlx", metadata, **where)
    pair.refused(ConvertError, r"--mtp-norms hf .*--mtp-norms mlx")
    if "norm_convention" not in metadata:
        check(pair.convert(mtp_norms="mlx"), norms)
        norms = head("hf", metadata, **where)
        check(pair.convert(mtp_norms="hf", force=True), norms)


def test_contradictions_are_errors(pair, head):
    head("mlx", {"norm_convention": "mlx"})
    pair.refused(ConvertError, "says hf, but the header", mtp_norms="hf")
    other = {"mtp.shared_head.head.weight": mx.zeros((8, 4))}
    write_file(pair.source / "other.safetensors", other, {"norm_convention": "hf"})
    pair.refused(ConvertError, "can't be determined")


def test_values_never_decide(pair):
    stored = mx.full(64, 1.0, mx.bfloat16)
    pair.rewrite(lambda tensors: tensors.update({f"mtp.{NORM}": stored}))
    assert mx.array_equal(pair.convert()[NORM], stored.astype(mx.float32) + 1)
