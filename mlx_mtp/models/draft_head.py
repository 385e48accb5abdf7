"""A part of lm_head to draft with: the rows of a reduced draft vocabulary.

Most of a draft's cost is lm_head over all tokens, most of which hardly ever come. A draft that is
never made is only a draft less to be accepted: the model's own tokens are still drawn from all.
(The idea is FR-Spec's, arXiv:2502.14856.)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_mtp.errors import ModelError
from mlx_mtp.models.family import output_layer
from mlx_mtp.models.loaded import LoadedModel


class DraftHead:
    """Rows of the trunk's lm_head, or of the tied embedding, copied as they are stored.

    Quantization groups run along a row, so its packed weights, scales and biases are exact.

    Args:
        model: a loaded model.
        ids: the tokens, without duplicates and in range; any order.

    Attributes:
        ids: int32 [N], ascending, so that equal logits are ordered as among all.
        layer: [..., H] to logits [..., N] in the order of `ids`.

    Raises:
        ModelError: lm_head is of a kind that has no rows to select.
    """

    def __init__(self, model: LoadedModel, ids: Sequence[int]) -> None:
        self.ids = mx.array(sorted(ids), dtype=mx.int32)
        layer, vocab_size = output_layer(model.causal_lm), model.vocab_size
        # A shallow copy: parameters that are replaced there stay in the layer itself.
        self.layer = copy.copy(layer)
        for name, value in tree_flatten(layer.parameters()):
            if "." in name or value.ndim == 0 or value.shape[0] != vocab_size:
                raise ModelError(
                    f"No rows can be taken from lm_head: its {name} is {list(value.shape)} and not "
                    f"{vocab_size} rows. Draft without --mtp-draft-vocab."
                )
            self.layer[name] = value[self.ids]
        # Else every step would copy them anew.
        mx.eval(self.ids, self.layer.parameters())

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for _, value in tree_flatten(self.layer.parameters()))


def row_nbytes(model: LoadedModel) -> int:
    """Bytes of one token's row of lm_head. No weight is read."""
    parameters = tree_flatten(output_layer(model.causal_lm).parameters())
    return sum(value.nbytes // value.shape[0] for _, value in parameters)
