"""Rows of lm_head: the same logits as among all, whatever the layer is stored as."""

from __future__ import annotations

import copy

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mtp.errors import ModelError
from mlx_mtp.models.loaded import DraftHead
from mlx_mtp.models.loader import load_model
from tests.tiny_models import FAMILIES, VOCAB, Layout, write_checkpoint

IDS = (90, 3, 0, 41, 95, 12)
FORMATS = {
    "float32": None,
    "bfloat16": None,
    "4 bit": {"group_size": 32, "bits": 4},
    "8 bit": {"group_size": 64, "bits": 8},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
}


def stored_as(model, how: str) -> None:
    """Change lm_head, or the embedding it is tied to, in place."""
    tied = model.causal_lm.args.tie_word_embeddings
    if how == "bfloat16":
        layer = model.output_layer
        layer.weight = layer.weight.astype(mx.bfloat16)
    elif FORMATS[how]:
        wanted = "embed_tokens" if tied else "lm_head"
        nn.quantize(
            model.causal_lm, class_predicate=lambda path, _: path.endswith(wanted) and FORMATS[how]
        )


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_reduced_logits_are_rows_of_the_full_ones(tmp_path, family, tied, how):
    write_checkpoint(tmp_path, Layout(family, tied=tied))
    model = load_model(tmp_path, enable_mtp=True)
    stored_as(model, how)
    before = {k: v.shape for k, v in model.output_layer.parameters().items()}
    head = DraftHead(model, IDS)
    assert head.ids.tolist() == sorted(IDS)
    layer = model.output_layer
    assert {k: v.shape for k, v in layer.parameters().items()} == before
    for name, value in head.layer.parameters().items():
        assert mx.array_equal(value, layer[name][head.ids])
        assert value.dtype == layer[name].dtype
    hidden = mx.random.normal((2, 3, 64), key=mx.random.key(1))
    reduced, full = model.logits(hidden, head.layer), model.logits(hidden)
    assert reduced.shape == (2, 3, len(IDS))
    tolerance = 0.05 if how == "bfloat16" else 1e-5  # the order of the sums may differ
    np.testing.assert_allclose(
        np.array(reduced.astype(mx.float32)),
        np.array(full[..., head.ids].astype(mx.float32)),
        atol=tolerance,
        rtol=0.01 if how == "bfloat16" else 1e-5,
    )
    assert head.nbytes == len(IDS) * model.row_nbytes()
    size = {"float32": 256, "bfloat16": 128, "4 bit": 48, "8 bit": 72, "mxfp4": 34}
    assert model.row_nbytes() == size[how]


def test_a_bias_goes_with_its_row(tmp_path):
    write_checkpoint(tmp_path, Layout("qwen3_5"))
    model = load_model(tmp_path, enable_mtp=True)
    model.causal_lm.lm_head.bias = mx.arange(VOCAB).astype(mx.float32)
    head = DraftHead(model, IDS)
    assert head.layer(mx.zeros((1, 64))).tolist() == [[float(i) for i in sorted(IDS)]]


def test_a_layer_without_rows_is_refused(tmp_path):
    write_checkpoint(tmp_path, Layout("qwen3_5"))
    model = load_model(tmp_path, enable_mtp=True)
    layer = copy.copy(model.causal_lm.lm_head)
    layer.global_scale = mx.array(2.0)
    model.causal_lm.lm_head = layer
    with pytest.raises(ModelError, match=r"its global_scale is \[\] and not 96 rows"):
        DraftHead(model, IDS)
