"""The cuts of a batch's rows, each as cheaply as it can be made exactly.

`processors.truncate` says which tokens stay. It sorts the vocabulary, which costs more than all
else that is done to the logits. A row with a small top_k needs only its largest values in order,
one with nothing but min_p only the largest; top_p alone needs the sort.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_mtp.sampling.largest import largest
from mlx_mtp.sampling.params import SamplingParams
from mlx_mtp.sampling.processors import keep_from, min_p_threshold, threshold

_MIN_ORDERED = 128
_MAX_ORDERED = 2048
_ALL, _ONE = 0, 1


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are cut in the same way.

    Args:
        num_ordered: how many of the largest values are put in order, or `_ALL`, or `_ONE`.
        rows: int32 [R]; None for all rows of the batch.
        top_k, top_p, min_p: [R, 1, 1], as for `processors.truncate`.
    """

    num_ordered: int
    rows: mx.array | None
    top_k: mx.array
    top_p: mx.array
    min_p: mx.array

    def threshold(self, logits: mx.array) -> mx.array:
        """The least logit that stays, of logits [R, T, V]: float32 [R, T, 1]."""
        if self.num_ordered == _ONE:
            return min_p_threshold(mx.max(logits, axis=-1, keepdims=True), self.min_p)
        top_k = mx.minimum(self.top_k, logits.shape[-1])
        if self.num_ordered == _ALL:
            ordered = mx.sort(logits, axis=-1)[..., ::-1]
            return threshold(ordered, top_k, self.top_p, self.min_p)
        ordered = largest(logits, self.num_ordered)
        return threshold(ordered, top_k, self.top_p, self.min_p, everything=logits)


class Truncation:
    """The cuts of B rows. False if no row is cut.

    Args:
        params: one per row; greedy ones are not cut.
        vocab_size: V.
    """

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int) -> None:
        rows: dict[int, list[int]] = {}
        for row, p in enumerate(params):
            if p.truncates and not p.greedy:
                # By the row's own parameters: its tokens must not depend on its neighbours.
                rows.setdefault(_num_ordered(p), []).append(row)
        self._groups = [
            _Group(
                num_ordered,
                None if len(chosen) == len(params) else mx.array(chosen, dtype=mx.int32),
                _column([min(params[i].top_k or vocab_size, vocab_size) for i in chosen]),
                _column([params[i].top_p for i in chosen]),
                _column([params[i].min_p for i in chosen]),
            )
            for num_ordered, chosen in rows.items()
        ]

    def __bool__(self) -> bool:
        return bool(self._groups)

    def apply(self, logits: mx.array) -> mx.array:
        """Set what is cut to minus infinity: float32 [B, T, V or less], divided by temperature."""
        if self._groups and self._groups[0].rows is None:
            return keep_from(logits, self._groups[0].threshold(logits))
        least = mx.full((*logits.shape[:-1], 1), -mx.inf)
        for group in self._groups:
            least[group.rows] = group.threshold(logits[group.rows])
        return keep_from(logits, least)


def _num_ordered(p: SamplingParams) -> int:
    """Twice top_k at least, as many logits in bfloat16 may tie with the last one."""
    if 0 < 2 * p.top_k <= _MAX_ORDERED:
        return max(_MIN_ORDERED, 1 << (2 * p.top_k - 1).bit_length())
    return _ONE if p.top_k == 0 and p.top_p >= 1.0 else _ALL


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values))[:, None, None]
