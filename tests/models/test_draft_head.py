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
from tests.tiny_models import VOCAB, Layout, write_checkpoint

IDS = (90, 3, 0, 41, 95, 12)
# How the layer is quantized, and the bytes of one of its rows.
FORMATS = {
    "float32": (None, 256),
    "bfloat16": (None, 128),
    "4 bit": ({"group_size": 32, "bits": 4}, 48),
    "8 bit": ({"group_size": 64, "bits": 8}, 72),
    "mxfp4": ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, 34),
}


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
def test_reduced_logits_are_rows_of_the_full_ones(tmp_path, tied, how):
    write_checkpoint(tmp_path, Layout("qwen3_5", tied=tied))
    model = load_model(tmp_path, enable_mtp=True)
    quantized, row_nbytes = FORMATS[how]
    name = "embed_tokens" if tied else "lm_head"
    if quantized:
        nn.quantize(model.causal_lm, class_predicate=lambda p, _: p.endswith(name) and quantized)
    layer = model.output_layer
    if how == "bfloat16":
        layer.weight = layer.weight.astype(mx.bfloat16)
    head = DraftHead(model, IDS)
    assert head.ids.tolist() == sorted(IDS)
    assert layer.weight.shape[0] == VOCAB, "the layer itself has changed"
    for name, value in head.layer.parameters().items():
        assert mx.array_equal(value, layer[name][head.ids])
        assert value.dtype == layer[name].dtype
    hidden = mx.random.normal((2, 3, 64), key=mx.random.key(1))
    reduced, full = model.logits(hidden, head.layer), model.logits(hidden)[..., head.ids]
    left, right = (np.array(a.astype(mx.float32)) for a in (reduced, full))
    # The order of the sums may differ.
    absolute, relative = (0.05, 0.01) if how == "bfloat16" else (1e-5, 1e-5)
    np.testing.assert_allclose(left, right, atol=absolute, rtol=relative)
    assert model.row_nbytes() == row_nbytes
    assert head.nbytes == len(IDS) * row_nbytes


def test_a_bias_goes_with_its_row_and_a_layer_without_rows_is_refused(tmp_path):
    write_checkpoint(tmp_path, Layout("qwen3_5"))
    model = load_model(tmp_path, enable_mtp=True)
    model.causal_lm.lm_head.bias = mx.arange(VOCAB).astype(mx.float32)
    head = DraftHead(model, IDS)
    assert head.layer(mx.zeros((1, 64))).tolist() == [[float(i) for i in sorted(IDS)]]
    layer = copy.copy(model.causal_lm.lm_head)
    layer.global_scale = mx.array(2.0)
    model.causal_lm.lm_head = layer
    with pytest.raises(ModelError, match=r"its global_scale is \[\] and not 96 rows"):
        DraftHead(model, IDS)
