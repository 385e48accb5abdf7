"""Products of few rows, run as products of 8 where that is faster.

mlx's CUDA backend multiplies quantized weights with fewer than 8 rows one row at a time, which from
about 4 rows on takes longer than with 8 (measured: docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

_FEW_ROWS = 4
_FULL_ROWS = 8


def are_slow(config: Mapping[str, Any]) -> bool:
    """Whether that is so for a model with this config.json, on the device in use."""
    on_cuda = mx.cuda.is_available() and mx.default_device() == mx.gpu
    return on_cuda and "quantization" in config


def window_length(batch_size: int, length: int) -> int:
    """Positions a row that a window of `length` is run as; what is added means nothing."""
    few = _FEW_ROWS <= batch_size * length < _FULL_ROWS
    return -(-_FULL_ROWS // batch_size) if few else length


def filled(rows: mx.array) -> mx.array:
    """Rows [N, H] for so wide a matrix that it gains from 2 rows on; zeros come last."""
    more = _FULL_ROWS - rows.shape[0]
    return mx.pad(rows, [(0, more), (0, 0)]) if 0 < more < _FULL_ROWS - 1 else rows
